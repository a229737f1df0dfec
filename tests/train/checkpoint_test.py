"""A checkpoint comes back bit for bit, or the one before it does."""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.optim import optimizer
from swe17_jax.train import checkpoint, tree_store
from swe17_jax.train.step import TrainState
from tests import miniature


def make(step, width=4):
  """A state with both rules of the optimizer and every awkward float."""
  rng = np.random.default_rng(step)
  params = {
    'layers': {
      'up_proj': jnp.asarray(rng.normal(size=(2, 3, width)), jnp.float32)
    },
    'norm': jnp.asarray([-0.0, np.inf, np.nan, 1e-42, *rng.random(4)], 'f4'),
  }
  opt_state = optimizer.build(optimizer.OptimizerConfig()).init(params)
  noisy = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) * 9, x.dtype), opt_state
  )
  return TrainState(params, noisy, jnp.asarray(step, jnp.int32))


LIKE = jax.eval_shape(functools.partial(make, 0))


class CheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / 'state'

  def save(self, *numbers):
    for step in numbers:
      checkpoint.save(self.folder, make(step), wall_s=10.0 * step)

  def names(self):
    return sorted(path.name for path in self.folder.iterdir())

  def assert_restores(self, step):
    state, wall_s = checkpoint.restore(self.folder, LIKE)
    self.assertEqual(miniature.bits(state), miniature.bits(make(step)))
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(LIKE))
    self.assertEqual(wall_s, 10.0 * step)

  def test_round_trip(self):
    self.save(1)
    self.assert_restores(1)

  def test_nothing_saved_is_no_error(self):
    self.assertIsNone(checkpoint.restore(self.folder, LIKE))
    self.folder.mkdir()
    self.assertIsNone(checkpoint.restore(self.folder, LIKE))

  def test_the_newest_are_kept_and_the_newest_is_restored(self):
    self.save(1, 2, 9, 10)
    self.assertEqual(self.names(), ['00000009', '00000010'])
    self.assertEqual(checkpoint.KEEP, 2)
    self.assert_restores(10)

  def test_a_step_is_saved_once(self):
    self.save(1)
    with pytest.raises(tree_store.TreeError, match='written once'):
      self.save(1)

  def largest_file(self, step):
    files = (self.folder / f'{step:08d}').rglob('*')
    return max(
      (path for path in files if path.is_file()),
      key=lambda path: path.stat().st_size,
    )

  def damage(self, step, kind):
    path = self.largest_file(step)  # the arrays
    data = bytearray(path.read_bytes())
    if kind == 'flipped':
      data[len(data) // 3] ^= 4
    elif kind == 'cut':
      del data[len(data) // 2 :]
    if kind == 'gone':
      path.unlink()
    elif kind == 'metadata':
      (self.folder / f'{step:08d}' / '_CHECKPOINT_METADATA').write_text('{')
    elif kind == 'empty':
      shutil.rmtree(self.folder / f'{step:08d}')
      (self.folder / f'{step:08d}').mkdir()
    else:
      path.write_bytes(bytes(data))

  @parameterized.parameters('flipped', 'cut', 'gone', 'metadata', 'empty')
  def test_the_one_before_a_damaged_one_is_restored(self, kind):
    self.save(1, 2)
    self.damage(2, kind)
    self.assert_restores(1)
    # And the run can go on over the step that was damaged.
    self.save(2, 3)
    self.assert_restores(3)

  def test_if_all_are_damaged_it_says_so_and_removes_nothing(self):
    self.save(1, 2)
    self.damage(1, 'cut')
    self.damage(2, 'flipped')
    for _ in range(2):
      with pytest.raises(tree_store.TreeError, match='damaged'):
        checkpoint.restore(self.folder, LIKE)
    self.assertEqual(self.names(), ['00000001', '00000002'])

  def test_a_checkpoint_of_another_model_is_refused_and_kept(self):
    self.save(1)
    other = jax.eval_shape(lambda: make(0, width=5))
    with pytest.raises(tree_store.TreeError, match=r'has shape \(2, 3, 4\)'):
      checkpoint.restore(self.folder, other)
    self.assert_restores(1)

  def test_what_an_interrupted_save_leaves_is_passed_over(self):
    self.save(1)
    for name in ('00000002.orbax-checkpoint-tmp', '00000002.partial_save'):
      shutil.copytree(self.folder / '00000001', self.folder / name)
    self.assert_restores(1)
    self.save(2)
    self.assert_restores(2)
