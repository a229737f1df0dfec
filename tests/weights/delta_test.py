"""The codec is exact for every bit pattern, and never silently wrong."""

import json

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.weights import delta
from swe17_jax.weights import staged as stages

DTYPES = (
  np.bool_,
  np.uint8,
  np.int32,
  np.float16,
  np.float32,
  np.float64,
  ml_dtypes.bfloat16,
  ml_dtypes.float8_e4m3fn,
)


def random_bits(rng, dtype, shape):
  """Every bit pattern of the dtype, so NaN payloads and -0.0 too."""
  dtype = np.dtype(dtype)
  size = int(np.prod(shape, dtype=np.int64))
  if dtype == np.bool_:
    return rng.integers(0, 2, size).astype(np.bool_).reshape(shape)
  raw = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
  return raw.view(dtype).reshape(shape)


def flip(rng, array, fraction):
  """A copy in which about `fraction` of the elements have other bits."""
  new = array.copy()
  chosen = rng.random(array.size) < fraction
  if array.dtype == np.bool_:
    new.reshape(-1)[chosen] ^= True
  else:
    new.reshape(-1).view(f'u{array.itemsize}')[chosen] ^= 1
  return new


def same_bits(a, b):
  return a.keys() == b.keys() and all(
    (a[n].dtype, a[n].shape, a[n].tobytes())
    == (b[n].dtype, b[n].shape, b[n].tobytes())
    for n in a
  )


def copy(tensors):
  return {name: array.copy() for name, array in tensors.items()}


@st.composite
def versions(draw):
  """A parent and a successor with some tensors of each kind of change."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  parent, new = {}, {}
  for i in range(draw(st.integers(0, 6))):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    name = f'layer.{i}'
    parent[name] = random_bits(rng, dtype, shape)
    fraction = draw(st.sampled_from([0, 0.001, 0.1, 0.3, 1]))
    new[name] = flip(rng, parent[name], fraction)
  return parent, new


class RoundTripTest(parameterized.TestCase):
  @given(versions())
  @settings(max_examples=80, deadline=None)
  def test_delta_and_base_reproduce_every_bit(self, pair):
    parent, new = pair
    base = delta.decode(delta.encode({}, new), {})
    assert same_bits(base.tensors(), new)
    if not parent:
      return
    staged = delta.decode(delta.encode(parent, new), parent)
    tensors = copy(parent)
    staged.apply(tensors)
    assert same_bits(tensors, new)
    staged.apply(tensors)  # again: absolute values, so no harm
    assert same_bits(tensors, new)
    changed = sum(
      int((p.reshape(-1).view(f'u{p.itemsize}') !=
           new[n].reshape(-1).view(f'u{p.itemsize}')).sum())
      for n, p in parent.items()
    )  # fmt: skip
    assert changed <= staged.changed <= sum(p.size for p in parent.values())

  def test_example_of_the_format(self):
    # The bytes worked out by hand in the docstring of the module.
    parent = {'w': np.zeros(400, np.uint16)}
    new = copy(parent)
    new['w'][1], new['w'][300] = 0x0203, 0x0405
    blob = delta.encode(parent, new)
    assert blob[:8] == b'SWE17D2\n'
    assert blob[8:24] == xxhash.xxh3_128_digest(blob[24:])
    start = 28 + int.from_bytes(blob[24:28], 'little')
    unpack = zstandard.ZstdDecompressor().decompress
    table = json.loads(unpack(blob[28:start]))
    sizes = table['groups'][0].pop('sections')
    said = bytes.fromhex('01 00000000000000 2c01 000000000000 0302 0504')
    assert table == {
      'base': False,
      'groups': [
        {
          'dtype': 'uint16',
          'tensors': [['w', [400]]],
          'changed': 2,
          'check': xxhash.xxh3_64_hexdigest(said),
        }
      ],
    }
    ends = np.cumsum([start, *sizes])
    hazards, words = [blob[a:b] for a, b in zip(ends, ends[1:])]
    hazards = unpack(hazards)
    assert hazards[0] > 0 and not any(hazards[1:]) and len(hazards) == 256
    assert len(words) % 4 == 0 and len(blob) == ends[-1]

  def test_nan_payloads_and_negative_zero(self):
    old = np.zeros(100, np.uint16)
    old[[10, 11]] = 0x7FC0, 0xFF81  # NaNs
    bits = old.copy()
    bits[3] = 0x8000  # -0.0, as a float equal to what was there
    bits[10] = 0x7FC1  # another NaN; the one at 11 stays, though NaN != NaN
    parent = {'w': old.view(ml_dtypes.bfloat16)}
    new = {'w': bits.view(ml_dtypes.bfloat16)}
    staged = delta.decode(delta.encode(parent, new), parent)
    assert staged.updates[0].positions.tolist() == [3, 10]
    tensors = copy(parent)
    staged.apply(tensors)
    assert same_bits(tensors, new)

  def test_unchanged_tensors_cost_nothing(self):
    rng = np.random.default_rng(0)
    big = random_bits(rng, np.float32, (1000,))
    parent = {f'{i:03d}': big for i in range(200)} | {'w': np.zeros(8)}
    new = parent | {'w': np.ones(8)}
    blob = delta.encode(parent, new)
    assert [u.name for u in delta.decode(blob, parent).updates] == ['w']
    assert len(blob) < 400
    assert delta.decode(delta.encode(new, new), new).updates == ()

  def test_groups_close(self):
    # 5 M elements do not fit one group of 2**22 with their neighbours.
    parent = {
      'a': np.zeros(5_000_000, np.uint8),
      'b': np.zeros((1000, 3), np.uint8),
      'c': np.zeros(512, np.uint8),
    }
    new = copy(parent)
    new['a'][[0, 1, 4_999_999]] = 7
    new['b'][-1, -1] = 9
    new['c'][[254, 510]] = 5
    staged = delta.decode(delta.encode(parent, new), parent)
    found = {u.name: u.positions.tolist() for u in staged.updates}
    assert found == {'a': [0, 1, 4_999_999], 'b': [2999], 'c': [254, 510]}
    assert staged.changed == 6
    staged.apply(parent)
    assert same_bits(parent, new)

  @parameterized.parameters((0.10, False), (0.50, False), (0.51, True))
  def test_dense_above_one_half(self, fraction, dense):
    parent = {'w': np.zeros(100, np.float32)}
    new = copy(parent)
    new['w'][: round(100 * fraction)] = 1
    (update,) = delta.decode(delta.encode(parent, new), parent).updates
    assert (update.positions is None) == dense

  def test_views_and_strided_inputs(self):
    store = np.arange(24, dtype=np.float32)
    parent = {'w': store[4:16].reshape(3, 4)}
    new = {'w': np.asfortranarray(parent['w'].copy())}
    new['w'][1, 2] = -0.0
    blob = delta.encode(parent, new)
    delta.decode(blob, parent).apply(parent)
    # [1, 2] of the view is element 4 + 6 of the array below it.
    assert store[10] == 0 and np.signbit(store[10])
    assert store.sum() == np.arange(24).sum() - 10

  def test_delta_is_small(self):
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, 400_000).astype(ml_dtypes.bfloat16)
    parent = {'w': weights}
    new = {'w': flip(rng, weights, 0.0086)}
    # Where 0.86% are: 0.0714 bits per weight. Up or down: 1 bit for each.
    bits = 8 * len(delta.encode(parent, new)) / weights.size
    assert bits < 1.1 * (0.0714 + 0.0086)

  @given(versions(), st.integers(1, 2000), st.integers(1, 4))
  @settings(max_examples=40, deadline=None)
  def test_blobs_are_parts(self, pair, blob_bytes, threads):
    parent, new = pair
    for old in (parent, {}):
      blobs = list(
        delta.encode_blobs(old, new, blob_bytes=blob_bytes, threads=threads)
      )
      whole = delta.decode(delta.encode(old, new), old)
      parts = [delta.decode(blob, old, threads=threads) for blob in blobs]
      names = [update.name for part in parts for update in part.updates]
      assert sorted(names) == sorted(u.name for u in whole.updates)
      assert sum(part.changed for part in parts) == whole.changed
      merged = stages.merge(parts)
      tensors = copy(parent) if old else merged.tensors()
      merged.apply(tensors)
      assert same_bits(tensors, new)

  def test_blobs_close_at_their_size(self):
    rng = np.random.default_rng(0)
    new = {f'{i}': random_bits(rng, np.uint8, (3 << 20,)) for i in range(4)}
    sizes = [
      len(blob)
      for blob in delta.encode_blobs({}, new, blob_bytes=1 << 22, threads=1)
    ]
    assert [round(size / 2**20) for size in sizes] == [6, 6]


class MergeTest(parameterized.TestCase):
  @given(versions(), st.lists(st.sampled_from([0.001, 0.3, 0.9]), max_size=3))
  @settings(max_examples=40, deadline=None)
  def test_one_merged_delta_does_what_a_chain_does(self, pair, fractions):
    rng = np.random.default_rng(0)
    chain = list(pair)
    for fraction in fractions:
      chain.append({n: flip(rng, a, fraction) for n, a in chain[-1].items()})
    staged = [
      delta.decode(delta.encode(old, new), old)
      for old, new in zip(chain, chain[1:])
    ]
    tensors = copy(chain[0])
    stages.merge(staged).apply(tensors)
    assert same_bits(tensors, chain[-1])

  def test_the_last_value_of_a_position_wins(self):
    chain = [np.zeros(9, np.float32) for _ in range(3)]
    chain[1][[2, 5]] = 1
    chain[2][[2, 7]] = 2
    staged = [
      delta.decode(delta.encode({'w': old}, {'w': new}), {'w': old})
      for old, new in zip(chain, chain[1:])
    ]
    (update,) = stages.merge(staged).updates
    assert update.positions.tolist() == [2, 5, 7]
    assert update.values.view(np.float32).tolist() == [2, 0, 2]


class DamageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(2)
    parent = {
      'a': random_bits(rng, np.float32, (50, 20)),
      'b': random_bits(rng, ml_dtypes.bfloat16, (64,)),
    }
    new = {
      'a': flip(rng, parent['a'], 0.05),
      'b': flip(rng, parent['b'], 0.9),
    }
    self.parent, self.blob = parent, delta.encode(parent, new)

  def test_truncated_anywhere(self):
    for end in range(0, len(self.blob), 7):
      with pytest.raises(stages.DeltaError, match='begins with|truncated'):
        delta.decode(self.blob[:end], self.parent)
    with pytest.raises(stages.DeltaError, match='truncated'):
      delta.decode(self.blob + b'\0', self.parent)

  def test_every_flipped_bit(self):
    for byte in range(len(self.blob)):
      damaged = bytearray(self.blob)
      damaged[byte] ^= 1 << byte % 8
      with pytest.raises(stages.DeltaError):
        delta.decode(bytes(damaged), self.parent)

  @given(st.integers(28, 10_000), st.integers(1, 255))
  @settings(max_examples=100, deadline=None)
  def test_damage_under_a_sound_digest(self, at, mask):
    """A faulty encoder: any exception but DeltaError would be a bug."""
    body = bytearray(self.blob[24:])
    body[at % len(body)] ^= mask
    forged = self.blob[:8] + xxhash.xxh3_128_digest(bytes(body)) + body
    try:
      delta.decode(bytes(forged), self.parent)
    except stages.DeltaError:
      pass

  def test_other_bytes(self):
    with pytest.raises(stages.DeltaError, match='begins with'):
      delta.decode(b'{"a": 1}' * 10, {})


class MisfitTest(parameterized.TestCase):
  def test_encode_names_what_differs(self):
    a = {'w': np.zeros(3, np.float32), 'v': np.zeros(1, np.float32)}
    with pytest.raises(stages.DeltaError, match="only one has .'v'"):
      delta.encode(a, {'w': a['w']})
    with pytest.raises(stages.DeltaError, match=r'w was float32\[3\]'):
      delta.encode(a, a | {'w': np.zeros((3, 1), np.float32)})
    with pytest.raises(stages.DeltaError, match=r'now float16\[3\]'):
      delta.encode(a, a | {'w': np.zeros(3, np.float16)})

  @parameterized.named_parameters(
    ('big_endian', np.zeros(2, '>f4'), 'dtype'),
    ('complex', np.zeros(2, np.complex128), 'dtype'),
    ('objects', np.array([None]), 'dtype'),
    ('no_array', [1.0], 'is a list'),
  )
  def test_unknown_dtypes(self, array, message):
    with pytest.raises(stages.DeltaError, match=message):
      delta.digest({'w': array})

  def test_apply_writes_nothing_unless_all_fits(self):
    parent = {'a': np.zeros(4, np.uint8), 'b': np.zeros(4, np.uint8)}
    new = {name: array + 1 for name, array in parent.items()}
    staged = delta.decode(delta.encode(parent, new), parent)
    read_only = np.zeros(4, np.uint8)
    read_only.flags.writeable = False
    misfits = {
      'does not have': None,
      'receiver as uint8.5.': np.zeros(5, np.uint8),
      'receiver as int8': np.zeros(4, np.int8),
      'C-contiguous': np.zeros(8, np.uint8)[::2],
      'writable': read_only,
    }
    for message, array in misfits.items():
      tensors = {'a': np.zeros(4, np.uint8)}
      if array is not None:
        tensors['b'] = array
      with pytest.raises(stages.DeltaError, match=message):
        staged.apply(tensors)
      assert not tensors['a'].any()

  def test_a_delta_is_no_base(self):
    parent = {'a': np.zeros(4, np.uint8)}
    new = {'a': parent['a'] + 1}
    staged = delta.decode(delta.encode(parent, new), parent)
    with pytest.raises(stages.DeltaError, match='load its base'):
      staged.tensors()

  def test_another_parent_is_refused(self):
    v0 = {'a': np.zeros(100, np.uint8)}
    v1, v2 = copy(v0), copy(v0)
    v1['a'][3] = 1
    v2['a'][[3, 7]] = 2
    blob = delta.encode(v0, v1)
    for wrong in (v1, v2, {'a': v0['a'] + 1}):
      with pytest.raises(stages.DeltaError, match='does not decode|damaged'):
        delta.decode(blob, wrong)


class DigestTest(parameterized.TestCase):
  def test_by_hand(self):
    tensors = {'b': np.array([1, 2], np.uint8), 'a': np.zeros((), np.float32)}
    said = (b'["a", "float32", []]\n\0\0\0\0', b'["b", "uint8", [2]]\n\x01\x02')
    total = sum(xxhash.xxh3_128_intdigest(one) for one in said)
    assert delta.digest(tensors) == f'{total % 2**128:032x}'

  def test_depends_on_everything_but_order(self):
    w = np.arange(6, dtype=np.float32)
    base = {'w': w, 'v': w + 1}
    same = {'v': (w + 1).copy(), 'w': np.repeat(w, 2)[::2]}
    assert delta.digest(base) == delta.digest(same)
    others = [
      {'w': w},
      {'w': w, 'u': w + 1},
      {'w': w + 1, 'v': w},
      {'w': w.reshape(2, 3), 'v': w + 1},
      {'w': w.view(np.int32), 'v': w + 1},
      {'w': -w * 0 + w, 'v': np.where(w == 0, -0.0, w + 1)},
    ]
    digests = {delta.digest(o) for o in others} - {delta.digest(base)}
    assert len(digests) == len(others)

  def test_parts_combine(self):
    rng = np.random.default_rng(0)
    tensors = {
      name: random_bits(rng, np.float32, (7,)) for name in ('a', 'b', 'c')
    }
    parts = [{'b': tensors['b']}, {'c': tensors['c'], 'a': tensors['a']}, {}]
    assert delta.combine(map(delta.digest, parts)) == delta.digest(tensors)
