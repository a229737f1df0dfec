"""`report.html`: what a run of the quickstart did, on one page.

Reads `metrics.jsonl` and the held-out records and writes a self-contained
page: results against their limits, curves, solve rates by function and kind
of bug, and a few tasks before and after training as text. The same run gives
the same bytes, so the page holds no date.

Example:
  >>> gaps([{'step': 3, 'train/reward': 0.0}, {'step': 6, 'train/reward': 0.1}])
  [4, 5]
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from swe17_jax.analysis import curves, heldout, page
from swe17_jax.core import metrics, records
from swe17_jax.core.storage import Store

# What the quickstart promises.
HELDOUT_FACTOR, HELDOUT_RISE = 2.0, 0.25
ENTROPY_FACTOR = 0.3
MISMATCH_LIMIT = 1e-3
WALL_LIMIT_S = 600.0

TRANSCRIPT_CHARS = 20_000  # of one trajectory; keeps the page small
_ROLE = re.compile(r'<(agent|tool)> ?')
_BUGGY_LINE = re.compile(r'[^/]*/L(\d+)/')


@dataclasses.dataclass(frozen=True)
class Check:
  """One result and whether it keeps its limit."""

  name: str
  value: str
  limit: str = ''
  passed: bool | None = None  # None = has no limit, or is not known


@dataclasses.dataclass(frozen=True)
class Part:
  """Consecutive lines of a transcript that one side wrote."""

  role: str  # 'task', 'agent' or 'tool'
  lines: tuple[str, ...]
  bug: int | None = None  # index of the line with the bug


def write(
  workdir: pathlib.Path, *, store: Store, summary: Mapping[str, float]
) -> pathlib.Path:
  """Writes `report.html`; a reader sees the old page or the new one.

  Args:
    workdir: of the run; holds `metrics.jsonl`.
    store: holds the run's records.
    summary: final numbers of the run, `heldout_before` and so on.

  Returns:
    The page's path.

  Raises:
    MetricsError: metrics.jsonl is damaged.
    RecordError: an evaluation is damaged.
    ModuleNotFoundError: matplotlib or jinja2 (extra `trainer`) is missing.
  """
  workdir = pathlib.Path(workdir)
  rows = metrics.read(workdir / 'metrics.jsonl')
  missing = gaps(rows)
  evaluated = heldout.versions(store)
  rates = {
    version: heldout.solve_rate(heldout.read(store, version))
    for version in evaluated
  }
  first_entropy = summary.get('entropy_first')
  content = {
    'title': f'Reinforcement learning run: {workdir.resolve().name}',
    'headline': _headline(rates),
    'gap_lines': _gap_lines(rows, missing),
    'gaps_found': bool(missing),
    'checks': checks(summary),
    'plots': curves.plots(
      rows,
      missing=missing,
      solve_rates=rates,
      entropy_floor=(
        None if first_entropy is None else ENTROPY_FACTOR * first_entropy
      ),
      mismatch_limit=MISMATCH_LIMIT,
    ),
    'compared': len(evaluated) > 1,
  }
  if content['compared']:
    content |= _comparison(store, evaluated[0], evaluated[-1])
  path = workdir / 'report.html'
  _replace(path, page.render(content))
  return path


def gaps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
  """Returns the steps without a row between the first and the last one.

  Rows of an evaluation alone are not steps: only rows with a `train/` metric
  count.
  """
  steps = _steps(rows)
  if not steps:
    return []
  return sorted(set(range(min(steps), max(steps))) - steps)


def checks(summary: Mapping[str, float]) -> list[Check]:
  """Lays the summary beside the limits; an absent result is said to be so."""
  limits = _limits(summary)
  names = [*summary, *(name for name in limits if name not in summary)]
  found = []
  for name in names:
    value = summary.get(name)
    limit, passed = limits.get(name, ('', None))
    found.append(
      Check(name, _number(value), limit, None if value is None else passed)
    )
  return found


def parts(text: str, *, task_id: str) -> list[Part]:
  """Cuts a transcript where agent and tool take turns.

  Args:
    text: of a `Trajectory`: the task, then lines that open with `<agent>` or
      `<tool>`, and lines that go on with what was opened.
    task_id: 'function/L3/...' says that line 3 of the program has the bug.
  """
  if len(text) > TRANSCRIPT_CHARS:
    left = len(text) - TRANSCRIPT_CHARS
    text = f'{text[:TRANSCRIPT_CHARS]}\n... {left} more characters'
  cut: list[tuple[str, list[str]]] = [('task', [])]
  for line in text.split('\n'):
    opened = _ROLE.match(line)
    if opened:
      cut.append((opened[1], []))
    cut[-1][1].append(line[opened.end() :] if opened else line)
  buggy = _BUGGY_LINE.match(task_id)
  start = f'{buggy[1]}|' if buggy else ''
  found = []
  for role, lines in cut:
    while lines and not lines[-1]:
      lines.pop()
    marked = (i for i, line in enumerate(lines) if line.startswith(start))
    bug = next(marked, None) if buggy and role == 'task' else None
    if lines:
      found.append(Part(role, tuple(lines), bug))
  return found


def _steps(rows) -> set[int]:
  return {
    row['step']
    for row in rows
    if any(name.startswith('train/') for name in row)
  }


def _gap_lines(rows, missing) -> list[str]:
  steps = _steps(rows)
  if not steps:
    return ['No training step is recorded.']
  if not missing:
    return [f'Steps {min(steps)} to {max(steps)}; none is missing.']
  return [
    f'Steps {first}-{last} are missing.'
    if last > first
    else f'Step {first} is missing.'
    for first, last in curves.spans(missing)
  ]


def _headline(rates: Mapping[int, heldout.SolveRate]) -> str:
  if not rates:
    return 'No version was evaluated on the held-out tasks.'
  told = []
  for version in dict.fromkeys((min(rates), max(rates))):
    rate = rates[version]
    low, high = (100 * bound for bound in rate.interval)
    told.append(
      f'version {version} solves {rate.solved} of {rate.tasks} '
      f'({100 * rate.rate:.1f}%, 95% interval {low:.1f} to {high:.1f}%)'
    )
  return f'Held-out tasks: {", ".join(told)}.'


def _limits(summary) -> dict[str, tuple[str, bool | None]]:
  """Returns name -> limit in words, kept or not (None: not known)."""
  before, after = summary.get('heldout_before'), summary.get('heldout_after')
  first, last = summary.get('entropy_first'), summary.get('entropy_last')
  mismatch, wall_s = summary.get('mismatch_kl_max'), summary.get('wall_s')
  rise = f'≥ {HELDOUT_FACTOR:g} × before and ≥ before + {HELDOUT_RISE:g}'
  rise_kept = fall_kept = None
  if before is not None and after is not None:
    needed = max(HELDOUT_FACTOR * before, before + HELDOUT_RISE)
    rise, rise_kept = f'{rise}: {needed:.4g}', after >= needed
  fall = f'≥ {ENTROPY_FACTOR:g} × first'
  if first is not None and last is not None:
    needed = ENTROPY_FACTOR * first
    fall, fall_kept = f'{fall}: {needed:.4g}', last >= needed
  return {
    'heldout_after': (rise, rise_kept),
    'entropy_last': (fall, fall_kept),
    'mismatch_kl_max': (
      f'≤ {MISMATCH_LIMIT:g}',
      None if mismatch is None else mismatch <= MISMATCH_LIMIT,
    ),
    'wall_s': (
      f'≤ {WALL_LIMIT_S:g}',
      None if wall_s is None else wall_s <= WALL_LIMIT_S,
    ),
  }


def _number(value: float | None) -> str:
  if value is None:
    return 'not recorded'
  return str(value) if isinstance(value, int) else f'{value:.4g}'


def _comparison(store, first: int, last: int) -> dict[str, Any]:
  """Returns what the page says of the first and the last version."""
  before, after = heldout.read(store, first), heldout.read(store, last)
  found = heldout.pairs(before, after)
  counts = [f'{len(pairs)} {outcome}' for outcome, pairs in found.items()]
  unjudged = sum(bool(t.verdict.infra_error) for t in (*before, *after))
  outcomes = f'Tasks: {", ".join(counts)}.'
  if unjudged:
    outcomes += f' {unjudged} trajectories could not be judged.'
  return {
    'first': first,
    'last': last,
    'outcomes': outcomes,
    'by_function': heldout.solve_table(before, after, key=heldout.function_of),
    'by_kind': heldout.solve_table(before, after, key=heldout.kind_of),
    'total': heldout.SolveRow(
      'all', heldout.solve_rate(before), heldout.solve_rate(after)
    ),
    'examples': [
      {
        'task_id': pair.before.task_id,
        'outcome': pair.outcome,
        'before': _shown(pair.before),
        'after': _shown(pair.after),
      }
      for pair in heldout.examples(found)
    ],
  }


def _shown(trajectory: records.Trajectory) -> dict[str, Any]:
  verdict = trajectory.verdict
  passed = 'passed' if verdict.passed else 'failed'
  return {
    'passed': verdict.passed,
    'verdict': f'{passed}, {verdict.calls_passed} of {verdict.calls} calls',
    'detail': verdict.detail,
    'tokens': trajectory.sampled_tokens,
    'turns': len(trajectory.turns),
    'finish': trajectory.finish,
    'parts': parts(trajectory.text, task_id=trajectory.task_id),
  }


def _replace(path: pathlib.Path, text: str) -> None:
  temporary = path.with_suffix('.tmp')
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
