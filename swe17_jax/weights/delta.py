"""The codec that turns one version of the weights into the next, exactly.

Of a bf16 model trained at RL learning rates about 1% of the weights change
per version. `encode(parent, new)` finds them by comparing bits (so NaN
payloads and -0.0 survive) and codes them with the parent as context, which
the receiver has (see `coder`). `decode` turns that into positions and NEW
values: applying them twice is applying them once, and a half-applied delta is
repaired by applying it again. `encode({}, new)` is a base: the same container
with every value of every tensor.

Every coded group carries a checksum of the changes it stands for, so a delta
that is decoded against another parent is refused before anything is written.

Format (integers little-endian):

    0   8  magic b'SWE17D2\\n'
    8  16  xxh3-128 of everything after byte 24, canonical (big-endian)
    24  4  size of the table, uint32
    28  .  table: JSON, a zstd frame
    .   .  sections, in the order of the table

    table = {"base": bool,         true for encode({}, new)
             "elements": int,      of all tensors of `new`, changed or not
             "groups": [group]}
    group = {"dtype": str,         as in sections.DTYPES
             "tensors": [[name, shape]],
             "changed": int,       values in this group
             "check": str|null,    null: dense, all values are there
             "sections": [int]}    their sizes

A group is a flat stream: its tensors, in this order, C-contiguous, laid end
to end. Tensors that did not change are in no group. A tensor of which more
than half changed goes into a dense group, all others into sparse ones.

A sparse group has two sections: the hazards of the classes, a zstd frame of
uint8[256] (`coder.hazard_codes`), and the uint32 words of `coder.encode`.
"check" is xxh3-64 (16 hexadecimal digits) of the positions as int64[changed]
in the stream, followed by the new values.

A dense group has its values as byte planes, a zstd frame (level 1: higher
ones gain nothing here) per byte of the dtype: first the lowest byte of all
values, then the next.

Example: `w`, a uint16[400], zero but for w[1], becomes 0x0203 at position 1
and 0x0405 at position 300. The table has elements 400 and one group
{"dtype": "uint16", "tensors": [["w", [400]]], "changed": 2, "check":
xxh3-64 of 01 00 00 00 00 00 00 00 2c 01 00 00 00 00 00 00 03 02 05 04}. Of
an integer dtype all elements are of class 0.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash
import zstandard

from swe17_jax.weights import sections

FORMAT = 'swe17.delta.2'

_MAGIC = b'SWE17D2\n'
_BODY = 24  # first byte under the digest
_TABLE = 28
# Above this share of changes the coder saves too little for its time.
_DENSE_FRACTION = 0.5
# Elements after which a group is closed. Bounds the working memory, and
# hundreds of small tensors still share one group.
_GROUP_ELEMENTS = 1 << 22


class DeltaError(ValueError):
  """A blob is damaged, or it does not fit the tensors it was given."""


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


@dataclasses.dataclass(frozen=True)
class StagedDelta:
  """A decoded delta in host memory: checked, and ready to be applied.

  Attributes:
    updates: one per changed tensor.
    elements: number of elements of all tensors, changed or not.
    is_base: whether every tensor is there in full.
  """

  updates: tuple[Update, ...]
  elements: int
  is_base: bool

  @property
  def changed_fraction(self) -> float:
    """Share of the elements that this delta writes."""
    return sum(u.values.size for u in self.updates) / max(self.elements, 1)

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
  """Returns one delta that does what these do one after another."""
  parts: dict[str, list[Update]] = {}
  for one in staged:
    for update in one.updates:
      if update.positions is None:
        parts[update.name] = []  # whatever came before is overwritten
      parts.setdefault(update.name, []).append(update)
  return StagedDelta(
    updates=tuple(_merged(updates) for updates in parts.values()),
    elements=staged[-1].elements,
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


def digest(tensors: Mapping[str, np.ndarray]) -> str:
  """xxh3-128 over the sorted names, dtypes, shapes and bytes, in hex."""
  hasher = xxhash.xxh3_128()
  for name in sorted(tensors):
    array = tensors[name]
    bits = _bits(name, array)
    header = [name, array.dtype.name, list(array.shape)]
    hasher.update(json.dumps(header).encode() + b'\n')
    hasher.update(bits.view(np.uint8))
  return hasher.hexdigest()


def encode(
  parent: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> bytes:
  """Encodes what turns `parent` into `new`; an empty parent gives a base.

  Args:
    parent: name -> array; empty, or the names, shapes and dtypes of `new`.
    new: name -> array of a dtype in `sections.DTYPES`.

  Returns:
    A blob for `decode`; see Format in the module docstring.

  Raises:
    DeltaError: the two do not have the same tensors, or a dtype is not known.
  """
  if parent:
    _check_same_layout(parent, new)
  entries, body = [], []
  for group in _grouped(_updates(parent, new)):
    entry, parts = _encode_group(group, parent)
    entries.append(entry)
    body += parts
  table = {
    'base': not parent,
    'elements': sum(array.size for array in new.values()),
    'groups': entries,
  }
  packed = sections.compress(json.dumps(table, separators=(',', ':')).encode())
  size = len(packed).to_bytes(4, 'little')
  body = b''.join([size, packed, *body])
  return b''.join([_MAGIC, xxhash.xxh3_128_digest(body), body])


def decode(blob: bytes, parent: Mapping[str, np.ndarray]) -> StagedDelta:
  """Decodes a blob of `encode`, having checked its digest.

  Args:
    blob: what `encode` returned.
    parent: the tensors that the delta was made against; only read. A base
      needs none.

  Raises:
    DeltaError: the blob is truncated, damaged, of another format, or of
      another parent.
  """
  if blob[: len(_MAGIC)] != _MAGIC:
    raise DeltaError(
      f'not a {FORMAT} blob: it begins with {blob[:8]!r}, not {_MAGIC!r}; '
      'fetch it again or publish a new base'
    )
  view = memoryview(blob)
  if xxhash.xxh3_128_digest(view[_BODY:]) != blob[len(_MAGIC) : _BODY]:
    raise DeltaError(
      f'blob of {len(blob)} bytes is truncated or damaged: its xxh3-128 is '
      'not the recorded one; fetch it again'
    )
  try:
    return _decode_body(view, parent)
  except DeltaError:
    raise
  except sections.WrongParent as error:
    raise DeltaError(
      f'delta does not decode: {error}; apply the versions between, or load a '
      'base'
    ) from error
  except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
    raise DeltaError(
      f'blob of {len(blob)} bytes has a sound digest but breaks {FORMAT}: '
      f'{error!r}; publish a new base with this version of the code'
    ) from error


def _bits(name: str, array: np.ndarray) -> np.ndarray:
  """The array's bits as a flat unsigned array; a view where it can be."""
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


def _matching_bits(
  tensors: Mapping[str, np.ndarray],
  name: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
) -> np.ndarray:
  if name not in tensors:
    raise DeltaError(
      f'delta changes {name}, which the receiver does not have; it was made '
      'for another model, or names must be mapped first'
    )
  array = tensors[name]
  bits = _bits(name, array)
  if (array.dtype, array.shape) != (dtype, shape):
    raise DeltaError(
      f'delta has {name} as {dtype.name}{list(shape)}, the receiver as '
      f'{array.dtype.name}{list(array.shape)}'
    )
  return bits


def _writable_bits(
  tensors: Mapping[str, np.ndarray], update: Update
) -> np.ndarray:
  bits = _matching_bits(tensors, update.name, update.dtype, update.shape)
  flags = tensors[update.name].flags
  if not (flags.c_contiguous and flags.writeable):
    raise DeltaError(
      f'{update.name} must be writable and C-contiguous to be changed in place'
    )
  return bits


def _check_same_layout(
  parent: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> None:
  differing = sorted(parent.keys() ^ new.keys())
  if differing:
    raise DeltaError(
      f'parent and new must have the same tensors; only one has {differing}; '
      'publish a base to change the model'
    )
  for name, array in new.items():
    old = parent[name]
    if (old.dtype, old.shape) != (array.dtype, array.shape):
      raise DeltaError(
        f'{name} was {old.dtype.name}{list(old.shape)} and is now '
        f'{array.dtype.name}{list(array.shape)}; publish a base to change the '
        'model'
      )


def _updates(
  parent: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> Iterator[Update]:
  for name in sorted(new):
    array = new[name]
    bits = _bits(name, array)
    positions = None
    if parent:
      positions = np.flatnonzero(_bits(name, parent[name]) != bits)
      if not positions.size:
        continue
      if positions.size > _DENSE_FRACTION * bits.size:
        positions = None
    yield Update(
      name=name,
      dtype=array.dtype,
      shape=array.shape,
      positions=positions,
      values=bits if positions is None else bits[positions],
    )


def _grouped(updates: Iterable[Update]) -> Iterator[list[Update]]:
  """Collects updates of one dtype and density up to _GROUP_ELEMENTS."""
  groups: dict[tuple[str, bool], list[Update]] = {}
  sizes: dict[tuple[str, bool], int] = {}
  for update in updates:
    key = update.dtype.name, update.positions is None
    if key in groups and sizes[key] + math.prod(update.shape) > _GROUP_ELEMENTS:
      yield groups.pop(key)
    if key not in groups:
      groups[key], sizes[key] = [], 0
    groups[key].append(update)
    sizes[key] += math.prod(update.shape)
  yield from groups.values()


def _encode_group(
  group: list[Update], parent: Mapping[str, np.ndarray]
) -> tuple[dict, list[bytes]]:
  """Returns the group's entry in the table and its sections."""
  values = np.concatenate([update.values for update in group])
  entry = {
    'dtype': group[0].dtype.name,
    'tensors': [[update.name, list(update.shape)] for update in group],
    'changed': values.size,
    'check': None,
  }
  if group[0].positions is None:
    planes = values.view(np.uint8).reshape(-1, values.itemsize)
    parts = [
      sections.compress(np.ascontiguousarray(plane)) for plane in planes.T
    ]
  else:
    starts = np.cumsum([0] + [math.prod(update.shape) for update in group[:-1]])
    positions = np.concatenate(
      [update.positions + start for update, start in zip(group, starts)]
    )
    entry['check'] = sections.checksum(positions, values)
    old = np.concatenate([_bits(u.name, parent[u.name]) for u in group])
    parts = sections.encode_changes(entry['dtype'], old, positions, values)
  entry['sections'] = [len(part) for part in parts]
  return entry, parts


def _decode_body(
  view: memoryview, parent: Mapping[str, np.ndarray]
) -> StagedDelta:
  start = _TABLE + int.from_bytes(view[_BODY:_TABLE], 'little')
  table = json.loads(sections.decompress(view[_TABLE:start]))
  updates = []
  for entry in table['groups']:
    ends = np.cumsum([start, *entry['sections']]).tolist()
    parts = [view[a:b] for a, b in zip(ends, ends[1:])]
    updates += _decode_group(entry, parts, parent)
    start = ends[-1]
  if start != len(view):
    raise ValueError(f'sections end at {start} of {len(view)} bytes')
  return StagedDelta(
    updates=tuple(updates), elements=table['elements'], is_base=table['base']
  )


def _decode_group(
  entry: dict,
  parts: list[memoryview],
  parent: Mapping[str, np.ndarray],
) -> list[Update]:
  dtype = sections.DTYPES[entry['dtype']]
  shapes = [tuple(shape) for _, shape in entry['tensors']]
  bounds = np.cumsum([0] + [math.prod(s) for s in shapes])
  if entry['check'] is None:
    positions, cuts = None, bounds
    values = sections.decode_planes(entry, parts, size=int(bounds[-1]))
  else:
    old = [
      _matching_bits(parent, name, dtype, tuple(shape))
      for name, shape in entry['tensors']
    ]
    old = np.concatenate(old) if len(old) > 1 else old[0]
    positions, values = sections.decode_changes(entry, parts, old)
    cuts = np.searchsorted(positions, bounds)
  return [
    Update(
      name=name,
      dtype=dtype,
      shape=shape,
      positions=None if positions is None else positions[a:b] - bound,
      values=values[a:b],
    )
    for (name, _), shape, bound, a, b in zip(
      entry['tensors'], shapes, bounds, cuts, cuts[1:]
    )
  ]
