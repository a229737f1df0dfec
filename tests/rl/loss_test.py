"""The policy gradient by hand, and what must not change it."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.rl import loss

C = 2.0
R = 8


@jax.jit
def sums(logprobs, fields):
  return loss.policy_gradient(logprobs, **fields, truncation=C)


@jax.jit
def gradient(logprobs, fields):
  return jax.grad(lambda x: sums(x, fields).loss)(logprobs)


def fields(rng, rows=R, **changes):
  """Random arguments; a quarter of the tokens is not trained."""
  drawn = {
    'rollout_logprobs': -rng.random(rows),
    'advantages': rng.normal(size=rows),
    'loss_mask': rng.random(rows) < 0.75,
    'singletons': rng.random(rows) < 0.3,
    'denominator': 5.0,
  } | changes
  return {
    name: np.asarray(x, None if np.asarray(x).dtype == bool else np.float32)
    for name, x in drawn.items()
  }


def twin(logprobs, f):
  """Token by token in float64: the sums and the gradient."""
  out = dict.fromkeys(loss.Sums._fields, 0.0)
  grads = np.zeros(len(logprobs))
  for t in np.flatnonzero(f['loss_mask']):
    log_ratio = float(logprobs[t]) - float(f['rollout_logprobs'][t])
    ratio = np.exp(log_ratio)
    weight = min(ratio, C) * float(f['advantages'][t])
    out['loss'] -= weight * logprobs[t] / f['denominator']
    out['tokens'] += 1
    out['off_policy_kl'] += ratio - log_ratio - 1
    out['truncated'] += ratio > C
    out['singletons'] += f['singletons'][t]
    grads[t] = -weight / f['denominator']
  return out, grads


class PolicyGradientTest(parameterized.TestCase):
  def test_by_hand(self):
    logprobs = np.log(np.asarray([0.5, 0.8, 0.1, 0.9], np.float32))
    f = {
      # Ratios 2 (just not cut), 4 (cut to 2), 0.5, and one prompt token.
      'rollout_logprobs': np.log(np.asarray([0.25, 0.2, 0.2, 1], 'f4')),
      'advantages': np.asarray([1.0, -1.0, 0.5, 9.0], np.float32),
      'loss_mask': np.asarray([True, True, True, False]),
      'singletons': np.asarray([False, True, False, True]),
      'denominator': np.float32(3),
    }
    found = sums(logprobs, f)
    wanted = -(2 * np.log(0.5) - 2 * np.log(0.8) + 0.5 * 0.5 * np.log(0.1))
    self.assertAlmostEqual(float(found.loss), wanted / 3, places=6)
    self.assertEqual(float(found.tokens), 3)
    self.assertEqual(float(found.truncated), 1)
    self.assertEqual(float(found.singletons), 1)
    kl = sum(r - np.log(r) - 1 for r in (2, 4, 0.5))
    self.assertAlmostEqual(float(found.off_policy_kl), kl, places=5)
    np.testing.assert_allclose(
      gradient(logprobs, f), [-2 / 3, 2 / 3, -0.25 / 3, 0], atol=1e-6
    )

  @settings(max_examples=50, deadline=None)
  @given(st.integers(0, 2**32))
  def test_token_by_token(self, seed):
    rng = np.random.default_rng(seed)
    logprobs = (-3 * rng.random(R)).astype(np.float32)
    f = fields(rng)
    wanted, grads = twin(logprobs, f)
    for name, value in sums(logprobs, f)._asdict().items():
      np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient(logprobs, f), grads, atol=1e-6)

  @settings(max_examples=20, deadline=None)
  @given(st.integers(0, 2**32))
  def test_what_was_not_sampled_has_no_influence_at_all(self, seed):
    rng = np.random.default_rng(seed)
    logprobs = (-3 * rng.random(R)).astype(np.float32)
    f = fields(rng)
    given_tokens = ~f['loss_mask']
    other = dict(f)
    for name in ('rollout_logprobs', 'advantages'):
      other[name] = np.where(given_tokens, -1e4, f[name]).astype(np.float32)
    other['singletons'] = f['singletons'] | given_tokens
    moved = np.where(given_tokens, -50.0, logprobs).astype(np.float32)
    for found, wanted in zip(sums(moved, other), sums(logprobs, f)):
      self.assertEqual(float(found), float(wanted))
    grads = np.asarray(gradient(moved, other))
    np.testing.assert_array_equal(grads, gradient(logprobs, f))
    self.assertFalse(grads[given_tokens].any())

  @settings(max_examples=20, deadline=None)
  @given(st.integers(0, 2**32))
  def test_order_and_microbatches_do_not_matter(self, seed):
    """Equal sums, and for every token an equal gradient."""
    rng = np.random.default_rng(seed)
    logprobs = (-3 * rng.random(R)).astype(np.float32)
    f = fields(rng)
    whole, grads = sums(logprobs, f), gradient(logprobs, f)
    order = rng.permutation(R)
    parts, part_grads = [], np.zeros(R)
    for half in np.split(order, 2):
      # Each microbatch is half padding, as a last one would be.
      rows = np.concatenate([half, half])
      g = {n: x if n == 'denominator' else x[rows] for n, x in f.items()}
      g['loss_mask'] = g['loss_mask'] & (np.arange(R) < R // 2)
      parts.append(sums(logprobs[rows], g))
      part_grads[half] = gradient(logprobs[rows], g)[: R // 2]
    total = jax.tree.map(jnp.add, *parts)
    for found, wanted in zip(total, whole):
      np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(part_grads.astype(np.float32), grads)

  def test_a_hopeless_ratio_stays_finite(self):
    rng = np.random.default_rng(0)
    f = fields(rng, loss_mask=np.ones(R, bool))
    logprobs = np.full(R, -1e4, np.float32)
    logprobs[0], f['rollout_logprobs'][0] = 0.0, -1e4
    for value in [*sums(logprobs, f), gradient(logprobs, f)]:
      self.assertTrue(np.isfinite(np.asarray(value)).all())
    # The policy has left these tokens: no weight, whatever their advantage.
    np.testing.assert_allclose(gradient(logprobs, f)[1:], 0, atol=1e-8)

  def test_on_policy_the_gradient_is_the_advantage(self):
    rng = np.random.default_rng(1)
    f = fields(rng, loss_mask=np.ones(R, bool))
    found = sums(f['rollout_logprobs'], f)
    self.assertEqual(float(found.off_policy_kl), 0.0)
    self.assertEqual(float(found.truncated), 0.0)
    np.testing.assert_allclose(
      gradient(f['rollout_logprobs'], f), -f['advantages'] / 5, rtol=1e-6
    )


class BehaviourCloningTest(parameterized.TestCase):
  def test_by_hand(self):
    logprobs = np.asarray([-1.0, -2.0, -3.0, -9.0], np.float32)
    f = {
      'rollout_logprobs': np.full(4, np.nan, np.float32),
      'advantages': np.asarray([1.0, 0.5, 1.0, 1.0], np.float32),
      'loss_mask': np.asarray([True, True, True, False]),
      'singletons': np.zeros(4, bool),
      'denominator': np.float32(3),
    }
    found = loss.behaviour_cloning(logprobs, **f)
    self.assertAlmostEqual(float(found.loss), 5 / 3, places=6)
    self.assertEqual(float(found.tokens), 3)
    grads = jax.grad(lambda x: loss.behaviour_cloning(x, **f).loss)(logprobs)
    np.testing.assert_allclose(grads, [-1 / 3, -0.5 / 3, -1 / 3, 0], rtol=1e-6)


class K3Test(parameterized.TestCase):
  def test_by_hand_and_never_negative(self):
    np.testing.assert_allclose(
      loss.k3(jnp.log(jnp.asarray([1.0, 2.0, 0.5]))),
      [0, 1 - np.log(2), np.log(2) - 0.5],
      atol=1e-6,
    )
    tiny = jnp.asarray([1e-3, -1e-3, 1e-5, -1e-7])
    found = np.asarray(loss.k3(tiny))
    self.assertTrue((found >= 0).all(), found)
