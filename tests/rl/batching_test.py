"""Packing moves windows, and changes nothing about them."""

import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.core import records
from swe17_jax.rl import batching
from tests import miniature

CONFIG = batching.BatchConfig(row_tokens=12, rows=2, min_mask_entries=4)


def unpack(batch):
  """Reads the windows back, position by position, from the docstring alone.

  Returns one dict per (row, segment). Position `t` holds what predicts the
  token at `t + 1`; the experts of a token stand at the token itself.
  """
  found = []
  rows, length = batch.tokens.shape
  for row in range(rows):
    for segment in range(1, batch.segment_ids[row].max() + 1):
      places = np.flatnonzero(batch.segment_ids[row] == segment)
      assert (np.diff(places) == 1).all(), 'a window is not contiguous'
      spans, credit = [[]], set()
      for t in places[:-1]:
        chosen = batch.mask_rows == row * length + t
        spans.append(batch.mask_ids[chosen].tolist())
        assert batch.singletons[row, t] == (len(spans[-1]) == 1)
        assert batch.targets[row, t] == batch.tokens[row, t + 1]
        credit.add(float(batch.advantages[row, t]))
      last = places[-1]
      assert not batch.loss_mask[row, last], 'nothing follows the last token'
      assert not (batch.mask_rows == row * length + last).any()
      before = places[:-1]
      found.append(
        {
          'tokens': batch.tokens[row, places].tolist(),
          'positions': batch.positions[row, places].tolist(),
          'loss_mask': [False, *batch.loss_mask[row, before].tolist()],
          'logprobs': [0.0, *batch.rollout_logprobs[row, before].tolist()],
          'spans': spans,
          'experts': batch.routed_experts[row, places].tolist(),
          'credit': credit,
        }
      )
  return found


def described(window, advantage):
  """What `unpack` must find of a window."""
  length = window.tokens.size
  return {
    'tokens': window.tokens.tolist(),
    'positions': list(range(length)),
    'loss_mask': window.loss_mask.tolist(),
    'logprobs': window.rollout_logprobs.tolist(),
    'spans': [window.sampling_mask.span(t).tolist() for t in range(length)],
    'experts': window.routed_experts.tolist(),
    'credit': {float(np.float32(advantage))} if length > 1 else set(),
  }


@st.composite
def windows(draw):
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  lengths = draw(st.lists(st.integers(2, 12), min_size=1, max_size=9))
  return [miniature.window(rng, length) for length in lengths]


class PackTest(parameterized.TestCase):
  def test_two_windows_by_hand(self):
    def window(tokens, sampled, spans):
      size = len(tokens)
      return records.Window(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.asarray(sampled, bool),
        rollout_logprobs=-np.asarray(sampled, np.float32) * tokens,
        weight_versions=np.asarray(sampled, np.int32) - 1,
        sampling_mask=records.SamplingMask.from_lists(spans),
        routed_experts=np.asarray(tokens, np.int16).reshape(size, 1, 1),
      )

    long = window([1, 2, 3, 4], [0, 0, 1, 1], [[], [], [3, 9], [4]])
    short = window([5, 6, 7], [0, 1, 0], [[], [6, 8], []])
    config = batching.BatchConfig(row_tokens=8, rows=1, min_mask_entries=4)
    # Given out of order: the longer one comes first.
    (batch,) = batching.pack([short, long], [0.5, -1.0], config)
    self.assertEqual(batch.tokens[0].tolist(), [1, 2, 3, 4, 5, 6, 7, 0])
    self.assertEqual(batch.targets[0].tolist(), [2, 3, 4, 0, 6, 7, 0, 0])
    self.assertEqual(batch.segment_ids[0].tolist(), [1, 1, 1, 1, 2, 2, 2, 0])
    self.assertEqual(batch.positions[0].tolist(), [0, 1, 2, 3, 0, 1, 2, 0])
    self.assertEqual(
      batch.loss_mask[0].tolist(),
      [False, True, True, False, True] + [False] * 3,
    )
    self.assertEqual(
      batch.rollout_logprobs[0].tolist(), [0, -3, -4, 0, -6, 0, 0, 0]
    )
    self.assertEqual(
      batch.advantages[0].tolist(), [-1, -1, -1, 0, 0.5, 0.5, 0, 0]
    )
    self.assertEqual(
      batch.routed_experts[0, :, 0, 0].tolist(), [1, 2, 3, 4, 5, 6, 7, -1]
    )
    self.assertEqual(batch.mask_ids.tolist(), [3, 9, 4, 6, 8, 0, 0, 0])
    self.assertEqual(batch.mask_rows.tolist(), [1, 1, 2, 4, 4, 8, 8, 8])
    self.assertEqual(np.flatnonzero(batch.singletons[0]).tolist(), [2])

  @settings(max_examples=80, deadline=None)
  @given(windows())
  def test_unpacking_gives_every_window_back_once(self, drawn):
    advantages = [i / 8 - 0.5 for i in range(len(drawn))]
    batches = batching.pack(drawn, advantages, CONFIG)
    found = [window for batch in batches for window in unpack(batch)]
    wanted = [described(w, a) for w, a in zip(drawn, advantages)]
    key = repr
    self.assertEqual(sorted(found, key=key), sorted(wanted, key=key))

  @settings(max_examples=40, deadline=None)
  @given(windows())
  def test_padding_trains_nothing(self, drawn):
    for batch in batching.pack(drawn, [1.0] * len(drawn), CONFIG):
      padding = batch.segment_ids == 0
      for name in ('loss_mask', 'advantages', 'rollout_logprobs', 'singletons'):
        self.assertFalse(getattr(batch, name)[padding].any(), name)
      self.assertTrue((batch.routed_experts[padding] == -1).all())
      # Entries rise, so that sums over them run in a fixed order.
      self.assertTrue((np.diff(batch.mask_rows) >= 0).all())
      self.assertEqual(batch.mask_rows.size % CONFIG.min_mask_entries, 0)
      self.assertLessEqual(batch.mask_rows.max(), batch.tokens.size)

  @settings(max_examples=40, deadline=None)
  @given(windows())
  def test_a_batch_does_not_depend_on_the_order_of_other_lengths(self, drawn):
    """Rows are numbered by length; order of arrival breaks ties alone."""
    order = np.argsort([w.tokens.size for w in drawn], kind='stable')
    moved = [drawn[i] for i in order]
    wanted = batching.pack(drawn, [1.0] * len(drawn), CONFIG)
    found = batching.pack(moved, [1.0] * len(drawn), CONFIG)
    self.assertEqual(miniature.bits(found), miniature.bits(wanted))

  def test_rows_are_filled_before_new_ones_begin(self):
    rng = np.random.default_rng(0)
    drawn = [miniature.window(rng, n) for n in (2, 7, 5, 12, 10)]
    (first, second) = batching.pack(drawn, [1.0] * 5, CONFIG)
    used = [(b.segment_ids > 0).sum(-1).tolist() for b in (first, second)]
    self.assertEqual(used, [[12, 12], [12, 0]])  # 12 | 10 + 2 | 7 + 5

  def test_no_windows_make_no_batches(self):
    self.assertEqual(batching.pack([], [], CONFIG), [])

  def test_a_window_longer_than_a_row_is_refused(self):
    window = miniature.window(np.random.default_rng(0), 13)
    with pytest.raises(ValueError, match='13 tokens .* row_tokens=12'):
      batching.pack([window], [1.0], CONFIG)

  @parameterized.parameters('row_tokens', 'rows', 'min_mask_entries')
  def test_a_size_of_zero_is_refused(self, name):
    with pytest.raises(ValueError, match=f'{name}=0'):
      batching.BatchConfig(**{name: 0})
