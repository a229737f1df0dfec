"""A run in a few numbers, from its metrics."""

import os
import pathlib

import numpy as np

from swe17_jax.core import metrics

# The first steps are all sampled by version 0, see core/dispatch.
ENTROPY_STEPS = 3


def wall_s(workdir: str | os.PathLike) -> float:
  """Returns the seconds trained so far; 0 if the run has not begun."""
  times = _column(workdir, 'train/wall_s')
  return times[max(times)] if times else 0.0


def summarize(
  workdir: str | os.PathLike, *, wall_s: float
) -> dict[str, float | None]:
  """Returns the results of a finished run.

  Args:
    workdir: holds metrics.jsonl.
    wall_s: seconds of everything, cold start included.

  Returns:
    heldout_before, heldout_after: solve rates of version 0 and the last.
    entropy_first, entropy_last: nats per sampled token of the full
      distribution, mean of the first and last three steps.
    mismatch_kl_max: largest of all steps.
    versions_applied: versions after the first that sampled trained tokens.
    tokens_per_s: tokens of all groups over the seconds of all steps.
    wall_s: as given.
  """
  heldout = _column(workdir, 'heldout/reward')
  entropy = list(_column(workdir, 'train/entropy').values())
  tokens = _column(workdir, 'rollout/tokens')
  seconds = _column(workdir, 'train/step_s')
  newest = set(_column(workdir, 'rollout/newest_version').values())
  return {
    'heldout_before': heldout[min(heldout)],
    'heldout_after': heldout[max(heldout)],
    'entropy_first': float(np.mean(entropy[:ENTROPY_STEPS])),
    'entropy_last': float(np.mean(entropy[-ENTROPY_STEPS:])),
    'mismatch_kl_max': max(_column(workdir, 'train/mismatch_kl').values()),
    'versions_applied': len(newest - {0.0}),
    'tokens_per_s': sum(tokens.values()) / sum(seconds.values()),
    'wall_s': wall_s,
  }


def _column(workdir: str | os.PathLike, name: str) -> dict[int, float]:
  """Returns step -> value of one metric, in order of steps."""
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    return {}
  rows = sorted(metrics.read(path), key=lambda row: row['step'])
  return {row['step']: row[name] for row in rows if row.get(name) is not None}
