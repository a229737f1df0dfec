"""From logical axes to devices: one table, read by weights and activations.

An array names what its axes mean ('expert', 'hidden', ...); the table says
which axes of the mesh split them. Changing a layout is changing a row here.

Example:
  >>> spec({'fsdp': 4, 'tensor': 1}, ('layers', 'hidden'), (3, 128))
  PartitionSpec(None, 'fsdp')
"""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

# Logical axis -> mesh axes, the outer one first. Axes that are not listed
# (layers, norms, ranks) are kept whole on every device.
RULES: dict[str, tuple[str, ...]] = {
  'batch': ('replica', 'fsdp', 'expert'),
  'tokens': ('context',),
  'vocab': ('tensor',),
  'hidden': ('fsdp',),
  'heads': ('tensor',),
  'ffn': ('tensor',),
  'expert': ('expert',),
}


def spec(
  sizes: Mapping[str, int],
  logical_axes: Sequence[str | None],
  shape: Sequence[int],
) -> PartitionSpec:
  """Returns how an array is split.

  A mesh axis splits at most one axis of an array, the first that asks. One
  that does not divide the length left to it is not used: that part of the
  array is replicated.

  Args:
    sizes: mesh axis -> size.
    logical_axes: the meaning of each axis; None is kept whole.
    shape: length of each axis.

  Raises:
    ValueError: another number of axes than `shape` has.
  """
  if len(logical_axes) != len(shape):
    raise ValueError(
      f'{tuple(logical_axes)} names {len(logical_axes)} axes of an array '
      f'with shape {tuple(shape)}; name every axis once'
    )
  used: set[str] = set()
  parts: list[str | tuple[str, ...] | None] = []
  for name, length in zip(logical_axes, shape):
    chosen: list[str] = []
    for axis in RULES.get(name or '', ()):
      size = sizes.get(axis, 1)
      if size > 1 and axis not in used and length % size == 0:
        chosen.append(axis)
        used.add(axis)
        length //= size
    parts.append(tuple(chosen) if len(chosen) > 1 else next(iter(chosen), None))
  return PartitionSpec(*parts)


def named(
  mesh: jax.sharding.Mesh,
  logical_axes: Sequence[str | None],
  shape: Sequence[int],
) -> NamedSharding:
  """Returns the sharding of an array with these logical axes on `mesh`."""
  return NamedSharding(mesh, spec(mesh.shape, logical_axes, shape))


def constrain(
  x: jax.Array, *logical_axes: str | None, mesh: jax.sharding.Mesh
) -> jax.Array:
  """Splits an intermediate array as the table says, inside `jit`."""
  sharding = named(mesh, logical_axes, x.shape)
  return jax.lax.with_sharding_constraint(x, sharding)
