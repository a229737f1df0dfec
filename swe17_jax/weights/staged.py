"""A decoded delta in host memory: merged, checked and applied in place.

Applying writes absolute values, so that doing it twice is doing it once.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from swe17_jax.weights import sections


class DeltaError(ValueError):
  """A blob is damaged, or it does not fit the tensors it was given."""


def bits(name: str, array: np.ndarray) -> np.ndarray:
  """The array's bits as a flat unsigned array; a view where it can be.

  Raises:
    DeltaError: no numpy array, or of a dtype that no delta can hold.
  """
  if not isinstance(array, np.ndarray):
    raise DeltaError(
      f'{name} is a {type(array).__name__}; copy it to a host numpy array'
    )
  if sections.DTYPES.get(array.dtype.name) != array.dtype:
    raise DeltaError(
      f'{name} has {array.dtype=}; known: {sorted(sections.DTYPES)}'
    )
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(f'u{array.dtype.itemsize}')


def matching_bits(
  tensors: Mapping[str, np.ndarray],
  name: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
) -> np.ndarray:
  """The bits of one tensor, which must have this dtype and shape."""
  if name not in tensors:
    raise DeltaError(
      f'delta changes {name}, which the receiver does not have; it was made '
      'for another model, or names must be mapped first'
    )
  array = tensors[name]
  found = bits(name, array)
  if (array.dtype, array.shape) != (dtype, shape):
    raise DeltaError(
      f'delta has {name} as {dtype.name}{list(shape)}, the receiver as '
      f'{array.dtype.name}{list(array.shape)}'
    )
  return found


@dataclasses.dataclass(frozen=True)
class Update:
  """The new values of one tensor.

  Attributes:
    name: Hugging Face name of the tensor.
    dtype: of the tensor.
    shape: of the whole tensor.
    positions: int64[n], ascending, into the flattened tensor; None when all
      of its elements are in `values`.
    values: uint{8, 16, 32 or 64}[n], the bits of the elements.
  """

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  positions: np.ndarray | None
  values: np.ndarray


def _writable_bits(
  tensors: Mapping[str, np.ndarray], update: Update
) -> np.ndarray:
  found = matching_bits(tensors, update.name, update.dtype, update.shape)
  flags = tensors[update.name].flags
  if not (flags.c_contiguous and flags.writeable):
    raise DeltaError(
      f'{update.name} must be writable and C-contiguous to be changed in place'
    )
  return found


@dataclasses.dataclass(frozen=True)
class StagedDelta:
  """A decoded delta in host memory: checked, and ready to be applied.

  Attributes:
    updates: one per changed tensor.
    is_base: whether every tensor is there in full.
  """

  updates: tuple[Update, ...]
  is_base: bool

  @property
  def changed(self) -> int:
    """How many elements this delta writes."""
    return sum(update.values.size for update in self.updates)

  def apply(self, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the new values in place; applying twice does no harm.

    Args:
      tensors: name -> writable C-contiguous array of the recorded shape and
        dtype; may hold more tensors than changed, and views.

    Raises:
      DeltaError: a tensor is missing or does not fit; nothing was written.
    """
    targets = [_writable_bits(tensors, update) for update in self.updates]
    for target, update in zip(targets, self.updates):
      if update.positions is None:
        target[:] = update.values
      else:
        target[update.positions] = update.values

  def applied(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns `tensors` with the new values; copies only what changes."""
    changed = {u.name: tensors[u.name].copy(order='C') for u in self.updates}
    self.apply(changed)
    return {**tensors, **changed}

  def tensors(self) -> dict[str, np.ndarray]:
    """The tensors of a base, as writable views into this object.

    Raises:
      DeltaError: this is not a base.
    """
    if not self.is_base:
      raise DeltaError(
        'a delta holds changes only; load its base and apply it to that'
      )
    return {
      update.name: update.values.view(update.dtype).reshape(update.shape)
      for update in self.updates
    }


def merge(staged: Sequence[StagedDelta]) -> StagedDelta:
  """Returns one delta that does what these do one after another.

  They may also be the parts of one version, in any order.
  """
  parts: dict[str, list[Update]] = {}
  for one in staged:
    for update in one.updates:
      if update.positions is None:
        parts[update.name] = []  # whatever came before is overwritten
      parts.setdefault(update.name, []).append(update)
  return StagedDelta(
    updates=tuple(_merged(updates) for updates in parts.values()),
    is_base=staged[0].is_base,
  )


def _merged(updates: Sequence[Update]) -> Update:
  """Merges updates of one tensor; only the first may be dense."""
  first, *later = updates
  if not later:
    return first
  if first.positions is None:
    values = first.values.copy()
    for update in later:
      values[update.positions] = update.values
    return dataclasses.replace(first, values=values)
  positions = np.concatenate([u.positions for u in reversed(updates)])
  values = np.concatenate([u.values for u in reversed(updates)])
  positions, newest = np.unique(positions, return_index=True)
  return dataclasses.replace(first, positions=positions, values=values[newest])
