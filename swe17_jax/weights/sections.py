"""The sections of a group of changes: hazards and words, or byte planes.

What `delta` lays into its container, for one flat stream of one dtype. Damage
that a digest did not catch shows as ValueError.
"""

import ml_dtypes
import numpy as np
import xxhash
import zstandard

from swe17_jax.weights import coder

_LEVEL = 1
DTYPES = {
  np.dtype(dtype).name: np.dtype(dtype)
  for dtype in (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn),
  )
}
# What says how often an element changes: (bits >> shift) & mask. Of floats the
# exponent, of single bytes everything, of the rest nothing.
_CLASSES = {
  'bfloat16': (7, 0xFF),
  'float16': (8, 0x7F),
  'float32': (23, 0xFF),
  'float64': (55, 0xFF),
  **dict.fromkeys(
    (name for name, dtype in DTYPES.items() if dtype.itemsize == 1), (0, 0xFF)
  ),
}
_SIGN_MAGNITUDE = frozenset(
  ('bfloat16', 'float16', 'float32', 'float64', 'float8_e4m3fn', 'float8_e5m2')
)
_CENSUS = 1 << 16  # elements looked at to estimate the sizes of the classes


class WrongParent(ValueError):
  """Changes do not fit the stream that they are to be decoded with."""


def compress(data) -> bytes:
  """Returns a zstd frame."""
  return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def checksum(positions: np.ndarray, values: np.ndarray) -> str:
  """Returns what identifies the changes of a group."""
  hasher = xxhash.xxh3_64(positions)
  hasher.update(values)
  return hasher.hexdigest()


def _traits(dtype: str) -> tuple[np.uint64, np.uint64, np.uint64, bool]:
  """Returns the last four arguments of `coder.encode` and `decode`."""
  shift, mask = _CLASSES.get(dtype, (0, 0))
  top = 1 << (8 * DTYPES[dtype].itemsize - 1)
  numbers = np.uint64(shift), np.uint64(mask), np.uint64(top)
  return *numbers, dtype in _SIGN_MAGNITUDE


def encode_changes(
  dtype: str, old: np.ndarray, positions: np.ndarray, values: np.ndarray
) -> list[bytes]:
  """Returns the sections of changes in the stream `old`."""
  traits = _traits(dtype)
  stride = max(1, old.size // _CENSUS) | 1
  codes = coder.hazard_codes(*coder.census(old, positions, *traits[:2], stride))
  table = coder.hazards(codes)
  words = coder.encode(old, positions, values, table, *traits)
  return [compress(codes), words.astype('<u4').tobytes()]


def decompress(frame: memoryview, *, limit: int) -> bytes:
  """Returns what a zstd frame holds: at most `limit` bytes."""
  size = zstandard.get_frame_parameters(frame).content_size
  if not 0 <= size <= limit:
    raise ValueError(f'zstd frame says it holds {size} bytes, of {limit}')
  return zstandard.ZstdDecompressor().decompress(frame)


def _section(frame: memoryview, *, size: int) -> np.ndarray:
  array = np.frombuffer(decompress(frame, limit=size), np.uint8)
  if array.size != size:
    raise ValueError(f'section has {array.size} bytes, its table says {size}')
  return array


def decode_planes(
  entry: dict, sections: list[memoryview], *, size: int
) -> np.ndarray:
  """Returns all values of a dense group as unsigned integers."""
  itemsize = DTYPES[entry['dtype']].itemsize
  if entry['changed'] != size:
    raise ValueError(f'{entry["changed"]} values for {size} elements')
  planes = np.empty((size, itemsize), np.uint8)
  for byte, frame in zip(range(itemsize), sections, strict=True):
    planes[:, byte] = _section(frame, size=size)
  return planes.reshape(-1).view(f'<u{itemsize}')


def decode_changes(
  entry: dict, sections: list[memoryview], old: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the positions and values of a sparse group.

  Raises:
    WrongParent: `old` is not what they were encoded with.
  """
  frame, words = sections
  changed = entry['changed']
  if not 0 <= changed <= old.size:
    raise ValueError(f'{changed} changes in {old.size} elements')
  table = coder.hazards(_section(frame, size=coder.CLASSES))
  positions, values = np.empty(changed, np.int64), np.empty(changed, old.dtype)
  sound = coder.decode(
    *(old, np.frombuffer(words, '<u4'), positions, values, table),
    *_traits(entry['dtype']),
  )
  if not sound or checksum(positions, values) != entry['check']:
    raise WrongParent(
      f'{entry["tensors"][0][0]} is not what the delta was made against'
    )
  return positions, values
