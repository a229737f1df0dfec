"""Held-out evaluations: solve rates, who learned what, which to show.

Reads the records that rollout workers write per evaluated version
(`core/dispatch`). A trajectory with an infra error was not judged: it counts
neither as solved nor as failed.

Interval: Wilson (1927), "Probable inference, the law of succession, and
statistical inference"; at 0 of n and n of n it stays useful, where the
normal approximation has no width.

Example:
  >>> SolveRate(solved=8, tasks=10).rate
  0.8
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

from swe17_jax.core import dispatch, records
from swe17_jax.core.storage import Store

Z_95 = 1.959963984540054  # normal quantile of 0.975


@dataclasses.dataclass(frozen=True)
class SolveRate:
  """How many of the judged tasks were solved."""

  solved: int
  tasks: int

  @property
  def rate(self) -> float:
    """Solved fraction; NaN without tasks."""
    return self.solved / self.tasks if self.tasks else math.nan

  @property
  def interval(self) -> tuple[float, float]:
    """The 95% Wilson score interval."""
    if not self.tasks:
      return 0.0, 1.0
    weight = Z_95**2 / self.tasks
    center = (self.rate + weight / 2) / (1 + weight)
    spread = self.rate * (1 - self.rate) / self.tasks
    spread += weight / (4 * self.tasks)
    half = Z_95 * math.sqrt(spread) / (1 + weight)
    return max(0.0, center - half), min(1.0, center + half)


@dataclasses.dataclass(frozen=True)
class SolveRow:
  """One line of a table: some tasks before and after training."""

  name: str
  before: SolveRate
  after: SolveRate


@dataclasses.dataclass(frozen=True)
class Pair:
  """One task at the first and at the last evaluated version."""

  outcome: str  # a key of `OUTCOMES`
  before: records.Trajectory
  after: records.Trajectory


# Passed at the first and at the last version, in the order of the page, and
# how many of them the page shows.
OUTCOMES = {
  'learned': ((False, True), 2),
  'still failing': ((False, False), 1),
  'solved in both': ((True, True), 1),
  'lost': ((True, False), 0),
}


def versions(store: Store) -> list[int]:
  """Returns the evaluated weight_versions, in rising order."""
  names = store.list(dispatch.HELDOUT_PREFIX)
  return sorted(int(pathlib.PurePosixPath(name).stem) for name in names)


def read(store: Store, version: int) -> tuple[records.Trajectory, ...]:
  """Returns a version's evaluation, one trajectory per held-out task.

  Raises:
    RecordError: the object is damaged.
    ObjectNotFound: that version was not evaluated.
  """
  return records.group_from_bytes(store.read(dispatch.heldout_name(version)))


def solve_rate(trajectories: Sequence[records.Trajectory]) -> SolveRate:
  """Counts the judged trajectories and those that passed."""
  judged = [t.verdict.passed for t in trajectories if not t.verdict.infra_error]
  return SolveRate(sum(judged), len(judged))


def function_of(task_id: str) -> str:
  """'clamp/L2/compare/< -> <=' -> 'clamp'."""
  return task_id.split('/')[0]


def kind_of(task_id: str) -> str:
  """'clamp/L2/compare/< -> <=' -> 'compare'; '' where there is none."""
  return (task_id.split('/') + ['', ''])[2]


def solve_table(
  before: Sequence[records.Trajectory],
  after: Sequence[records.Trajectory],
  *,
  key: Callable[[str], str],
) -> list[SolveRow]:
  """Returns solve rates of the tasks that share a key, sorted by it.

  Args:
    before: evaluation of the first version.
    after: evaluation of the last version.
    key: task_id -> name of its row, such as `function_of`.
  """

  def of(trajectories, name):
    return solve_rate([t for t in trajectories if key(t.task_id) == name])

  names = sorted({key(t.task_id) for t in (*before, *after)})
  return [SolveRow(n, of(before, n), of(after, n)) for n in names]


def pairs(
  before: Sequence[records.Trajectory], after: Sequence[records.Trajectory]
) -> dict[str, list[Pair]]:
  """Returns the tasks that were judged in both, by outcome, in their order."""
  later = {t.task_id: t for t in after if not t.verdict.infra_error}
  found: dict[str, list[Pair]] = {outcome: [] for outcome in OUTCOMES}
  names = {passed: outcome for outcome, (passed, _) in OUTCOMES.items()}
  for first in before:
    last = later.get(first.task_id)
    if last is not None and not first.verdict.infra_error:
      outcome = names[first.verdict.passed, last.verdict.passed]
      found[outcome].append(Pair(outcome, first, last))
  return found


def examples(found: dict[str, list[Pair]]) -> list[Pair]:
  """Picks the tasks to show, of as many functions as there are.

  Args:
    found: what `pairs` returned.
  """
  chosen: list[Pair] = []
  for outcome, (_, count) in OUTCOMES.items():
    left = list(found[outcome])
    for _ in range(min(count, len(left))):
      shown = {function_of(pair.before.task_id) for pair in chosen}
      # The first of a function that is not shown yet, else the first.
      left.sort(key=lambda p: function_of(p.before.task_id) in shown)
      chosen.append(left.pop(0))
  return chosen
