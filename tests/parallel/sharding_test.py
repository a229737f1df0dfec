"""Meshes and the table of logical axes, worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from swe17_jax.parallel import mesh as device_mesh
from swe17_jax.parallel import sharding


class MeshTest(parameterized.TestCase):
  def test_axes_that_are_left_out_have_size_one(self):
    mesh = device_mesh.make_mesh({'expert': 2, 'fsdp': 4})
    self.assertEqual(mesh.axis_names, device_mesh.AXES)
    self.assertEqual(tuple(mesh.shape.values()), (1, 4, 2, 1, 1))

  def test_parse(self):
    self.assertEqual(device_mesh.parse(''), {})
    self.assertEqual(
      device_mesh.parse('fsdp=4, expert=2'), {'fsdp': 4, 'expert': 2}
    )

  @parameterized.named_parameters(
    ('too_few', {'fsdp': 3}, r'fsdp=3 takes 3 devices, but there are 8'),
    ('none', {}, r'a mesh of 1 takes 1 devices, but there are 8'),
    ('unknown', {'data': 8}, "mesh axis 'data'=8 must be one of replica, "),
    ('zero', {'fsdp': 0}, "mesh axis 'fsdp'=0 .* size of at least 1"),
  )
  def test_meshes_that_cannot_be(self, shape, message):
    with self.assertRaisesRegex(device_mesh.MeshError, message):
      device_mesh.make_mesh(shape)

  @parameterized.parameters(
    'fsdp', 'fsdp=', 'fsdp=-2', 'fsdp=2,fsdp=4', 'x=2', 'fsdp=0'
  )
  def test_texts_that_are_no_mesh(self, text):
    with self.assertRaises(device_mesh.MeshError):
      device_mesh.parse(text)


class SpecTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('experts', ('layers', 'expert', 'ffn', 'hidden'), (3, 8, 6, 4),
     P(None, 'expert', 'tensor', 'fsdp')),
    ('does_not_divide', ('expert', 'hidden'), (8, 6), P('expert', None)),
    ('unlisted_and_none', ('norm', None, 'vocab'), (4, 4, 4),
     P(None, None, 'tensor')),
    # 8 rows: over fsdp = 4, then over expert = 2.
    ('batch', ('batch', 'tokens'), (8, 5), P(('fsdp', 'expert'), None)),
    # 4 rows: fsdp takes them all.
    ('small_batch', ('batch',), (4,), P('fsdp')),
    # 6 rows: fsdp = 4 does not divide them, expert = 2 does.
    ('odd_batch', ('batch',), (6,), P('expert')),
    # The mesh axis of the first hidden axis is taken.
    ('taken', ('hidden', 'hidden'), (4, 4), P('fsdp', None)),
  )  # fmt: skip
  def test_spec(self, axes, shape, wanted):
    sizes = {'replica': 1, 'fsdp': 4, 'expert': 2, 'tensor': 2}
    self.assertEqual(sharding.spec(sizes, axes, shape), wanted)

  def test_every_axis_must_be_named(self):
    with self.assertRaisesRegex(ValueError, r"\('hidden',\) names 1 axes"):
      sharding.spec({}, ('hidden',), (4, 4))

  def test_every_mesh_axis_of_the_table_exists(self):
    for axes in sharding.RULES.values():
      self.assertContainsSubset(axes, device_mesh.AXES)

  def test_devices_hold_the_parts_that_the_spec_says(self):
    mesh = device_mesh.make_mesh({'fsdp': 4, 'expert': 2})
    x = np.arange(32).reshape(2, 16)
    placed = jax.device_put(
      x, sharding.named(mesh, ('expert', 'hidden'), x.shape)
    )
    for shard in placed.addressable_shards:
      # Devices are laid out row by row: fsdp outside, expert inside.
      fsdp, expert = divmod(shard.device.id, 2)
      np.testing.assert_array_equal(
        shard.data, x[expert : expert + 1, 4 * fsdp : 4 * fsdp + 4]
      )

  def test_constrain_changes_the_layout_and_no_value(self):
    mesh = device_mesh.make_mesh({'fsdp': 8})
    x = jnp.arange(16.0).reshape(8, 2)

    @jax.jit
    def double(x):
      return sharding.constrain(2 * x, 'batch', None, mesh=mesh)

    out = double(x)
    np.testing.assert_array_equal(out, 2 * x)
    self.assertEqual(out.addressable_shards[0].data.shape, (1, 2))


if __name__ == '__main__':
  absltest.main()
