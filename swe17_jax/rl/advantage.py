"""Credit: a group's rewards become one advantage per trajectory.

The baseline is the mean reward of the group, without division by the
standard deviation (Dr. GRPO, arXiv 2503.20783; DeepSeek-V3.2, arXiv
2512.02556): dividing would weigh nearly solved and nearly hopeless tasks
most. A group whose rewards are all equal carries no signal.

Example:
  >>> group_advantages([1.0, 0.0, 0.0, 1.0]).tolist()
  [0.5, -0.5, -0.5, 0.5]
"""

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
  """Returns float32[n], each reward minus the mean of its group.

  Args:
    rewards: one number per trajectory of a group.

  Raises:
    ValueError: fewer than two rewards: a mean of one says nothing.
  """
  values = np.array(rewards, np.float64)
  if values.size < 2:
    raise ValueError(
      f'a group of {values.size} has no baseline; set group_size to 2 or more'
    )
  # From the first reward on: equal rewards then give exactly nothing.
  values -= values[0]
  return (values - values.mean()).astype(np.float32)
