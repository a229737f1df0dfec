"""The numbering that rollout workers and the trainer share.

Groups are numbered in the order of dispatch, and the number alone decides
when a group may start and which step trains on it: step `s` takes the groups
`s * G ... (s + 1) * G - 1`, whatever order they finished in. A task that
takes long is trained exactly as often as one that is quick; taking whatever
is ready first starves slow tasks (tinker-cookbook #822).

The same number bounds staleness without ever throwing a group away: a group
may start only when the engines serve a version that is at most
`max_staleness` behind the step that will train on it. While the trainer is
away, rollouts run up to that bound and wait; when it is back it goes on with
the next number. An interruption leaves no bias to correct.

Example:
  >>> config = DispatchConfig(groups_per_step=4, max_staleness=1)
  >>> config.groups_of(2)
  range(8, 12)
  >>> config.may_start(11, weight_version=1)
  True
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
  """What both sides must agree on."""

  groups_per_step: int = 16  # G
  group_size: int = 8  # trajectories per task and group
  max_staleness: int = 2  # trainer step minus weight_version, in versions

  def __post_init__(self):
    if self.groups_per_step < 1 or self.group_size < 2:
      raise ValueError(
        f'groups_per_step={self.groups_per_step} must be >= 1 and group_size='
        f'{self.group_size} >= 2: a baseline needs two'
      )
    if self.max_staleness < 0:
      raise ValueError(f'max_staleness={self.max_staleness} must be >= 0')

  def groups_of(self, step: int) -> range:
    """Returns the group indices that a step trains on."""
    first = step * self.groups_per_step
    return range(first, first + self.groups_per_step)

  def may_start(self, group_index: int, *, weight_version: int) -> bool:
    """Whether the group cannot get too old before it is trained on.

    Args:
      group_index: position in the order of dispatch.
      weight_version: what the engine serves now.
    """
    step = group_index // self.groups_per_step
    return step - weight_version <= self.max_staleness


TRAIN_PREFIX = 'rollouts/train/'
HELDOUT_PREFIX = 'rollouts/heldout/'


def train_name(group_index: int) -> str:
  """Returns the object that holds a finished training group."""
  return f'{TRAIN_PREFIX}{group_index:08d}.npz'


def heldout_name(weight_version: int) -> str:
  """Returns the object that holds the evaluation of a version."""
  return f'{HELDOUT_PREFIX}{weight_version:08d}.npz'
