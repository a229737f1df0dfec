"""Imitation: every token of a demonstration, and the same bits again."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.train import cold_start
from swe17_jax.train import step as steps
from tests import miniature

CONFIG = cold_start.ColdStartConfig(
  steps=6,
  demonstrations=5,
  prompt_weight=0.25,
  save_every=2,
  batch=miniature.BATCH,
  optimizer=miniature.OPTIMIZER,
)


def windows(count=5):
  rng = np.random.default_rng(0)
  return [miniature.window(rng, int(rng.integers(4, 16))) for _ in range(count)]


class DrawTest(parameterized.TestCase):
  def draw(self, drawn, step=0, seed=0, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return cold_start.draw(drawn, config, seed=seed, step=step)

  def test_every_next_token_of_a_window_is_predicted(self):
    window = miniature.window(np.random.default_rng(0), 7, prompt=3)
    batch = self.draw([window])
    self.assertEqual(batch.loss_mask.sum(), 6)
    self.assertEqual(np.flatnonzero(batch.loss_mask[0]).tolist(), [*range(6)])
    np.testing.assert_array_equal(batch.targets[0, :6], window.tokens[1:])
    np.testing.assert_array_equal(
      batch.advantages[0, :6], np.where(window.loss_mask[1:], 1.0, 0.25)
    )

  def test_windows_of_one_row_do_not_predict_each_other(self):
    rng = np.random.default_rng(0)
    drawn = [miniature.window(rng, n) for n in (4, 5, 6, 9)]
    batch = self.draw(drawn)
    self.assertGreater(batch.segment_ids.max(), 1)
    self.assertEqual(batch.loss_mask.sum(), 3 + 4 + 5 + 8)
    for row in range(batch.tokens.shape[0]):
      for t in np.flatnonzero(batch.loss_mask[row]):
        self.assertEqual(batch.targets[row, t], batch.tokens[row, t + 1])
        self.assertEqual(
          batch.segment_ids[row, t], batch.segment_ids[row, t + 1]
        )

  def test_a_draw_fits_and_depends_on_seed_and_step_alone(self):
    rng = np.random.default_rng(0)
    drawn = [miniature.window(rng, int(rng.integers(4, 16))) for _ in range(40)]
    batch = self.draw(drawn, step=3)
    room = miniature.BATCH.rows * miniature.BATCH.row_tokens
    used = (batch.segment_ids > 0).sum()
    self.assertBetween(used, 0.6 * room, cold_start.FILL * room)
    again = self.draw(drawn, step=3)
    self.assertEqual(miniature.bits(batch), miniature.bits(again))
    for other in (self.draw(drawn, step=4), self.draw(drawn, step=3, seed=1)):
      self.assertNotEqual(miniature.bits(batch), miniature.bits(other))

  def test_every_demonstration_is_drawn(self):
    rng = np.random.default_rng(0)
    drawn = [miniature.window(rng, 12) for _ in range(8)]
    seen = {
      tuple(row[:12]) for i in range(12) for row in self.draw(drawn, i).tokens
    }
    self.assertContainsSubset({tuple(w.tokens) for w in drawn}, seen)


class RunTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(miniature.shared_trainers())

  def run_steps(self, count, workdir, on_step=None):
    losses = {}
    weights = cold_start.run(
      dataclasses.replace(CONFIG, steps=count),
      model=miniature.MODEL,
      windows=windows(),
      workdir=workdir,
      seed=3,
      on_step=on_step or losses.__setitem__,
    )
    return weights, losses

  def test_it_learns_resumes_bit_for_bit_and_returns_what_engines_get(self):
    first, second = (
      pathlib.Path(self.create_tempdir().full_path) for _ in range(2)
    )
    weights, losses = self.run_steps(6, first)
    self.assertEqual(list(losses), list(range(6)))
    self.assertLess(losses[5], losses[0])
    for leaf in jax.tree.leaves(weights):
      self.assertIsInstance(leaf, np.ndarray)
      self.assertEqual(leaf.dtype, steps.PUBLISHED_DTYPE)

    def die(step, _):
      if step == 4:  # one step after the last checkpoint
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
      self.run_steps(6, second, die)
    resumed, rest = self.run_steps(6, second)
    self.assertEqual(rest, {step: losses[step] for step in (4, 5)})
    self.assertEqual(miniature.bits(resumed), miniature.bits(weights))
    again, nothing = self.run_steps(6, second)
    self.assertEqual(nothing, {})
    self.assertEqual(miniature.bits(again), miniature.bits(weights))

  @parameterized.parameters('steps', 'demonstrations', 'save_every')
  def test_a_count_of_zero_is_refused(self, name):
    with pytest.raises(ValueError, match=f'{name}=0'):
      dataclasses.replace(CONFIG, **{name: 0})
