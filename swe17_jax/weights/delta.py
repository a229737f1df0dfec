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
and 0x0405 at position 300. The table has one group
{"dtype": "uint16", "tensors": [["w", [400]]], "changed": 2, "check":
xxh3-64 of 01 00 00 00 00 00 00 00 2c 01 00 00 00 00 00 00 03 02 05 04}. Of
an integer dtype all elements are of class 0.
"""

import collections
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures

import numpy as np
import xxhash
import zstandard

from swe17_jax.weights import sections
from swe17_jax.weights import staged as stages

FORMAT = 'swe17.delta.2'

_MAGIC = b'SWE17D2\n'
_BODY = 24  # first byte under the digest
_TABLE = 28
_TABLE_LIMIT = 1 << 30  # bytes; damage must not ask for all memory
# Above this share of changes the coder saves too little for its time.
_DENSE_FRACTION = 0.5
# Elements after which a unit is closed. Bounds the working memory, and
# hundreds of small tensors still share one.
_UNIT_ELEMENTS = 1 << 22


def digest(tensors: Mapping[str, np.ndarray]) -> str:
  """Digest of named tensors, in hex; disjoint parts can be `combine`d.

  The sum, modulo 2**128, of xxh3-128 over each tensor's name, dtype, shape and
  bytes.
  """
  total = 0
  for name, array in tensors.items():
    flat = stages.bits(name, array)
    header = [name, array.dtype.name, list(array.shape)]
    hasher = xxhash.xxh3_128(json.dumps(header).encode() + b'\n')
    hasher.update(flat.view(np.uint8))
    total += hasher.intdigest()
  return f'{total % (1 << 128):032x}'


def combine(digests: Iterable[str]) -> str:
  """The digest of all tensors from those of disjoint parts of them."""
  return f'{sum(int(part, 16) for part in digests) % (1 << 128):032x}'


def encode(
  parent: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> bytes:
  """Encodes what turns `parent` into `new` as one blob; see `encode_blobs`."""
  (blob,) = encode_blobs(parent, new, blob_bytes=1 << 62, threads=1)
  return blob


def encode_blobs(
  parent: Mapping[str, np.ndarray],
  new: Mapping[str, np.ndarray],
  *,
  blob_bytes: int,
  threads: int,
) -> Iterator[bytes]:
  """Encodes what turns `parent` into `new`; an empty parent gives a base.

  Works a few million elements ahead of the caller, whatever the model's size.

  Args:
    parent: name -> array; empty, or the names, shapes and dtypes of `new`.
    new: name -> array of a dtype in `sections.DTYPES`.
    blob_bytes: a blob is closed when it has reached this size.
    threads: units to encode at a time.

  Yields:
    At least one blob for `decode`; see Format in the module docstring.

  Raises:
    DeltaError: the two do not have the same tensors, or a dtype is not known.
  """
  if parent:
    _check_same_layout(parent, new)
  is_base = not parent
  entries, body, size = [], [], 0

  def encode_unit(names):
    return list(_encode_unit(names, parent, new))

  closed = 0
  for groups in _ahead(encode_unit, _units(new), threads=threads):
    for entry, parts in groups:
      entries.append(entry)
      body += parts
      size += sum(entry['sections'])
    if size >= blob_bytes:
      yield _container(entries, body, is_base=is_base)
      entries, body, size, closed = [], [], 0, closed + 1
  if entries or not closed:
    yield _container(entries, body, is_base=is_base)


def decode(
  blob: bytes, parent: Mapping[str, np.ndarray], *, threads: int = 1
) -> stages.StagedDelta:
  """Decodes a blob of `encode`, having checked its digest.

  Args:
    blob: what `encode` returned.
    parent: the tensors that the delta was made against; only read. A base
      needs none.
    threads: groups to decode at a time.

  Raises:
    DeltaError: the blob is truncated, damaged, of another format, or of
      another parent.
  """
  if blob[: len(_MAGIC)] != _MAGIC:
    raise stages.DeltaError(
      f'not a {FORMAT} blob: it begins with {blob[:8]!r}, not {_MAGIC!r}; '
      'fetch it again or publish a new base'
    )
  view = memoryview(blob)
  if xxhash.xxh3_128_digest(view[_BODY:]) != blob[len(_MAGIC) : _BODY]:
    raise stages.DeltaError(
      f'blob of {len(blob)} bytes is truncated or damaged: its xxh3-128 is '
      'not the recorded one; fetch it again'
    )
  try:
    return _decode_body(view, parent, threads=threads)
  except stages.DeltaError:
    raise
  except sections.WrongParent as error:
    raise stages.DeltaError(
      f'delta does not decode: {error}; apply the versions between, or load a '
      'base'
    ) from error
  except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
    raise stages.DeltaError(
      f'blob of {len(blob)} bytes has a sound digest but breaks {FORMAT}: '
      f'{error!r}; publish a new base with this version of the code'
    ) from error


def _check_same_layout(
  parent: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]
) -> None:
  differing = sorted(parent.keys() ^ new.keys())
  if differing:
    raise stages.DeltaError(
      f'parent and new must have the same tensors; only one has {differing}; '
      'publish a base to change the model'
    )
  for name, array in new.items():
    old = parent[name]
    if (old.dtype, old.shape) != (array.dtype, array.shape):
      raise stages.DeltaError(
        f'{name} was {old.dtype.name}{list(old.shape)} and is now '
        f'{array.dtype.name}{list(array.shape)}; publish a base to change the '
        'model'
      )


def _units(tensors: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
  """Collects tensors of one dtype up to _UNIT_ELEMENTS."""
  names: dict[str, list[str]] = collections.defaultdict(list)
  sizes: dict[str, int] = collections.defaultdict(int)
  for name in sorted(tensors):
    dtype, size = tensors[name].dtype.name, tensors[name].size
    if names[dtype] and sizes[dtype] + size > _UNIT_ELEMENTS:
      yield names.pop(dtype)
      del sizes[dtype]
    names[dtype].append(name)
    sizes[dtype] += size
  yield from names.values()


def _ahead(function: Callable, items: Iterable, *, threads: int) -> Iterator:
  """Like `map`, on threads that run at most two rounds ahead."""
  if threads == 1:
    yield from map(function, items)
    return
  with futures.ThreadPoolExecutor(threads) as pool:
    waiting = collections.deque()
    for item in items:
      waiting.append(pool.submit(function, item))
      if len(waiting) == 2 * threads:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()


def _encode_unit(
  names: Sequence[str],
  parent: Mapping[str, np.ndarray],
  new: Mapping[str, np.ndarray],
) -> Iterator[tuple[dict, list[bytes]]]:
  """Yields a sparse and a dense group, or less: table entries and sections."""
  sparse, dense = [], []
  for name in names:
    update = _update(name, parent, new[name])
    if update.positions is None:
      dense.append(update)
    elif update.positions.size:
      sparse.append(update)
  if sparse:
    yield _encode_sparse(sparse, parent)
  if dense:
    yield _encode_dense(dense)


def _update(
  name: str, parent: Mapping[str, np.ndarray], array: np.ndarray
) -> stages.Update:
  found, positions = stages.bits(name, array), None
  if parent:
    positions = np.flatnonzero(stages.bits(name, parent[name]) != found)
    if positions.size > _DENSE_FRACTION * found.size:
      positions = None
  return stages.Update(
    name=name,
    dtype=array.dtype,
    shape=array.shape,
    positions=positions,
    values=found if positions is None else found[positions],
  )


def _entry(
  group: Sequence[stages.Update], parts: Sequence[bytes], check: str | None
) -> dict:
  return {
    'dtype': group[0].dtype.name,
    'tensors': [[update.name, list(update.shape)] for update in group],
    'changed': sum(update.values.size for update in group),
    'check': check,
    'sections': [len(part) for part in parts],
  }


def _encode_dense(group: Sequence[stages.Update]) -> tuple[dict, list[bytes]]:
  values = _stream([update.values for update in group])
  planes = values.view(np.uint8).reshape(-1, values.itemsize).T
  parts = [sections.compress(np.ascontiguousarray(plane)) for plane in planes]
  return _entry(group, parts, None), parts


def _encode_sparse(
  group: Sequence[stages.Update], parent: Mapping[str, np.ndarray]
) -> tuple[dict, list[bytes]]:
  starts = np.cumsum([0] + [math.prod(update.shape) for update in group[:-1]])
  positions = np.concatenate(
    [update.positions + start for update, start in zip(group, starts)]
  )
  values = _stream([update.values for update in group])
  old = _stream([stages.bits(u.name, parent[u.name]) for u in group])
  dtype = group[0].dtype.name
  parts = sections.encode_changes(dtype, old, positions, values)
  return _entry(group, parts, sections.checksum(positions, values)), parts


def _stream(arrays: Sequence[np.ndarray]) -> np.ndarray:
  return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _container(
  entries: Sequence[dict], parts: Sequence[bytes], *, is_base: bool
) -> bytes:
  table = json.dumps(
    {'base': is_base, 'groups': entries}, separators=(',', ':')
  )
  packed = sections.compress(table.encode())
  body = b''.join([len(packed).to_bytes(4, 'little'), packed, *parts])
  return b''.join([_MAGIC, xxhash.xxh3_128_digest(body), body])


def _decode_body(
  view: memoryview, parent: Mapping[str, np.ndarray], *, threads: int
) -> stages.StagedDelta:
  start = _TABLE + int.from_bytes(view[_BODY:_TABLE], 'little')
  table = json.loads(
    sections.decompress(view[_TABLE:start], limit=_TABLE_LIMIT)
  )
  groups = []
  for entry in table['groups']:
    ends = np.cumsum([start, *entry['sections']]).tolist()
    groups.append((entry, [view[a:b] for a, b in zip(ends, ends[1:])]))
    start = ends[-1]
  if start != len(view):
    raise ValueError(f'sections end at {start} of {len(view)} bytes')

  def decode_group(group):
    return _decode_group(*group, parent)

  decoded = _ahead(decode_group, groups, threads=threads)
  return stages.StagedDelta(
    updates=tuple(update for updates in decoded for update in updates),
    is_base=table['base'],
  )


def _decode_group(
  entry: dict,
  parts: list[memoryview],
  parent: Mapping[str, np.ndarray],
) -> list[stages.Update]:
  dtype = sections.DTYPES[entry['dtype']]
  shapes = [tuple(shape) for _, shape in entry['tensors']]
  bounds = np.cumsum([0] + [math.prod(s) for s in shapes])
  if entry['check'] is None:
    positions, cuts = None, bounds
    values = sections.decode_planes(entry, parts, size=int(bounds[-1]))
  else:
    old = [
      stages.matching_bits(parent, name, dtype, tuple(shape))
      for name, shape in entry['tensors']
    ]
    positions, values = sections.decode_changes(entry, parts, _stream(old))
    cuts = np.searchsorted(positions, bounds)
  return [
    stages.Update(
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
