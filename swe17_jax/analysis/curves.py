"""Curves of a run: metric rows in, SVG text out.

The SVG is meant to stand inside a page: text and axes take the page's own
colour (`currentColor`), so it reads on light and on dark ground, and the same
rows give the same bytes. Needs matplotlib (extra `trainer`); no display and no
global figure is used.

A line breaks, and a grey band stands, where steps are missing.
"""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swe17_jax.analysis.heldout import SolveRate

INK = '#010203'  # replaced by the page's text colour
# Mid tones that stand out on white and on near black alike.
COLORS = ('#3584d4', '#dd7a2b', '#3c9d5d', '#a367c9')
LOG_FLOOR = 1e-9  # where a log axis draws smaller values, zero included
FEW_POINTS = 60  # up to here every point is marked
WIDTH, PANEL_HEIGHT = 5.2, 1.9  # inches, of one panel

_STYLE = {
  'svg.fonttype': 'none',
  'font.family': 'sans-serif',
  'font.size': 9,
  'text.color': INK,
  'axes.labelcolor': INK,
  'axes.edgecolor': INK,
  'xtick.color': INK,
  'ytick.color': INK,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.color': INK,
  'grid.alpha': 0.12,
  'lines.linewidth': 1.3,
  'legend.frameon': False,
  'legend.fontsize': 8,
  'path.simplify_threshold': 0.5,  # pixels; keeps long runs small
}


@dataclasses.dataclass(frozen=True)
class Panel:
  """One pair of axes."""

  label: str  # of the y axis
  lines: Mapping[str, str]  # metric -> name in the legend
  log: bool = False
  limit: float | None = None  # drawn as a dashed line
  unit: str = ''  # of an axis with prefixes (k, M)
  top: float | None = None  # of the y axis, which then begins at 0


@dataclasses.dataclass(frozen=True)
class Plot:
  """A figure of the page, drawn or not."""

  title: str
  note: str
  absent: tuple[str, ...]  # metrics without one finite value
  svg: str = ''  # '' if nothing was recorded


# Title, note and panels of the plots that show no limit.
_UNLIMITED = (
  (
    'Staleness',
    'Trainer step minus the weight_version of the sampled tokens.',
    [
      Panel(
        'versions',
        {'train/staleness': 'mean', 'train/staleness_max': 'largest'},
      )
    ],
  ),
  (
    'Length',
    'Means over the trajectories of a step.',
    [
      Panel('sampled tokens', {'rollout/sampled_tokens': 'sampled tokens'}),
      Panel('turns', {'rollout/turns': 'turns'}),
    ],
  ),
  (
    'Weight deltas',
    'What goes to the engines, and the part of the parameters that differs.',
    [
      Panel('delta', {'weights/delta_bytes': 'delta'}, unit='B'),
      Panel('changed fraction', {'weights/changed_fraction': 'changed'}),
    ],
  ),
  (
    'Fractions',
    'Groups whose rewards differ; sampled tokens whose importance ratio was '
    'truncated; sampled tokens whose sampling mask held only themselves.',
    [
      Panel(
        'fraction',
        {
          'train/informative_groups': 'informative groups',
          'train/truncated_fraction': 'truncated tokens',
          'train/singleton_fraction': 'singleton masks',
        },
        top=1.0,
      )
    ],
  ),
  (
    'Throughput',
    'Step and wait are seconds of the trainer; it waits for groups.',
    [
      Panel('tokens per second', {'train/tokens_per_s': 'tokens'}),
      Panel('seconds', {'train/step_s': 'step', 'train/wait_s': 'wait'}),
    ],
  ),
  (
    'Gradient and largest mismatch',
    'Norm before clipping; the largest |log ratio| of one token between '
    'engine and trainer under the same weights.',
    [
      Panel('gradient norm', {'train/grad_norm': 'norm'}),
      Panel('|log ratio|', {'train/mismatch_max': 'largest'}),
    ],
  ),
)


def plots(
  rows: Sequence[Mapping[str, Any]],
  *,
  missing: Sequence[int],
  solve_rates: Mapping[int, SolveRate],
  entropy_floor: float | None,
  mismatch_limit: float,
) -> list[Plot]:
  """Draws the curves of a run.

  Args:
    rows: what `core.metrics.read` returned.
    missing: steps without a row.
    solve_rates: weight_version -> held-out result.
    entropy_floor: drawn as a line; None = unknown.
    mismatch_limit: drawn as a line.

  Raises:
    ModuleNotFoundError: matplotlib is not installed.
  """
  drawn = [_reward(rows, missing, solve_rates)]
  limited = _limited(entropy_floor, mismatch_limit)
  for title, note, panels in (*limited, *_UNLIMITED):
    names = [name for panel in panels for name in panel.lines]
    found = {name: series(rows, name, missing=missing) for name in names}
    absent = tuple(n for n in names if not np.isfinite(found[n][1]).any())
    panels = [p for p in panels if not set(p.lines) <= set(absent)]
    svg = _figure(title, panels, found, missing) if panels else ''
    drawn.append(Plot(title, note, absent, svg))
  return drawn


def _limited(entropy_floor, mismatch_limit):
  """Yields title, note and panels of the plots that show a limit."""
  yield (
    'Entropy',
    'Of the policy, per sampled token. Dashed: 0.3 of its first value.',
    [Panel('nats', {'train/entropy': 'entropy'}, limit=entropy_floor)],
  )
  yield (
    'Mismatch and staleness in KL',
    'mismatch_kl compares engine and trainer under the same weights; '
    'offpolicy_kl adds what the weights moved since. Dashed: the limit of '
    'mismatch_kl. Values below 1e-9 are drawn there.',
    [
      Panel(
        'nats, log scale',
        {
          'train/mismatch_kl': 'mismatch_kl',
          'train/offpolicy_kl': 'offpolicy_kl',
        },
        log=True,
        limit=mismatch_limit,
      )
    ],
  )


def spans(steps: Sequence[int]) -> list[tuple[int, int]]:
  """Joins neighbours: [3, 4, 5, 9] -> [(3, 5), (9, 9)]."""
  found: list[tuple[int, int]] = []
  for step in steps:
    if found and found[-1][1] == step - 1:
      found[-1] = (found[-1][0], step)
    else:
      found.append((step, step))
  return found


def series(
  rows: Sequence[Mapping[str, Any]], name: str, *, missing: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a metric over the steps; a step's last row counts.

  Args:
    rows: what `core.metrics.read` returned.
    name: of the metric.
    missing: steps that get NaN, which breaks the line there.

  Returns:
    Steps int64[N], rising, and values float64[N]; NaN for null.
  """
  found: dict[int, float] = dict.fromkeys(missing, np.nan)
  for row in rows:
    if name in row:
      found[row['step']] = np.nan if row[name] is None else row[name]
  steps = sorted(found)
  return np.asarray(steps, np.int64), np.asarray([found[s] for s in steps])


def moving_average(values: np.ndarray, width: int) -> np.ndarray:
  """Returns the mean of the last `width` entries, NaN where there is NaN."""
  out = np.full(len(values), np.nan)
  for i in np.flatnonzero(np.isfinite(values)):
    recent = values[max(0, i - width + 1) : i + 1]
    out[i] = recent[np.isfinite(recent)].mean()
  return out


def _reward(rows, missing, solve_rates) -> Plot:
  steps, values = series(rows, 'train/reward', missing=missing)
  trained = bool(np.isfinite(values).any())
  width = max(5, len(steps) // 20)
  absent = () if trained else ('train/reward',)
  absent += () if solve_rates else ('held-out evaluations',)
  title = 'Reward'
  note = (
    f'Training: mean of a step (light) and of the last {width} steps. '
    'Held-out: every held-out task once, with 95% Wilson intervals.'
  )
  if not trained and not solve_rates:
    return Plot(title, note, absent)

  def paint(axes):
    if trained:
      axes.plot(steps, values, color=COLORS[0], alpha=0.45, linewidth=0.9)
      average = moving_average(values, width)
      axes.plot(steps, average, color=COLORS[0], label='training')
    if solve_rates:
      _paint_heldout(axes, solve_rates)
    axes.set_ylim(0, 1)
    axes.set_ylabel('reward')

  return Plot(title, note, absent, _svg(title, [paint], missing, 2.6))


def _paint_heldout(axes, solve_rates) -> None:
  rates = np.asarray([r.rate for r in solve_rates.values()])
  bounds = np.asarray([r.interval for r in solve_rates.values()])  # [N, 2]
  axes.errorbar(
    list(solve_rates),
    rates,
    # Rounding may put a bound past its rate by one ulp at 0 and 1.
    yerr=np.maximum(0, [rates - bounds[:, 0], bounds[:, 1] - rates]),
    color=COLORS[1],
    marker='o',
    markersize=4,
    capsize=3,
    label='held-out',
  )


def _figure(title, panels, found, missing) -> str:
  def painter(panel):
    return lambda axes: _paint(axes, panel, found)

  height = 2.6 if len(panels) == 1 else PANEL_HEIGHT * len(panels)
  return _svg(title, [painter(panel) for panel in panels], missing, height)


def _paint(axes, panel: Panel, found) -> None:
  for (name, label), color in zip(panel.lines.items(), COLORS):
    steps, values = found[name]
    if not np.isfinite(values).any():
      continue
    if panel.log:
      values = np.maximum(values, LOG_FLOOR)
    marker = '.' if len(steps) <= FEW_POINTS else None
    axes.plot(steps, values, color=color, label=label, marker=marker)
  if panel.limit is not None:
    axes.axhline(panel.limit, color=INK, linestyle='--', linewidth=0.9)
  if panel.log:
    axes.set_yscale('log')
  else:
    axes.set_ylim(0, panel.top)
  if panel.unit:
    from matplotlib import ticker

    axes.yaxis.set_major_formatter(ticker.EngFormatter(panel.unit))
  axes.set_ylabel(panel.label)


def _svg(title, painters, missing, height) -> str:
  """Runs one painter per panel, stacked over one x axis."""
  # Imported here: reading records and metrics needs no matplotlib.
  import matplotlib
  from matplotlib import figure, ticker

  buffer = io.StringIO()
  with matplotlib.rc_context(_STYLE | {'svg.hashsalt': title}):
    canvas = figure.Figure(figsize=(WIDTH, height), layout='constrained')
    panels = canvas.subplots(len(painters), sharex=True, squeeze=False)[:, 0]
    for paint, axes in zip(painters, panels):
      paint(axes)
      for first, last in spans(missing):
        axes.axvspan(first - 0.5, last + 0.5, color=INK, alpha=0.12, lw=0)
      if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc='best')
    panels[-1].set_xlabel('step')
    panels[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    canvas.align_ylabels()
    nothing = dict.fromkeys(('Creator', 'Date', 'Format', 'Type'))
    canvas.savefig(buffer, format='svg', metadata=nothing, transparent=True)
  return _inline(buffer.getvalue())


def _inline(svg: str) -> str:
  """Makes a file into an element of a page that holds several of them."""
  svg = svg[svg.index('<svg') :].replace(INK, 'currentColor')
  # Names of groups repeat from figure to figure, and nothing refers to them.
  return re.sub(r'<g id="[^"]*">', '<g>', svg)
