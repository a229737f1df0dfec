"""The device mesh: five named axes, most of them of size one.

    replica   full copies of the parameters; gradients are averaged over it
    fsdp      parameters and rows of a batch are split over it
    expert    experts are split over it, and rows of a batch too
    tensor    heads, feed-forward channels and vocabulary are split over it
    context   tokens of a row are split over it

Axis names appear in `parallel/` alone; everyone else uses logical names, see
`sharding.py`.

Example:
  >>> parse('fsdp=4,expert=2')
  {'fsdp': 4, 'expert': 2}
"""

import math
from collections.abc import Mapping

import jax

AXES = ('replica', 'fsdp', 'expert', 'tensor', 'context')


class MeshError(ValueError):
  """A mesh that these devices or these axes cannot form."""


def parse(text: str) -> dict[str, int]:
  """Reads 'axis=size,axis=size'; empty text means one device.

  Raises:
    MeshError: an unknown axis, or a size that is not a positive integer.
  """
  shape: dict[str, int] = {}
  for part in text.replace(' ', '').split(','):
    if not part:
      continue
    axis, _, size = part.partition('=')
    if not size.isdecimal() or axis in shape:
      raise MeshError(
        f'mesh {text!r} must name each axis once as axis=size, such as '
        f"'fsdp=4,expert=2'; {part!r} does not"
      )
    shape[axis] = int(size)
  _require_axes(shape)
  return shape


def make_mesh(shape: Mapping[str, int]) -> jax.sharding.Mesh:
  """Arranges all devices in a mesh with all five axes.

  Args:
    shape: axis -> size; an axis that is left out has size 1.

  Raises:
    MeshError: an unknown axis, or sizes whose product is not the number of
      devices.
  """
  _require_axes(shape)
  sizes = tuple(shape.get(axis, 1) for axis in AXES)
  count = jax.device_count()
  if math.prod(sizes) != count:
    asked = ' * '.join(f'{axis}={size}' for axis, size in shape.items())
    raise MeshError(
      f'a mesh of {asked or 1} takes {math.prod(sizes)} devices, but there '
      f'are {count}; the product of the sizes must be {count}'
    )
  kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(sizes, AXES, axis_types=kinds)


def _require_axes(shape: Mapping[str, int]) -> None:
  for axis, size in shape.items():
    if axis not in AXES or size < 1:
      raise MeshError(
        f'mesh axis {axis!r}={size} must be one of {", ".join(AXES)} with a '
        'size of at least 1'
      )
