"""Reads the groups of a step from the store as workers finish them."""

import threading
import time
from collections.abc import Callable

from swe17_jax.core import dispatch, records, storage
from swe17_jax.rl import buffer

POLL_S = 0.05


class SourceError(RuntimeError):
  """No groups arrive."""


class Stopped(Exception):
  """The run was asked to stop while it waited."""


class GroupSource:
  """The trainer's end of the arrow from rollout to batch."""

  def __init__(
    self,
    store: storage.Store,
    config: dispatch.DispatchConfig,
    *,
    timeout_s: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Makes a source.

    Args:
      store: where workers write.
      config: the numbering of groups.
      timeout_s: longest wait for one group, seconds.
      stop: ends a wait early.
      clock: seconds, for the timeout.
    """
    self._store, self._config = store, config
    self._timeout_s, self._stop, self._clock = timeout_s, stop, clock

  @property
  def max_staleness(self) -> int:
    """Largest trainer step minus weight_version of a token."""
    return self._config.max_staleness

  def take(self, step: int) -> list[tuple[records.Trajectory, ...]]:
    """Returns the groups of a step, in order; waits for them.

    Raises:
      records.RecordError: a group breaks a rule.
      SourceError: a group did not come within the timeout.
      Stopped: `stop` was set.
    """
    return [self._one(step, i) for i in self._config.groups_of(step)]

  def _one(self, step: int, index: int) -> tuple[records.Trajectory, ...]:
    group = records.group_from_bytes(self._wait(dispatch.train_name(index)))
    buffer.check_group(
      group,
      group_index=index,
      group_size=self._config.group_size,
      step=step,
      max_staleness=self._config.max_staleness,
    )
    return group

  def _wait(self, name: str) -> bytes:
    started = self._clock()
    while True:
      if self._stop.is_set():
        raise Stopped
      try:
        return self._store.read(name)
      except storage.ObjectNotFound:
        self._stop.wait(POLL_S)
      if self._clock() - started > self._timeout_s:
        raise SourceError(
          f'{name} did not come within {self._timeout_s} s; see the log of '
          'the rollout worker'
        )

  def wait_for_heldout(self, version: int) -> float:
    """Returns the held-out solve rate of a version; raises as `take`."""
    return _rate(self._wait(dispatch.heldout_name(version)))

  def heldout(self, *, after: int) -> dict[int, float]:
    """Returns the held-out solve rate of every version above `after`."""
    start = dispatch.heldout_name(after) if after >= 0 else ''
    names = self._store.list(dispatch.HELDOUT_PREFIX, start_after=start)
    return {
      int(name.removeprefix(dispatch.HELDOUT_PREFIX)[:8]): _rate(
        self._store.read(name)
      )
      for name in names
    }


def _rate(data: bytes) -> float:
  group = records.group_from_bytes(data)
  return sum(trajectory.reward for trajectory in group) / len(group)
