"""Every rule of admission refuses what breaks it, and only that."""

import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.core import records
from swe17_jax.rl import buffer
from tests import miniature


def group(*versions, group_index=5):
  """One trajectory per version, of a window that was sampled under it."""
  rng = np.random.default_rng(0)
  return tuple(
    miniature.trajectory(
      miniature.window(rng, 6, version=version), group_index=group_index
    )
    for version in versions
  )


def check(trajectories, **changes):
  arguments = {
    'group_index': 5,
    'group_size': 2,
    'step': 7,
    'max_staleness': 2,
  }
  buffer.check_group(trajectories, **{**arguments, **changes})


class CheckGroupTest(parameterized.TestCase):
  @parameterized.parameters((5, 5), (7, 7), (5, 7))
  def test_fresh_enough(self, *versions):
    check(group(*versions))

  @parameterized.named_parameters(
    ('too_few', group(7), {}, 'has 1 trajectories, must have group_size=2'),
    ('too_many', group(7, 7, 7), {}, 'has 3 trajectories'),
    ('too_old', group(7, 4), {}, 'version 4 at step 7; max_staleness=2'),
    ('future', group(7, 8), {}, 'version 8, which step 7 has not made'),
    ('strict', group(7, 6), {'max_staleness': 0}, 'version 6 at step 7'),
    ('elsewhere', group(7, 7, group_index=6), {}, 'object 5 .* group 6'),
  )
  def test_a_broken_rule_is_named(self, trajectories, changes, message):
    with pytest.raises(records.RecordError, match=message):
      check(trajectories, **changes)

  def test_the_oldest_token_of_any_window_counts(self):
    rng = np.random.default_rng(0)
    fresh = miniature.window(rng, 6, version=7)
    versions = fresh.weight_versions.copy()
    versions[np.flatnonzero(fresh.loss_mask)[-1]] = 4
    seam = records.Window(
      tokens=fresh.tokens,
      loss_mask=fresh.loss_mask,
      rollout_logprobs=fresh.rollout_logprobs,
      weight_versions=versions,
      sampling_mask=fresh.sampling_mask,
      routed_experts=fresh.routed_experts,
    )
    good = miniature.trajectory(fresh, fresh, group_index=5)
    bad = miniature.trajectory(fresh, seam, group_index=5)
    check((good, good))
    with pytest.raises(records.RecordError, match='weight_version 4'):
      check((good, bad))

  def test_a_window_without_sampled_tokens_has_no_age(self):
    rng = np.random.default_rng(0)
    window = miniature.window(rng, 8, version=0, prompt=6).head(5)
    self.assertFalse(window.loss_mask.any())
    check((miniature.trajectory(window, group_index=5),) * 2)
