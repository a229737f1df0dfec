"""The sampler against hand-computed supports, a NumPy twin and statistics."""

import jax
import numpy as np
from absl.testing import absltest, parameterized

from swe17_jax.engine import sampler

V, M = 16, 8  # vocabulary, longest mask
# Probabilities 1/2, 1/4, 1/8, 1/8; the last two tie.
HALVES = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)

_sample = jax.jit(sampler.sample, static_argnames='max_mask_tokens')


def _run(
  logits,
  *,
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  seeds=(0,),
  positions=7,
  max_mask_tokens=M,
):
  """Samples a row per seed; logits [V] or [B, V], controls broadcast."""
  rows = len(seeds)

  def column(value, dtype):
    return np.broadcast_to(np.asarray(value, dtype), rows)

  sampled = _sample(
    np.broadcast_to(np.asarray(logits, np.float32), (rows, logits.shape[-1])),
    column(positions, np.int32),
    sampler.Controls(
      temperature=column(temperature, np.float32),
      top_k=column(top_k, np.int32),
      top_p=column(top_p, np.float32),
      seed=column(seeds, np.uint32),
    ),
    max_mask_tokens=max_mask_tokens,
  )
  return sampler.Sampled(*map(np.asarray, sampled))


def _mask(sampled, row=0) -> list[int]:
  return sampled.mask_ids[row, : sampled.mask_size[row]].tolist()


def _twin(logits, *, temperature, top_k, top_p):
  """Returns token -> log-probability over the support, one by one in f64."""
  scaled = np.asarray(logits, np.float64) / temperature
  probabilities = np.exp(scaled - scaled.max())
  probabilities /= probabilities.sum()
  support, mass = [], 0.0
  for token in np.argsort(-probabilities, kind='stable'):
    if (top_k and len(support) == top_k) or mass >= top_p:
      break
    support.append(int(token))
    mass += probabilities[token]
  return {token: np.log(probabilities[token] / mass) for token in support}


class HandTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('top_k_1', 1.0, 1, 1.0, {0: 1.0}),
    ('top_k_2', 1.0, 2, 1.0, {0: 2 / 3, 1: 1 / 3}),
    ('top_k_3_cuts_a_tie', 1.0, 3, 1.0, {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
    ('top_k_is_everything', 1.0, 4, 1.0, {0: 4, 1: 2, 2: 1, 3: 1}),
    ('top_k_above_vocabulary', 1.0, 8, 1.0, {0: 4, 1: 2, 2: 1, 3: 1}),
    ('top_p_keeps_one', 1.0, 4, 1e-6, {0: 1.0}),
    # Token 1 has 0.5 before it, token 2 has 0.75.
    ('top_p_keeps_two', 1.0, 4, 0.7, {0: 2 / 3, 1: 1 / 3}),
    ('top_p_keeps_three', 1.0, 4, 0.8, {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
    ('top_k_binds_first', 1.0, 1, 0.8, {0: 1.0}),
    # Squares: 16 : 4 : 1 : 1 of 22, so 0.727 stand before token 1.
    ('temperature_before_top_p', 0.5, 4, 0.72, {0: 1.0}),
    ('temperature_before_top_k', 0.5, 2, 1.0, {0: 0.8, 1: 0.2}),
  )
  def test_support(self, temperature, top_k, top_p, weights):
    seeds = range(64)
    sampled = _run(
      HALVES, temperature=temperature, top_k=top_k, top_p=top_p, seeds=seeds
    )
    total = sum(weights.values())
    for row in seeds:
      self.assertEqual(_mask(sampled, row), list(weights))
      np.testing.assert_allclose(
        sampled.logprob[row],
        np.log(weights[int(sampled.token[row])] / total),
        atol=1e-6,
      )
    self.assertEqual(set(sampled.token.tolist()), set(weights))

  def test_the_full_vocabulary_has_no_mask(self):
    sampled = _run(HALVES, temperature=0.5, seeds=range(400))
    self.assertFalse(sampled.mask_size.any())
    expected = np.log(np.array([16, 4, 1, 1]) / 22)
    np.testing.assert_allclose(
      sampled.logprob, expected[sampled.token], atol=1e-6
    )
    self.assertEqual(set(sampled.token.tolist()), {0, 1, 2, 3})

  def test_ties_keep_the_lowest_ids_and_no_more_than_top_k(self):
    seeds = range(300)
    sampled = _run(np.zeros(V), top_k=3, seeds=seeds)
    for row in seeds:
      self.assertEqual(_mask(sampled, row), [0, 1, 2])
    self.assertEqual(set(sampled.token.tolist()), {0, 1, 2})
    np.testing.assert_allclose(sampled.logprob, np.log(1 / 3), atol=1e-6)

  def test_logits_far_apart_stay_finite(self):
    logits = np.linspace(0, -3e4, V)
    for top_k in (0, 1, M):
      sampled = _run(logits, top_k=top_k, temperature=0.01, seeds=range(8))
      self.assertFalse(sampled.token.any())
      np.testing.assert_array_equal(sampled.logprob, 0)


class TwinTest(absltest.TestCase):
  def test_mask_and_logprob(self):
    generator = np.random.default_rng(0)
    rows = 200
    logits = generator.normal(size=(rows, V)) * 2
    temperature = generator.uniform(0.3, 2, rows)
    top_k = generator.integers(1, M + 1, rows)
    top_p = np.where(
      generator.random(rows) < 0.3, 1, generator.uniform(0.05, 1, rows)
    )
    sampled = _run(
      logits,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      seeds=range(rows),
    )
    sizes = set()
    for row in range(rows):
      expected = _twin(
        logits[row].astype(np.float32),
        temperature=temperature[row],
        top_k=top_k[row],
        top_p=top_p[row],
      )
      self.assertEqual(_mask(sampled, row), list(expected))
      self.assertIn(int(sampled.token[row]), expected)
      np.testing.assert_allclose(
        sampled.logprob[row], expected[int(sampled.token[row])], atol=1e-5
      )
      sizes.add(len(expected))
    self.assertEqual(sizes, set(range(1, M + 1)))  # every size was seen


class DistributionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('full', 0, 1.0), ('top_k', 5, 1.0), ('top_p', M, 0.8)
  )
  def test_frequencies_of_20k_draws(self, top_k, top_p):
    logits = np.random.default_rng(1).normal(size=V)
    draws = 20_000
    sampled = _run(
      logits, temperature=1.3, top_k=top_k, top_p=top_p, seeds=range(draws)
    )
    expected = _twin(logits, temperature=1.3, top_k=top_k, top_p=top_p)
    counts = np.bincount(sampled.token, minlength=V)
    support = list(expected)
    self.assertEqual(counts[support].sum(), draws)  # nothing outside
    wanted = draws * np.exp([expected[token] for token in support])
    chi_square = float(((counts[support] - wanted) ** 2 / wanted).sum())
    # 99.9% quantile for 15 degrees of freedom, the largest case here.
    self.assertLess(chi_square, 37.7)

  def test_positions_of_one_seed_are_independent_draws(self):
    draws = 20_000
    sampled = _run(HALVES, seeds=[3] * draws, positions=range(draws))
    counts = np.bincount(sampled.token, minlength=4)
    wanted = draws * np.exp(HALVES)
    # 99.9% quantile for 3 degrees of freedom.
    self.assertLess(float(((counts - wanted) ** 2 / wanted).sum()), 16.3)
    pairs = np.bincount(sampled.token[:-1] * 4 + sampled.token[1:])
    wanted = (draws - 1) * np.outer(*[np.exp(HALVES)] * 2).ravel()
    self.assertLess(float(((pairs - wanted) ** 2 / wanted).sum()), 37.7)


class RepeatTest(absltest.TestCase):
  def test_seed_and_position_alone_decide(self):
    generator = np.random.default_rng(2)
    rows = 24
    logits = generator.normal(size=(rows, V))
    controls = {
      'temperature': generator.uniform(0.5, 2, rows),
      'top_k': generator.integers(0, M + 1, rows),
      'seeds': generator.integers(0, 2**32, rows),
      'positions': generator.integers(0, 1000, rows),
    }
    together = _run(logits, **controls)
    order = generator.permutation(rows)
    shuffled = _run(
      logits[order], **{name: x[order] for name, x in controls.items()}
    )
    np.testing.assert_array_equal(shuffled.token, together.token[order])
    np.testing.assert_array_equal(shuffled.mask_size, together.mask_size[order])
    for row in range(0, rows, 6):
      alone = _run(
        logits[row], **{name: x[row : row + 1] for name, x in controls.items()}
      )
      self.assertEqual(alone.token[0], together.token[row])
      np.testing.assert_allclose(
        alone.logprob[0], together.logprob[row], atol=1e-6
      )

  def test_a_mask_of_everything_draws_what_no_mask_draws(self):
    logits = np.random.default_rng(3).normal(size=V)
    full = _run(logits, seeds=range(500))
    masked = _run(logits, top_k=V, seeds=range(500), max_mask_tokens=V)
    np.testing.assert_array_equal(full.token, masked.token)
    np.testing.assert_allclose(full.logprob, masked.logprob, atol=1e-6)
    np.testing.assert_array_equal(masked.mask_size, V)


if __name__ == '__main__':
  absltest.main()
