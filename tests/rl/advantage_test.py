"""Advantages are differences to the mean of the group, nothing else."""

import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from swe17_jax.rl import advantage

_REWARDS = st.lists(
  st.integers(-4, 4).map(lambda n: n / 4), min_size=2, max_size=16
)


class AdvantageTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1.0, 0.0], [0.5, -0.5]),
    ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
    # No division by the deviation: half the spread is half the advantage.
    ([0.5, 0.0], [0.25, -0.25]),
    ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
  )
  def test_by_hand(self, rewards, wanted):
    found = advantage.group_advantages(rewards)
    self.assertEqual(found.dtype, np.float32)
    self.assertEqual(found.tolist(), wanted)

  def test_equal_rewards_have_exactly_no_advantage(self):
    # 0.1 + 0.1 + 0.1 is not 0.3: a group must not learn from rounding.
    for size in range(2, 17):
      self.assertFalse(advantage.group_advantages([0.1] * size).any(), size)

  @given(_REWARDS, st.randoms(), st.integers(-3, 3))
  def test_order_and_level_do_not_matter(self, rewards, random, level):
    wanted = dict(zip(rewards, advantage.group_advantages(rewards)))
    shuffled = random.sample(rewards, len(rewards))
    moved = advantage.group_advantages([r + level for r in shuffled])
    np.testing.assert_allclose(moved, [wanted[r] for r in shuffled], atol=1e-6)
    self.assertAlmostEqual(float(moved.sum()), 0.0, places=5)

  @parameterized.parameters(0, 1)
  def test_a_group_without_a_baseline_is_refused(self, size):
    with pytest.raises(ValueError, match=f'a group of {size}'):
      advantage.group_advantages([1.0] * size)
