"""Records come back as they were, or not at all."""

import dataclasses
import io
import json

import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.core import records

VOCABULARY = 50


@st.composite
def windows(draw):
  """A window of any length; its numbers come from a drawn seed."""
  length = draw(st.integers(1, 12))
  layers, active = draw(st.integers(0, 3)), draw(st.integers(1, 3))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
  sampled = rng.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))
  sampled[0] = False
  spans = [[]] * length
  for t in np.flatnonzero(sampled):
    if rng.random() < 0.7:
      spans[t] = [*rng.permutation(VOCABULARY)[: rng.integers(0, 4)].tolist()]
      spans[t].insert(rng.integers(0, len(spans[t]) + 1), int(tokens[t]))
  return records.Window(
    tokens=tokens,
    loss_mask=sampled,
    rollout_logprobs=(-rng.random(length) * sampled).astype(np.float32),
    weight_versions=np.where(sampled, 7, -1).astype(np.int32),
    sampling_mask=records.SamplingMask.from_lists(spans),
    routed_experts=rng.integers(-1, 9, (length, layers, active)).astype(
      np.int16
    ),
  )


@st.composite
def trajectories(draw):
  drawn = tuple(draw(st.lists(windows(), min_size=1, max_size=3)))
  turns = tuple(
    records.Turn(i, 1, window.tokens.size, draw(st.text(max_size=5)), 0.5)
    for i, window in enumerate(drawn)
    if window.tokens.size > 1
  )
  return records.Trajectory(
    task_id=draw(st.text(max_size=8)),
    group_index=draw(st.integers(0, 10**6)),
    windows=drawn,
    turns=turns,
    verdict=records.Verdict(
      draw(st.booleans()),
      1,
      2,
      infra_error=draw(st.sampled_from([None, 'timeout'])),
    ),
    reward=draw(st.floats(-1, 1)),
    finish='submit',
    text=draw(st.text(max_size=20)),
    wall_s=draw(st.floats(0, 100)),
  )


def plain(value):
  """Turns a record into what `==` compares in full, dtypes included."""
  if isinstance(value, np.ndarray):
    return value.dtype.str, value.shape, value.tobytes()
  if dataclasses.is_dataclass(value):
    fields = dataclasses.fields(value)
    return type(value), [plain(getattr(value, f.name)) for f in fields]
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  return value


def _fields():
  """Five tokens of which the third and fifth were sampled."""
  return {
    'tokens': np.asarray([4, 8, 2, 9, 6], np.int32),
    'loss_mask': np.asarray([0, 0, 1, 0, 1], bool),
    'rollout_logprobs': np.asarray([0, 0, -1, 0, -0.5], np.float32),
    'weight_versions': np.asarray([-1, -1, 3, -1, 4], np.int32),
    'sampling_mask': records.SamplingMask.from_lists([[], [], [7, 2], [], []]),
    'routed_experts': np.zeros((5, 2, 2), np.int16),
  }


def _trajectory(**changes):
  window = records.Window(**_fields())
  fields = {
    'task_id': 'a',
    'group_index': 0,
    'windows': (window,),
    'turns': (records.Turn(0, 2, 5, 'submit', 0.0),),
    'verdict': records.Verdict(True, 1, 1),
    'reward': 1.0,
    'finish': 'submit',
  }
  return records.Trajectory(**{**fields, **changes})


class SamplingMaskTest(parameterized.TestCase):
  def test_spans_of_a_mask_by_hand(self):
    mask = records.SamplingMask.from_lists([[], [3, 5], [], [1]])
    self.assertEqual(mask.offsets.tolist(), [0, 0, 2, 2, 3])
    self.assertEqual(mask.token_ids.tolist(), [3, 5, 1])
    self.assertEqual(mask.sizes().tolist(), [0, 2, 0, 1])
    self.assertEqual(mask.span(1).tolist(), [3, 5])
    self.assertEqual(mask.head(2).span(1).tolist(), [3, 5])
    self.assertEqual(mask.head(3).token_ids.tolist(), [3, 5])
    self.assertLen(records.SamplingMask.empty(3), 3)

  @given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1), st.data()
  )
  def test_heads_and_joins_are_those_of_lists(self, spans, data):
    cut = data.draw(st.integers(0, len(spans)))
    whole = records.SamplingMask.from_lists(spans)
    head = whole.head(cut)
    tail = records.SamplingMask.from_lists(spans[cut:])
    self.assertEqual([head.span(t).tolist() for t in range(cut)], spans[:cut])
    joined = records.SamplingMask.concatenate([head, tail])
    self.assertEqual(plain(joined), plain(whole))

  @parameterized.parameters(
    ([1], [0, 2]),  # past the end
    ([1, 2], [0, 1]),  # ids that belong to nothing
    ([1, 2], [1, 2]),  # does not begin at 0
    ([1, 2], [0, 2, 1, 2]),  # falls
    ([], []),  # no end
  )
  def test_offsets_that_do_not_rise_are_refused(self, ids, offsets):
    with pytest.raises(records.RecordError, match='offsets must rise'):
      records.SamplingMask(
        np.asarray(ids, np.int32), np.asarray(offsets, np.int32)
      )


class WindowTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('loss_mask', 'loss_mask', np.zeros(4, bool)),
    ('logprobs', 'rollout_logprobs', np.zeros(6, np.float32)),
    ('versions', 'weight_versions', np.zeros(0, np.int32)),
    ('masks', 'sampling_mask', records.SamplingMask.empty(4)),
    ('experts', 'routed_experts', np.zeros((4, 2, 2), np.int16)),
  )
  def test_unequal_lengths_are_refused(self, name, value):
    with pytest.raises(records.RecordError, match=f'{name} has .* 5 tokens'):
      records.Window(**{**_fields(), name: value})

  @parameterized.named_parameters(
    (
      'outside',
      {'sampling_mask': [[], [], [7, 3], [], []]},
      r'not in its own sampling mask \(positions \[2\]\)',
    ),
    (
      # The token of the neighbour is in the span: an off-by-one engine.
      'shifted',
      {'sampling_mask': [[], [], [9], [], [6]]},
      r'positions \[2\]',
    ),
    (
      'unsampled',
      {'sampling_mask': [[], [8], [], [], []]},
      'a token that was not sampled',
    ),
    ('first', {'loss_mask': [1, 0, 1, 0, 1]}, 'first token'),
    ('version', {'weight_versions': [-1, -1, 3, -1, -1]}, 'weight_version'),
    ('nan', {'rollout_logprobs': [0, 0, np.nan, 0, -1]}, 'finite'),
    ('infinite', {'rollout_logprobs': [0, 0, -np.inf, 0, -1]}, 'finite'),
  )
  def test_a_broken_rule_is_named(self, changes, message):
    fields = _fields()
    for name, value in changes.items():
      if name == 'sampling_mask':
        fields[name] = records.SamplingMask.from_lists(value)
      else:
        fields[name] = np.asarray(value, fields[name].dtype)
    with pytest.raises(records.RecordError, match=message):
      records.Window(**fields)

  @given(windows(), st.data())
  def test_a_head_is_a_window(self, window, data):
    length = data.draw(st.integers(0, window.tokens.size))
    head = window.head(length)
    for name in ('tokens', 'loss_mask', 'rollout_logprobs', 'routed_experts'):
      self.assertEqual(
        plain(getattr(head, name)), plain(getattr(window, name)[:length])
      )
    for t in range(length):
      np.testing.assert_array_equal(
        head.sampling_mask.span(t), window.sampling_mask.span(t)
      )

  @parameterized.parameters((0, 0, 3), (0, 3, 2), (0, 2, 6), (1, 2, 3))
  def test_a_turn_outside_its_window_is_refused(self, window, start, stop):
    turn = records.Turn(window, start, stop, 'submit', 0.0)
    with pytest.raises(records.RecordError, match='lies outside'):
      _trajectory(turns=(turn,))

  def test_a_reward_that_is_no_number_is_refused(self):
    with pytest.raises(records.RecordError, match='reward=nan'):
      _trajectory(reward=float('nan'))


class BytesTest(parameterized.TestCase):
  @settings(max_examples=40, deadline=None)
  @given(st.lists(trajectories(), min_size=1, max_size=3))
  def test_a_group_comes_back(self, group):
    data = records.group_to_bytes(group)
    self.assertEqual(plain(records.group_from_bytes(data)), plain(group))
    self.assertEqual(records.group_to_bytes(group), data)

  @settings(max_examples=300, deadline=None)
  @given(st.data())
  def test_damage_is_found_or_harmless(self, data):
    """A zip has bytes that nobody reads (dates); all others are covered."""
    group = [_trajectory(), _trajectory(reward=0.0)]
    good = records.group_to_bytes(group)
    bad = bytearray(good)
    kind = data.draw(st.sampled_from(['flip', 'cut', 'zero', 'insert']))
    place = data.draw(st.integers(0, len(good) - 1))
    if kind == 'flip':
      bad[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == 'cut':
      del bad[place:]
    elif kind == 'zero':
      bad[place : place + 64] = bytes(len(bad[place : place + 64]))
    else:
      bad[place:place] = b'\0'
    try:
      found = records.group_from_bytes(bytes(bad))
    except records.RecordError:
      return
    self.assertEqual(plain(found), plain(group))

  @parameterized.parameters(b'', b'PK', b'not a record', b'\x93NUMPY\x01\0')
  def test_other_bytes_are_refused(self, data):
    with pytest.raises(records.RecordError, match='not a readable group'):
      records.group_from_bytes(data)

  def test_one_array_or_a_pickle_is_refused(self):
    for array in (np.zeros(3), np.asarray([{}], object)):
      buffer = io.BytesIO()
      np.save(buffer, array)
      with pytest.raises(records.RecordError, match='not a readable group'):
        records.group_from_bytes(buffer.getvalue())

  def _rewritten(self, change):
    """Returns a group's bytes after `change(arrays)`."""
    with np.load(
      io.BytesIO(records.group_to_bytes([_trajectory()]))
    ) as archive:
      arrays = dict(archive)
    change(arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()

  def _with_meta(self, change):
    def change_arrays(arrays):
      meta = json.loads(arrays['meta'].tobytes())
      changed = change(meta)
      meta = changed if isinstance(changed, list) else meta
      arrays['meta'] = np.frombuffer(json.dumps(meta).encode(), np.uint8)

    return self._rewritten(change_arrays)

  def test_a_rewrite_without_change_is_read(self):
    found = records.group_from_bytes(self._rewritten(lambda arrays: None))
    self.assertEqual(plain(found), plain([_trajectory()]))

  @parameterized.named_parameters(
    ('format', lambda m: m.update(format='swe17.group.0'), 'another format'),
    ('list', lambda m: [m], 'another format'),
    ('field', lambda m: m['trajectories'][0].pop('finish'), 'misnames'),
    ('extra', lambda m: m['trajectories'][0].update(x=1), 'misnames'),
    ('windows', lambda m: m['trajectories'][0].update(windows=2), 'misnames'),
    (
      'turn',
      lambda m: m['trajectories'][0]['turns'][0].update(stop=99),
      'lies outside',
    ),
  )
  def test_another_header_is_refused(self, change, message):
    with pytest.raises(records.RecordError, match=message):
      records.group_from_bytes(self._with_meta(change))

  @parameterized.named_parameters(
    ('gone', lambda a: a.pop('0/0/tokens'), '0/0/tokens'),
    (
      'dtype',
      lambda a: a.update({'0/0/tokens': a['0/0/tokens'].astype(np.int64)}),
      'tokens has dtype int64, must be int32',
    ),
    (
      'length',
      lambda a: a.update({'0/0/loss_mask': np.zeros(4, bool)}),
      'loss_mask has 4 entries for 5 tokens',
    ),
    (
      'axes',
      lambda a: a.update({'0/0/loss_mask': a['0/0/loss_mask'][:, None]}),
      r'loss_mask has shape \(5, 1\), must have 1 axes',
    ),
    (
      'scalar',
      lambda a: a.update({'0/0/routed_experts': np.int16(3)}),
      r'routed_experts has shape \(\), must have 3 axes',
    ),
  )
  def test_arrays_that_do_not_fit_are_refused(self, change, message):
    with pytest.raises(records.RecordError, match=message):
      records.group_from_bytes(self._rewritten(change))
