"""The update: what it sees, what it must not see, and its bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from swe17_jax.model import transformer
from swe17_jax.rl import batching, loss
from swe17_jax.train import step as steps
from tests import miniature

BATCH = miniature.BATCH
ROW = BATCH.row_tokens


def windows(count, seed=0):
  rng = np.random.default_rng(seed)
  return [
    miniature.window(rng, int(rng.integers(3, ROW + 1))) for _ in range(count)
  ]


def pack(drawn):
  """Packs windows with advantages that belong to each of them."""
  advantages = [float(np.sin(1 + w.tokens.sum())) for w in drawn]
  return batching.pack(drawn, advantages, BATCH)


@functools.partial(jax.jit, static_argnums=4)
def _forward(weights, tokens, segment_ids, routed, config):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  out = transformer.apply(
    weights,
    config,
    tokens,
    positions=positions,
    segment_ids=segment_ids,
    routed_experts=routed,
  )
  return transformer.logits(weights, config, out.hidden)


def sampled_by(weights, drawn, *, temperature=miniature.TEMPERATURE):
  """Returns the windows with the log-probabilities of an engine.

  One window per row, nothing packed; normalised over each mask in numpy.
  Also the sum of the entropies of all sampled tokens.
  """
  tokens = np.zeros((12, ROW), np.int32)
  inside = np.zeros((12, ROW), np.int32)
  routed = np.full((12, ROW, *miniature.ROUTED), -1, np.int16)
  for row, window in enumerate(drawn):
    size = window.tokens.size
    tokens[row, :size], inside[row, :size] = window.tokens, 1
    routed[row, :size] = window.routed_experts
  weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
  logits = _forward(weights, tokens, inside, routed, miniature.MODEL)
  logits = np.asarray(logits, np.float64) / temperature
  out, entropy = [], 0.0
  for row, window in enumerate(drawn):
    logprobs = np.zeros(window.tokens.size, np.float32)
    for t in np.flatnonzero(window.loss_mask):
      x = logits[row, t - 1]
      full = x - np.log(np.exp(x).sum())
      entropy -= (np.exp(full) * full).sum()
      kept = window.sampling_mask.span(t)
      mass = np.exp(x[kept] if kept.size else x).sum()
      logprobs[t] = x[window.tokens[t]] - np.log(mass)
    out.append(dataclasses.replace(window, rollout_logprobs=logprobs))
  return out, entropy


class ForwardTest(parameterized.TestCase):
  def test_the_loss_is_that_of_the_published_weights(self):
    """An update under the weights that made the log-probabilities."""
    trainer, state = miniature.trainer(), miniature.state()
    published = trainer.published(state.params)
    drawn, _ = sampled_by(published, windows(6))
    batches = pack(drawn)
    tokens = sum(int(w.loss_mask.sum()) for w in drawn)
    wanted = -sum(
      float(np.sin(1 + w.tokens.sum())) * w.rollout_logprobs.sum()
      for w in drawn
    )
    _, sums, _ = trainer.update(state, batches)
    self.assertEqual(float(sums.tokens), tokens)
    self.assertAlmostEqual(float(sums.loss), wanted / tokens, places=5)
    self.assertLess(float(sums.off_policy_kl) / tokens, 1e-9)
    self.assertEqual(float(sums.truncated), 0)
    singletons = sum(int((w.sampling_mask.sizes() == 1).sum()) for w in drawn)
    self.assertEqual(float(sums.singletons), singletons)

  def test_straight_through(self):
    """Master weights are rounded for the forward pass, not by the update."""
    trainer, batches = miniature.trainer(), pack(windows(4))
    params = miniature.parameters()
    rounded = jax.tree.map(
      lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params
    )
    rest = jax.tree.map(lambda x, y: np.asarray(x - y), params, rounded)
    before = jax.tree.map(np.array, rounded)
    state, sums, norm = trainer.update(trainer.init(params), batches)
    other, other_sums, other_norm = trainer.update(
      trainer.init(rounded), batches
    )
    self.assertEqual(miniature.bits(sums), miniature.bits(other_sums))
    self.assertEqual(float(norm), float(other_norm))
    moved, kept = 0, 0
    for after, other_after, start, part in zip(
      *map(jax.tree.leaves, (state.params, other.params, before, rest))
    ):
      # The same update on top of what the engines cannot see.
      np.testing.assert_allclose(after - other_after, part, atol=1e-6)
      moved += np.count_nonzero(np.asarray(other_after) != start)
      kept += np.count_nonzero(part)
    self.assertGreater(moved, 1000)
    self.assertGreater(kept, 1000)

  def test_the_step_counts_and_the_published_dtype_is_that_of_engines(self):
    trainer = miniature.trainer()
    state, _, _ = trainer.update(miniature.state(), pack(windows(2)))
    self.assertEqual(int(state.step), 1)
    for master, leaf in zip(
      jax.tree.leaves(state.params),
      jax.tree.leaves(trainer.published(state.params)),
    ):
      self.assertEqual(master.dtype, jnp.float32)
      self.assertEqual(leaf.dtype, steps.PUBLISHED_DTYPE)
      np.testing.assert_array_equal(leaf, master.astype(jnp.bfloat16))


class ProbeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.trainer = miniature.trainer()
    self.weights = self.trainer.published(miniature.parameters())

  def probe(self, drawn):
    (batch,) = batching.pack(drawn, [0.0] * len(drawn), BATCH)
    sums = self.trainer.probe(self.weights, batch)
    return jax.device_get(sums), float(sums.mismatch_kl / sums.tokens)

  def test_a_faithful_engine_has_no_mismatch(self):
    drawn, entropy = sampled_by(self.weights, windows(5))
    sums, kl = self.probe(drawn)
    self.assertEqual(sums.tokens, sum(w.loss_mask.sum() for w in drawn))
    self.assertLess(kl, 1e-9)
    self.assertLess(sums.mismatch_max, 1e-4)
    self.assertAlmostEqual(float(sums.entropy), entropy, delta=1e-3)

  def test_another_temperature_is_found(self):
    drawn, _ = sampled_by(
      self.weights, windows(5), temperature=1.1 * miniature.TEMPERATURE
    )
    self.assertGreater(self.probe(drawn)[1], 1e-3)

  def _changed(self, change):
    drawn, _ = sampled_by(self.weights, windows(5))
    return self.probe([change(window) for window in drawn])[1]

  def test_log_probabilities_off_by_one_are_found(self):
    def change(window):
      logprobs = np.roll(window.rollout_logprobs, 1)
      return dataclasses.replace(window, rollout_logprobs=logprobs)

    self.assertGreater(self._changed(change), 1e-3)

  def test_experts_off_by_one_are_found(self):
    def change(window):
      routed = np.roll(window.routed_experts, 1, axis=0)
      return dataclasses.replace(window, routed_experts=routed)

    self.assertGreater(self._changed(change), 1e-3)

  def test_lost_sampling_masks_are_found(self):
    def change(window):
      mask = type(window.sampling_mask).empty(window.tokens.size)
      return dataclasses.replace(window, sampling_mask=mask)

    self.assertGreater(self._changed(change), 1e-3)

  def test_other_weights_are_found(self):
    drawn, _ = sampled_by(
      self.trainer.published(miniature.parameters(seed=1)), windows(5)
    )
    self.assertGreater(self.probe(drawn)[1], 1e-3)


class InvarianceTest(parameterized.TestCase):
  def update(self, batches):
    """Returns bits of the new state, sums and norm from a fresh state."""
    state, sums, norm = miniature.trainer().update(miniature.state(), batches)
    sums = jax.device_get(sums)
    return miniature.bits(state), loss.Sums(*map(float, sums)), float(norm)

  def test_the_same_batches_make_the_same_bits(self):
    batches = pack(windows(6))
    bits, sums, norm = self.update(batches)
    self.assertEqual(self.update(batches), (bits, sums, norm))
    self.assertNotEqual(bits, miniature.bits(miniature.state()))

  def test_padding_does_not_reach_the_update(self):
    """Not one bit, whatever stands in it."""
    batches = pack(windows(3))
    wanted = self.update(batches)
    rng = np.random.default_rng(1)
    changed = []
    for batch in batches:
      padding = batch.segment_ids == 0
      self.assertGreater(padding.sum(), ROW)  # an empty row among it
      routed = rng.integers(0, 4, batch.routed_experts.shape).astype(np.int16)
      changed.append(
        batch._replace(
          tokens=np.where(padding, 7, batch.tokens),
          targets=np.where(padding, 9, batch.targets),
          positions=np.where(padding, 3, batch.positions),
          routed_experts=np.where(
            padding[..., None, None], routed, batch.routed_experts
          ),
          advantages=np.where(padding, np.float32(5), batch.advantages),
          rollout_logprobs=np.where(
            padding, np.float32(-9), batch.rollout_logprobs
          ),
          singletons=batch.singletons | padding,
        )
      )
    self.assertEqual(self.update(changed), wanted)

  def test_given_tokens_have_no_gradient(self):
    """Advantage, log-probability and target of a prompt change no bit."""
    batches = pack(windows(5))
    changed = []
    for batch in batches:
      kept = batch.loss_mask
      changed.append(
        batch._replace(
          targets=np.where(kept, batch.targets, 11),
          advantages=np.where(kept, batch.advantages, np.float32(-3)),
          rollout_logprobs=np.where(
            kept, batch.rollout_logprobs, np.float32(-20)
          ),
        )
      )
    self.assertEqual(self.update(changed), self.update(batches))

  def test_a_last_answer_of_a_tool_changes_no_bit(self):
    """Tokens after the last sampled one predict nothing that is trained."""

    def ending(window, token):
      last = int(np.flatnonzero(window.loss_mask)[-1])
      tokens = window.tokens.copy()
      tokens[last + 1 :] = token
      return dataclasses.replace(window, tokens=tokens)

    drawn = windows(6)
    tails = [w.tokens.size - np.flatnonzero(w.loss_mask)[-1] - 1 for w in drawn]
    self.assertGreater(sum(tails), 0)
    advantages = [1.0, -1.0, 0.5, 0.25, -0.5, 2.0]
    found, wanted = (
      self.update(
        batching.pack([ending(w, token) for w in drawn], advantages, BATCH)
      )
      for token in (5, 60)
    )
    self.assertEqual(found, wanted)

  def test_rows_and_microbatches_do_not_matter(self):
    """The same tokens: packed, in another order, and one window at a time."""
    drawn = windows(8)
    _, sums, norm = self.update(pack(drawn))
    alone = [batch for window in drawn for batch in pack([window])]
    self.assertLen(alone, 8)
    halves = pack(drawn[5:]) + pack(drawn[:5])
    for batches in (alone, alone[::-1], halves):
      _, other, other_norm = self.update(batches)
      np.testing.assert_allclose(other, sums, rtol=1e-6, atol=1e-6)
      np.testing.assert_allclose(other_norm, norm, rtol=1e-5)

  def test_a_microbatch_without_trained_tokens_changes_no_bit(self):
    batches = pack(windows(4))
    empty = batches[0]._replace(loss_mask=np.zeros_like(batches[0].loss_mask))
    self.assertEqual(self.update([*batches, empty]), self.update(batches))
