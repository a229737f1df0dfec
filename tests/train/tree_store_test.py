"""Trees on disk: whole, array by array, in part, onto another mesh."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from swe17_jax.parallel import mesh as device_mesh
from swe17_jax.parallel import sharding
from swe17_jax.train import tree_store


def _tree():
  return {
    'params': {
      'a': {'weight': np.arange(24, dtype=np.float32).reshape(3, 8)},
      'b': np.asarray([1.5, -0.0, np.inf], jnp.bfloat16),
    },
    'step': np.asarray(7, np.int32),
  }


def _abstract(tree, **kwargs):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **kwargs), tree
  )


class TreeStoreTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _assert_same_bits(self, found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    self.assertLen(found, len(wanted))
    for x, y in zip(found, wanted):
      self.assertEqual(x.dtype, y.dtype)
      self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())

  def test_a_tree_and_its_metadata_come_back(self):
    path = self.folder / 'new' / 'state'
    tree_store.save_tree(path, _tree(), metadata={'step': 7, 'note': 'x'})
    self._assert_same_bits(
      tree_store.restore_tree(path, _abstract(_tree())), _tree()
    )
    self.assertEqual(tree_store.read_metadata(path), {'step': 7, 'note': 'x'})

  def test_a_relative_path_is_as_good(self):
    """Orbax alone reads nothing from one, and calls the tree empty."""
    path = self.folder / 'state'
    tree_store.save_tree(path, _tree(), metadata={'step': 3})
    relative = pathlib.Path(os.path.relpath(path))
    self.assertFalse(relative.is_absolute())
    self.assertNotEmpty(tree_store.read_shapes(relative))
    self.assertEqual(tree_store.read_metadata(relative), {'step': 3})
    self._assert_same_bits(
      tree_store.restore_tree(relative, _abstract(_tree())), _tree()
    )

  def test_array_by_array_equals_at_once_and_reads_onto_any_mesh(self):
    weight = jnp.arange(64.0).reshape(8, 8)
    saved = device_mesh.make_mesh({'fsdp': 8})
    weight = jax.device_put(
      weight, sharding.named(saved, ('hidden', None), weight.shape)
    )

    def leaves():
      yield ('params', 'x', 'weight'), weight
      # What an unfinished import leaves behind cannot be read.
      with self.assertRaisesRegex(tree_store.TreeError, 'no finished tree'):
        tree_store.read_shapes(self.folder / 'state')
      yield ('params', 'y'), 2 * weight

    tree_store.save_leaves(self.folder / 'state', leaves())
    mesh = device_mesh.make_mesh({'fsdp': 2, 'tensor': 4})
    target = sharding.named(mesh, ('heads', 'hidden'), weight.shape)
    wanted = {'params': {'x': {'weight': weight}, 'y': 2 * weight}}
    found = tree_store.restore_tree(
      self.folder / 'state', _abstract(wanted, sharding=target)
    )
    self._assert_same_bits(found, wanted)
    self.assertEqual(found['params']['y'].sharding, target)

  def test_an_interrupted_save_is_started_again(self):
    def broken():
      yield ('params', 'old'), jnp.ones(3)
      raise KeyboardInterrupt

    path = self.folder / 'state'
    with self.assertRaises(KeyboardInterrupt):
      tree_store.save_leaves(path, broken())
    tree_store.save_leaves(path, [(('params', 'new'), jnp.ones(3))])
    self.assertEqual(list(tree_store.read_shapes(path)), [('params', 'new')])

  def test_a_part_is_read_alone(self):
    tree_store.save_tree(self.folder / 'state', _tree())
    part = {'params': {'b': _tree()['params']['b']}}
    self._assert_same_bits(
      tree_store.restore_tree(self.folder / 'state', _abstract(part)), part
    )

  @parameterized.named_parameters(
    ('missing', {'c': np.zeros(3)}, 'has no array c'),
    (
      'misshapen',
      {'params': {'b': np.zeros(4)}},
      r'params.b has shape \(3,\) .* but \(4,\)',
    ),
  )
  def test_another_tree_is_refused(self, wanted, message):
    tree_store.save_tree(self.folder / 'state', _tree())
    with self.assertRaisesRegex(tree_store.TreeError, message):
      tree_store.restore_tree(self.folder / 'state', _abstract(wanted))

  def test_nothing_there_and_something_there_are_errors(self):
    with self.assertRaisesRegex(tree_store.TreeError, 'no finished tree'):
      tree_store.read_metadata(self.folder / 'absent')
    (self.folder / 'taken').mkdir()
    with self.assertRaisesRegex(tree_store.TreeError, 'written once'):
      tree_store.save_tree(self.folder / 'taken', _tree())


if __name__ == '__main__':
  absltest.main()
