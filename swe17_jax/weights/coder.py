"""The entropy coder of deltas: which weights changed, and by how many steps.

The receiver holds the parent, so the parent's bits are context. Weights of
one exponent ("class") change about equally often, small ones much more often
than large ones. Give an element of a class in which a share p changed the
hazard w = -log2(1 - p), and lay the elements end to end on an axis, each as
long as its hazard. On this axis changes fall evenly, with a density of ln 2,
whatever the weights are: half of all gaps are longer than 1. A change is the
part of the axis that its element covers, in exponential measure (`_measure`):
within one unit of where we stand, or else we skip to the first element border
beyond it and begin again, which an exponential distribution does not notice.
A range coder takes these intervals as they are, in fractions of bits. Both
sides add up one table entry per unchanged element and do real work per change
only.

New values are steps on the number line of the dtype (neighbouring floats are
one step apart, -0.0 and 0.0 too), mostly +-1: sign, bit length and mantissa
of the step go through adaptive binary models, the length's per class.

The range coder is Martin's (1979) with a 64-bit low, carries, and words of 32
bits; the binary models are those of LZMA, with 16-bit probabilities.
"""

import numba
import numpy as np

CLASSES = 256
# A hazard of 1.0 (a chance of 1/2), in table units.
_UNIT_BITS = 24
_UNIT = 1 << _UNIT_BITS

_U = np.uint64
_0, _1, _16, _32 = _U(0), _U(1), _U(16), _U(32)
_TOP = _U(1 << 32)  # range stays at or above this
_FULL = _U(2**64 - 1)
_B, _ONE, _TWO = _U(_UNIT_BITS), _U(_UNIT), _U(2 * _UNIT)

# Probabilities of a zero, in 1/65536. A model is one of: 64 for the length of
# a step in each class; 2 for the sign in each class; 256 for mantissas.
_HALF, _RATE = 1 << 15, 5
_LENGTHS = CLASSES * 64
_SIGNS = _LENGTHS + 2 * CLASSES
_MODELS = _SIGNS + 256

_jit = numba.njit(cache=True, nogil=True, boundscheck=False)


def hazard_codes(
  changed: np.ndarray,  # [CLASSES] i64
  total: np.ndarray,  # [CLASSES] i64
) -> np.ndarray:  # [CLASSES] u8
  """Returns the class hazards as bytes: 3 bits of mantissa, 5 of exponent."""
  share = changed / np.maximum(total, 2 * changed).clip(1)
  crowded = total < 2 * changed
  share[crowded] = changed[crowded] / np.maximum(total, changed)[crowded]
  units = -np.log2(1 - share.clip(0, 3 / 4)) * _UNIT
  units = np.maximum(units, 8)  # the smallest, and no log of 0 below
  exponents = np.floor(np.log2(units)).astype(np.int64) - 3
  codes = 8 * exponents + np.rint(units / 2.0**exponents).astype(np.int64) - 8
  return np.where(changed > 0, codes + 1, 0).astype(np.uint8)


def hazards(codes: np.ndarray) -> np.ndarray:  # [CLASSES] u8 -> u64
  """Returns the hazards that the bytes stand for; 0 = never changes."""
  steps = codes.astype(np.int64) - 1
  units = (8 + steps % 8) << np.maximum(steps // 8, 0)
  return np.where(codes == 0, 0, units).astype(np.uint64)


@_jit
def census(parent, positions, shift, mask, stride):
  """Counts changed and (about) all elements per class.

  All elements are estimated from every `stride`-th: a count of each would
  take longer than all else, and a little too long a code is still exact.
  """
  changed = np.zeros(CLASSES, np.int64)
  total = np.zeros(CLASSES, np.int64)
  for position in positions:
    changed[(_U(parent[position]) >> shift) & mask] += 1
  for i in range(0, parent.size, stride):
    total[(_U(parent[i]) >> shift) & mask] += stride
  return changed, total


@_jit
def _ordered(bits, top, is_float):
  """Maps bits to integers in the order of the numbers they stand for."""
  if not is_float:
    return bits
  if bits & top:
    return ~bits & (top | (top - _1))
  return bits | top


@_jit
def _measure(gap):
  """Of a gap < 4 units: the chance of a shorter one, in 1 / 2 units."""
  whole = gap >> _B
  part = gap & (_ONE - _1)
  return _TWO - (_TWO >> whole) + (part >> whole)


@_jit
def _shift_out(low, width, out, size):
  """Makes `width` at least 2**32."""
  if width < _TOP:
    out[size] = np.uint32(low >> _32)
    return low << _32, width << _32, size + 1
  return low, width, size


@_jit
def _add(low, more, out, size):
  """Returns low + more, having carried into the words before."""
  total = low + more
  if total < low:
    at = size - 1
    out[at] += np.uint32(1)
    while out[at] == 0:
      at -= 1
      out[at] += np.uint32(1)
  return total


@_jit
def _put_interval(low, width, out, size, start, stop):
  """Codes [start, stop) of 2 units."""
  part = width >> (_B + _1)
  low = _add(low, part * start, out, size)
  return _shift_out(low, part * (stop - start), out, size)


@_jit
def _put_bit(low, width, out, size, models, model, bit):
  p = models[model]
  bound = (width >> _16) * _U(p)
  if bit:
    models[model] = p - (p >> _RATE)
    low = _add(low, bound, out, size)
    width -= bound
  else:
    models[model] = p + ((65535 - p) >> _RATE)
    width = bound
  return _shift_out(low, width, out, size)


@_jit
def _put_step(low, width, out, size, models, context, down, step):
  """Codes a step >= 1: its direction, bit length - 1 in unary, mantissa."""
  low, width, size = _put_bit(
    low, width, out, size, models, _LENGTHS + context, down
  )
  model = 64 * (context >> 1)
  length = 0
  while step >> _U(length) > _1:
    low, width, size = _put_bit(
      low, width, out, size, models, model + length, True
    )
    length += 1
  low, width, size = _put_bit(
    low, width, out, size, models, model + length, False
  )
  for shift in range(length - 1, -1, -1):
    prefix = np.int64(min(step >> _U(shift + 1), _U(255)))
    low, width, size = _put_bit(
      *(low, width, out, size, models, _SIGNS + prefix),
      (step >> _U(shift)) & _1 == _1,
    )
  return low, width, size


@_jit
def _eight(parent, i, table, shift, mask):
  """Returns the hazard of eight elements; independent loads are fast."""
  run = _0
  for j in range(i, i + 8):
    run += table[(_U(parent[j]) >> shift) & mask]
  return run


@_jit
def encode(parent, positions, values, table, shift, mask, top, is_float):
  """Codes the changes of a flat array.

  Args:
    parent: u{8, 16, 32, 64}[n], bits of the parent.
    positions: i64[m], ascending, where they change.
    values: bits [m] that they change to; never the parent's.
    table: u64[CLASSES], `hazards`; above 0 where anything changes.
    shift, mask: u64, class of an element = bits >> shift & mask.
    top: u64, the highest bit of the dtype.
    is_float: whether the dtype is sign and magnitude.

  Returns:
    u32[words].
  """
  out = np.empty(512 + positions.size, np.uint32)
  models = np.full(_MODELS, _HALF, np.uint32)
  low, width = _0, _FULL
  out[0], size = 0, 1  # a word in front for carries
  everything = top | (top - _1)
  i = 0
  for k in range(positions.size):
    position = positions[k]
    gap = _0
    while i < position:
      if i + 8 <= position:
        run = _eight(parent, i, table, shift, mask)
        if gap + run < _ONE:
          gap += run
          i += 8
          continue
      gap += table[(_U(parent[i]) >> shift) & mask]
      i += 1
      if gap >= _ONE:
        if size + 256 > out.size:
          out = np.concatenate((out, np.empty_like(out)))
        low, width, size = _put_interval(
          low, width, out, size, _measure(gap), _TWO
        )
        gap = _0
    i = position + 1
    if size + 256 > out.size:
      out = np.concatenate((out, np.empty_like(out)))
    old = _U(parent[position])
    kind = (old >> shift) & mask
    low, width, size = _put_interval(
      *(low, width, out, size, _measure(gap), _measure(gap + table[kind]))
    )
    step = _ordered(_U(values[k]), top, is_float)
    step = (step - _ordered(old, top, is_float)) & everything
    down = step > top
    if down:
      step = (~step + _1) & everything
    negative = is_float and (old & top) != _0
    context = 2 * np.int64(kind) + (1 if negative else 0)
    low, width, size = _put_step(
      low, width, out, size, models, context, down, step
    )
  # One word that lies between low and low + width says it all.
  low = _add(low, _TOP - _1, out, size)
  out[size] = np.uint32(low >> _32)
  size += 1
  while size > 1 and out[size - 1] == 0:
    size -= 1  # the decoder reads zeros behind the end
  return out[1:size].copy()


@_jit
def _shift_in(offset, width, words, at):
  """The inverse of `_shift_out`; `offset` is the code minus low."""
  if width < _TOP:
    word = _U(words[at]) if at < words.size else _0
    return (offset << _32) | word, width << _32, at + 1
  return offset, width, at


@_jit
def _get_bit(offset, width, words, at, models, model):
  p = models[model]
  bound = (width >> _16) * _U(p)
  bit = offset >= bound
  if bit:
    models[model] = p - (p >> _RATE)
    offset -= bound
    width -= bound
  else:
    models[model] = p + ((65535 - p) >> _RATE)
    width = bound
  offset, width, at = _shift_in(offset, width, words, at)
  return offset, width, at, bit


@_jit
def _get_step(offset, width, words, at, models, context):
  offset, width, at, down = _get_bit(
    offset, width, words, at, models, _LENGTHS + context
  )
  model = 64 * (context >> 1)
  length = 0
  while length < 63:
    offset, width, at, more = _get_bit(
      offset, width, words, at, models, model + length
    )
    if not more:
      break
    length += 1
  step = _1
  for _ in range(length):
    offset, width, at, bit = _get_bit(
      *(offset, width, words, at, models),
      _SIGNS + np.int64(min(step, _U(255))),
    )
    step = (step << _1) | (_1 if bit else _0)
  return offset, width, at, down, step


@_jit
def decode(parent, words, positions, values, table, shift, mask, top, is_float):
  """Inverts `encode`; fills `positions` and `values`.

  Returns:
    Whether the words made sense: False if they are not of this parent.
  """
  models = np.full(_MODELS, _HALF, np.uint32)
  everything = top | (top - _1)
  # Shifts in the first two words.
  offset, width, at = _shift_in(_0, _1, words, 0)
  offset, width, at = _shift_in(offset, _1, words, at)
  width = _FULL
  i, k, gap = 0, 0, _0
  while k < positions.size:
    part = width >> (_B + _1)
    # Up to the element that is hit, or that ends beyond the unit.
    target = min(offset // part, _ONE - _1)
    while i + 8 <= parent.size:
      run = _eight(parent, i, table, shift, mask)
      if gap + run > target:
        break
      gap += run
      i += 8
    weight = _0
    while i < parent.size:
      weight = table[(_U(parent[i]) >> shift) & mask]
      if gap + weight > target:
        break
      gap += weight
      i += 1
    if i >= parent.size or at > words.size + 2:
      return False
    start, stop = _measure(gap), _measure(gap + weight)
    hit = offset < part * stop
    if not hit:
      start, stop = stop, _TWO
    offset, width, at = _shift_in(
      offset - part * start, part * (stop - start), words, at
    )
    i += 1
    gap = _0
    if hit:
      old = _U(parent[i - 1])
      negative = is_float and (old & top) != _0
      context = 2 * np.int64((old >> shift) & mask) + (1 if negative else 0)
      offset, width, at, down, step = _get_step(
        offset, width, words, at, models, context
      )
      if down:
        step = ~step + _1
      moved = (_ordered(old, top, is_float) + step) & everything
      if is_float:
        moved = moved & ~top if moved & top else ~moved & everything
      positions[k] = i - 1
      values[k] = moved
      k += 1
  return at <= words.size + 2
