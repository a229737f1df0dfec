"""The codec that turns one version of the weights into the next, exactly.

Of a bf16 model trained at RL learning rates about 1% of the weights change
per version. `encode(parent, new)` finds them by comparing bits (so NaN
payloads and -0.0 survive) and writes their positions and NEW values. A delta
holds absolute values, not differences: applying it twice is applying it once,
and a half-applied one is repaired by applying it again. `encode({}, new)` is
a base: the same container with every value of every tensor.

Nothing in a blob says which parent it belongs to; its manifest does, with the
`digest` that the weights must have afterwards.

Format (integers little-endian):

    0   8  magic b'SWE17D1\\n'
    8  16  xxh3-128 of everything after byte 24, canonical (big-endian)
    24  4  size of the table, uint32
    28  .  table: JSON, compressed
    .   .  sections, in the order of the table

Tables and sections are zstd frames (level 1: higher ones gain nothing here).

    table = {"base": bool,         true for encode({}, new)
             "elements": int,      of all tensors of `new`, changed or not
             "groups": [group]}
    group = {"dtype": str,         as in _DTYPES
             "tensors": [[name, shape]],
             "changed": int,       values in this group
             "escapes": int|null,  null: dense, all values are there
             "sections": [int]}    compressed sizes

A group is a flat stream: its tensors, in this order, C-contiguous, laid end
to end. Tensors that did not change are in no group. A tensor of which more
than 15% changed goes into a dense group, all others into sparse ones. A
sparse group has two sections in front of its values:

    gaps     uint8[changed]   unchanged elements since the last changed one;
                              255 = the next of the escapes
    escapes  uint64[escapes]  gaps of 255 and more

and every group has its values as byte planes, one section per byte of the
dtype: first the lowest byte of all values, then the next.

Example: `w`, a uint16[400], zero but for w[1], becomes 0x0203 at position 1
and 0x0405 at position 300. The table has elements 400 and one group
{"dtype": "uint16", "tensors": [["w", [400]]], "changed": 2, "escapes": 1}
whose sections hold

    gaps     01 ff
    escapes  2a 01 00 00 00 00 00 00     300 - 1 - 1 = 298
    plane 0  03 05
    plane 1  02 04
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np
import xxhash
import zstandard

FORMAT = 'swe17.delta.1'

_MAGIC = b'SWE17D1\n'
_BODY = 24  # first byte under the digest
_TABLE = 28
_LEVEL = 1
_ESCAPE = 255
# Above this share of changes positions cost more than they save.
_DENSE_FRACTION = 0.15
# Elements after which a group is closed. Bounds the working memory, and
# hundreds of small tensors still share one group.
_GROUP_ELEMENTS = 1 << 22

_DTYPES = {
  np.dtype(dtype).name: np.dtype(dtype)
  for dtype in (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn),
  )
}


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
    new: name -> array of a dtype in `_DTYPES`.

  Returns:
    A blob for `decode`; see Format in the module docstring.

  Raises:
    DeltaError: the two do not have the same tensors, or a dtype is not known.
  """
  if parent:
    _check_same_layout(parent, new)
  entries, sections = [], []
  for group in _grouped(_updates(parent, new)):
    entry, parts = _encode_group(group)
    entries.append(entry)
    sections += parts
  table = {
    'base': not parent,
    'elements': sum(array.size for array in new.values()),
    'groups': entries,
  }
  packed = _compress(json.dumps(table, separators=(',', ':')).encode())
  size = len(packed).to_bytes(4, 'little')
  body = b''.join([size, packed, *sections])
  return b''.join([_MAGIC, xxhash.xxh3_128_digest(body), body])


def decode(blob: bytes) -> StagedDelta:
  """Decodes a blob of `encode`, having checked its digest.

  Raises:
    DeltaError: the blob is truncated, damaged, or of another format.
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
    return _decode_body(view)
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
  if _DTYPES.get(array.dtype.name) != array.dtype:
    raise DeltaError(f'{name} has {array.dtype=}; known: {sorted(_DTYPES)}')
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(f'u{array.dtype.itemsize}')


def _writable_bits(
  tensors: Mapping[str, np.ndarray], update: Update
) -> np.ndarray:
  name = update.name
  if name not in tensors:
    raise DeltaError(
      f'delta changes {name}, which the receiver does not have; it was made '
      'for another model, or names must be mapped first'
    )
  array = tensors[name]
  bits = _bits(name, array)
  if (array.dtype, array.shape) != (update.dtype, update.shape):
    raise DeltaError(
      f'delta has {name} as {update.dtype.name}{list(update.shape)}, the '
      f'receiver as {array.dtype.name}{list(array.shape)}'
    )
  if not (array.flags.c_contiguous and array.flags.writeable):
    raise DeltaError(
      f'{name} must be writable and C-contiguous to be changed in place'
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


def _size(update: Update) -> int:
  return int(np.prod(update.shape, dtype=np.int64))


def _grouped(updates: Iterable[Update]) -> Iterator[list[Update]]:
  """Collects updates of one dtype and density up to _GROUP_ELEMENTS."""
  groups: dict[tuple[str, bool], list[Update]] = {}
  sizes: dict[tuple[str, bool], int] = {}
  for update in updates:
    key = update.dtype.name, update.positions is None
    if key in groups and sizes[key] + _size(update) > _GROUP_ELEMENTS:
      yield groups.pop(key)
    if key not in groups:
      groups[key], sizes[key] = [], 0
    groups[key].append(update)
    sizes[key] += _size(update)
  yield from groups.values()


def _compress(data) -> bytes:
  return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _encode_group(group: list[Update]) -> tuple[dict, list[bytes]]:
  """Returns the group's entry in the table and its sections."""
  values = np.concatenate([update.values for update in group])
  sections, escapes = [], None
  if group[0].positions is not None:
    starts = np.cumsum([0] + [_size(update) for update in group[:-1]])
    positions = np.concatenate(
      [update.positions + start for update, start in zip(group, starts)]
    )
    gaps = np.diff(positions, prepend=-1) - 1
    escaped = gaps[gaps >= _ESCAPE].astype('<u8')
    escapes = escaped.size
    sections = [np.minimum(gaps, _ESCAPE).astype(np.uint8), escaped]
  planes = values.view(np.uint8).reshape(-1, values.itemsize)
  sections += [np.ascontiguousarray(plane) for plane in planes.T]
  packed = [_compress(section) for section in sections]
  entry = {
    'dtype': group[0].dtype.name,
    'tensors': [[update.name, list(update.shape)] for update in group],
    'changed': values.size,
    'escapes': escapes,
    'sections': [len(section) for section in packed],
  }
  return entry, packed


def _decode_body(view: memoryview) -> StagedDelta:
  start = _TABLE + int.from_bytes(view[_BODY:_TABLE], 'little')
  table = json.loads(_decompress(view[_TABLE:start]))
  updates = []
  for entry in table['groups']:
    ends = np.cumsum([start, *entry['sections']]).tolist()
    sections = [view[a:b] for a, b in zip(ends, ends[1:])]
    updates += _decode_group(entry, sections)
    start = ends[-1]
  if start != len(view):
    raise ValueError(f'sections end at {start} of {len(view)} bytes')
  return StagedDelta(
    updates=tuple(updates), elements=table['elements'], is_base=table['base']
  )


def _decompress(frame: memoryview) -> bytes:
  return zstandard.ZstdDecompressor().decompress(frame)


def _section(frame: memoryview, *, dtype: str, size: int) -> np.ndarray:
  array = np.frombuffer(_decompress(frame), dtype)
  if array.size != size:
    raise ValueError(f'section has {array.size} items, its table says {size}')
  return array


def _decode_group(entry: dict, sections: list[memoryview]) -> list[Update]:
  dtype, changed = _DTYPES[entry['dtype']], entry['changed']
  shapes = [tuple(shape) for _, shape in entry['tensors']]
  bounds = np.cumsum([0] + [np.prod(s, dtype=np.int64) for s in shapes])
  positions = None
  cuts = bounds
  if entry['escapes'] is not None:
    positions = _decode_positions(sections[:2], entry)
    if positions.size and positions[-1] >= bounds[-1]:
      raise ValueError(f'position {positions[-1]} is beyond {bounds[-1]}')
    cuts = np.searchsorted(positions, bounds)
    sections = sections[2:]
  elif changed != bounds[-1]:
    raise ValueError(f'{changed} values for {bounds[-1]} elements')
  planes = np.empty((changed, dtype.itemsize), np.uint8)
  for byte, frame in zip(range(dtype.itemsize), sections, strict=True):
    planes[:, byte] = _section(frame, dtype='u1', size=changed)
  values = planes.reshape(-1).view(f'<u{dtype.itemsize}')
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


def _decode_positions(
  sections: list[memoryview], entry: dict
) -> np.ndarray:  # [changed] i64
  gaps = _section(sections[0], dtype='u1', size=entry['changed'])
  escapes = _section(sections[1], dtype='<u8', size=entry['escapes'])
  steps = gaps.astype(np.int64)
  steps[gaps == _ESCAPE] = escapes
  return np.cumsum(steps + 1) - 1
