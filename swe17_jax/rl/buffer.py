"""What may be trained on now: groups that are whole, in place, and not stale.

Which groups belong to a step is settled by `core/dispatch`; here they are
checked as they arrive, because a trainer that reads from a bucket cannot
trust what wrote to it.
"""

from collections.abc import Sequence

from swe17_jax.core import records


def check_group(
  group: Sequence[records.Trajectory],
  *,
  group_index: int,
  group_size: int,
  step: int,
  max_staleness: int,
) -> None:
  """Refuses a group that is incomplete, misplaced or too old.

  Raises:
    records.RecordError: the message names the rule.
  """
  if len(group) != group_size:
    raise records.RecordError(
      f'group {group_index} has {len(group)} trajectories, must have '
      f'{group_size=}: a baseline over fewer is biased'
    )
  for trajectory in group:
    if trajectory.group_index != group_index:
      raise records.RecordError(
        f'object {group_index} holds a trajectory of group '
        f'{trajectory.group_index}'
      )
    for window in trajectory.windows:
      versions = window.weight_versions[window.loss_mask]
      if versions.size and step - versions.min() > max_staleness:
        raise records.RecordError(
          f'group {group_index} has tokens of weight_version '
          f'{versions.min()} at step {step}; {max_staleness=}'
        )
      if versions.size and versions.max() > step:
        raise records.RecordError(
          f'group {group_index} has tokens of weight_version '
          f'{versions.max()}, which step {step} has not made yet; is another '
          'run writing to this store?'
        )
