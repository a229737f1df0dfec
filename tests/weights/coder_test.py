"""The coder against big integers, its own inverse, and the entropy."""

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.weights import coder, sections

BF16 = (np.uint64(7), np.uint64(0xFF), np.uint64(1 << 15), True)
UNIT = 1 << 24


def uniform_table(units):
  return np.full(coder.CLASSES, units, np.uint64)


def twin_encode(parent, positions, values, table, shift, mask, top, is_float):
  """`coder.encode` with one integer for all words, so without carries."""
  shift, mask, top = int(shift), int(mask), int(top)
  low, width, words = 0, 2**64 - 1, 0  # low has `words` words behind the point
  models = {}

  def settle():
    nonlocal low, width, words
    if width < 1 << 32:
      low, width, words = low << 32, width << 32, words + 1

  def interval(start, stop):
    nonlocal low, width
    part = width >> 25
    low, width = low + part * start, part * (stop - start)
    settle()

  def bit(model, value):
    nonlocal low, width
    p = models.get(model, 1 << 15)
    bound = (width >> 16) * p
    if value:
      models[model] = p - (p >> 5)
      low, width = low + bound, width - bound
    else:
      models[model] = p + ((65535 - p) >> 5)
      width = bound
    settle()

  def measure(gap):
    whole, part = divmod(gap, UNIT)
    return 2 * UNIT - (2 * UNIT >> whole) + (part >> whole)

  def number(bits):
    if not is_float:
      return bits
    return 2 * top - 1 - bits if bits & top else bits | top

  changes = dict(zip(positions.tolist(), values.tolist()))
  gap = 0
  for i, old in enumerate(parent.tolist()):
    if not changes:
      break
    kind = old >> shift & mask
    weight = int(table[kind])
    if i not in changes:
      gap += weight
      if gap >= UNIT:
        interval(measure(gap), 2 * UNIT)
        gap = 0
      continue
    interval(measure(gap), measure(gap + weight))
    gap = 0
    step = (number(changes.pop(i)) - number(old)) % (2 * top)
    down = step > top
    if down:
      step = 2 * top - step
    bit(('down', kind, is_float and bool(old & top)), down)
    length = step.bit_length()
    for n in range(length - 1):
      bit(('length', kind, n), True)
    bit(('length', kind, length - 1), False)
    for n in range(length - 2, -1, -1):
      bit(('mantissa', min(step >> n + 1, 255)), step >> n & 1)
  low += (1 << 32) - 1
  code = (low >> 32).to_bytes(4 * (words + 1), 'big')
  words = np.frombuffer(code, '>u4').astype(np.uint32)
  return np.trim_zeros(words, 'b')


def decoded(parent, words, changed, table, *traits):
  positions = np.empty(changed, np.int64)
  values = np.empty(changed, parent.dtype)
  sound = coder.decode(parent, words, positions, values, table, *traits)
  return sound, positions, values


def muon_case(*, steps, rate=1e-6, size=1 << 21):
  """bf16 bits before and after `steps` updates of RMS 0.2 * rate."""
  rng = np.random.default_rng(0)
  master = rng.normal(0, 0.02, size).astype(np.float32)
  old = master.astype(ml_dtypes.bfloat16).view(np.uint16)
  for _ in range(steps):
    master -= 0.2 * rate * rng.normal(0, 1, size).astype(np.float32)
  return old, master.astype(ml_dtypes.bfloat16).view(np.uint16)


def conditional_entropy(old, new):
  """Bits per element of the step, given the exponent of the parent."""
  ordered = [
    np.where(b & 0x8000, 0xFFFF - b, b | 0x8000).astype(np.int64)
    for b in (old, new)
  ]
  steps, kinds, bits = ordered[1] - ordered[0], old >> 7 & 0xFF, 0.0
  for kind in np.unique(kinds):
    _, counts = np.unique(steps[kinds == kind], return_counts=True)
    bits -= np.sum(counts * np.log2(counts / counts.sum()))
  return bits / old.size


class CoderTest(parameterized.TestCase):
  @given(
    name=st.sampled_from(sorted(sections.DTYPES)),
    size=st.integers(1, 3000),
    share=st.sampled_from([0.0005, 0.01, 0.2, 0.9]),
    small=st.booleans(),
    seed=st.integers(0, 2**32),
  )
  @settings(max_examples=150, deadline=None)
  def test_is_exact_for_every_dtype(self, name, size, share, small, seed):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(f'u{sections.DTYPES[name].itemsize}')
    raw = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    old, new = raw.copy(), raw.copy()
    hit = rng.random(size) < share
    if small:
      new[hit] ^= 1
    else:
      new[hit] = rng.permutation(raw)[hit]
    positions = np.flatnonzero(old != new)
    parts = sections.encode_changes(name, old, positions, new[positions])
    entry = {
      'dtype': name,
      'changed': positions.size,
      'tensors': [['w', [size]]],
      'check': sections.checksum(positions, new[positions]),
    }
    found, values = sections.decode_changes(entry, parts, old)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(values, new[positions])

  @given(
    size=st.integers(1, 400),
    changed=st.integers(1, 100),
    hazard=st.sampled_from([8, 1000, UNIT // 50, UNIT, 2 * UNIT]),
    traits=st.sampled_from(
      [BF16, (np.uint64(0), np.uint64(0), np.uint64(1 << 15), False)]
    ),
    seed=st.integers(0, 2**32),
  )
  @settings(max_examples=150, deadline=None)
  def test_equals_arithmetic_on_one_integer(
    self, size, changed, hazard, traits, seed
  ):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, size).astype(np.uint16)
    positions = np.sort(rng.permutation(size)[:changed])
    values = old[positions] ^ rng.integers(1, 1 << 16, positions.size).astype(
      np.uint16
    )
    table = uniform_table(hazard)
    table[:3] += np.uint64(7)
    words = coder.encode(old, positions, values, table, *traits)
    np.testing.assert_array_equal(
      words, twin_encode(old, positions, values, table, *traits)
    )

  def test_carries_run_through_many_words(self):
    # Intervals at the very top of the axis leave words of ones behind, which
    # a later addition turns over.
    rng = np.random.default_rng(3)
    old = np.full(1 << 14, 0x3F80, np.uint16)
    positions = np.arange(3, old.size, 4)
    values = old[positions] + rng.choice([-1, 1], positions.size).astype(
      np.uint16
    )
    for hazard in (UNIT // 8, UNIT // 4, UNIT // 3):
      table = uniform_table(hazard)
      words = coder.encode(old, positions, values, table, *BF16)
      np.testing.assert_array_equal(
        words, twin_encode(old, positions, values, table, *BF16)
      )

  @parameterized.parameters((1, 1e-6), (4, 1e-6), (16, 1e-6), (16, 1e-5))
  def test_size_is_within_a_twentieth_of_the_entropy(self, steps, rate):
    old, new = muon_case(steps=steps, rate=rate)
    positions = np.flatnonzero(old != new)
    parts = sections.encode_changes('bfloat16', old, positions, new[positions])
    bits = 8 * sum(map(len, parts)) / old.size
    assert bits <= 1.05 * conditional_entropy(old, new)

  def test_words_of_another_parent_end(self):
    old, new = muon_case(steps=4, size=1 << 14)
    positions = np.flatnonzero(old != new)
    table = uniform_table(UNIT // 40)
    words = coder.encode(old, positions, new[positions], table, *BF16)
    rng = np.random.default_rng(1)
    for cut in (0, 1, words.size // 2):
      sound, found, _ = decoded(old, words[:cut], 4000, table, *BF16)
      assert not sound or not np.array_equal(found[: positions.size], positions)
    for _ in range(50):
      noise = rng.integers(0, 1 << 32, words.size, np.uint32)
      sound, found, values = decoded(old, noise, positions.size, table, *BF16)
      assert not sound or not (
        np.array_equal(found, positions)
        and np.array_equal(values, new[positions])
      )

  def test_nothing_can_hit_where_all_hazards_are_zero(self):
    old = np.zeros(100, np.uint16)
    words = np.full(10, 0xFFFFFFFF, np.uint32)
    sound, _, _ = decoded(old, words, 1, uniform_table(0), *BF16)
    assert not sound


class HazardsTest(parameterized.TestCase):
  def test_by_hand(self):
    changed, total = np.zeros((2, coder.CLASSES), np.int64)
    changed[0], total[0] = 1, 2  # a chance of 1/2 is one unit
    changed[1], total[1] = 3, 4  # -log2(1/4) = 2
    total[2] = 1000
    changed[3], total[3] = 1, 10**9  # too rare for the table
    changed[4] = 5  # the census met none of them
    found = coder.hazards(coder.hazard_codes(changed, total))
    assert found[:5].tolist() == [UNIT, 2 * UNIT, 0, 8, 2 * UNIT]

  def test_a_code_is_within_a_sixteenth(self):
    total = np.full(coder.CLASSES, 10**7, np.int64)
    changed = np.geomspace(10, 7.4e6, coder.CLASSES).astype(np.int64)
    found = coder.hazards(coder.hazard_codes(changed, total)) / UNIT
    np.testing.assert_allclose(
      found, -np.log2(1 - changed / total), rtol=1 / 15
    )

  def test_census_by_hand(self):
    old = np.array([0x3F80, 0x3F81, 0x4000, 0x3F80], np.uint16)
    changed, total = coder.census(old, np.array([0, 2]), *BF16[:2], 1)
    assert changed[[0x7F, 0x80]].tolist() == [1, 1]
    assert total[[0x7F, 0x80]].tolist() == [3, 1]
    assert changed.sum() == 2 and total.sum() == 4


if __name__ == '__main__':
  pytest.main([__file__])
