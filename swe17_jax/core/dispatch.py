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
  >>> groups_of(2, groups_per_step=4)
  range(8, 12)
  >>> may_start(11, weight_version=1, groups_per_step=4, max_staleness=1)
  True
"""


def groups_of(step: int, *, groups_per_step: int) -> range:
  """Returns the group indices that a step trains on."""
  return range(step * groups_per_step, (step + 1) * groups_per_step)


def may_start(
  group_index: int,
  *,
  weight_version: int,
  groups_per_step: int,
  max_staleness: int,
) -> bool:
  """Whether a group's tokens cannot get too old before they are trained on.

  Args:
    group_index: position in the order of dispatch.
    weight_version: what the engine serves now.
    groups_per_step: G.
    max_staleness: largest trainer step minus weight_version, in versions.
  """
  return group_index // groups_per_step - weight_version <= max_staleness


def train_name(group_index: int) -> str:
  """Returns the object that holds a finished training group."""
  return f'rollouts/train/{group_index:08d}.npz'


def heldout_name(weight_version: int) -> str:
  """Returns the object that holds the evaluation of a version."""
  return f'rollouts/heldout/{weight_version:08d}.npz'
