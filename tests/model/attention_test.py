"""Attention: masks, positions, packing, and decoding with a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from swe17_jax.model import attention, hf, transformer
from swe17_jax.model import config as model_config

_SMALL = dict(
  vocab_size=32,
  hidden_size=32,
  num_hidden_layers=2,
  moe_intermediate_size=16,
  intermediate_size=32,
)
_GQA = dataclasses.replace(model_config.TINY, **_SMALL, head_dim=8)
_MLA = dataclasses.replace(
  model_config.TINY_MLA,
  **_SMALL,
  rope_scaling=model_config.YarnConfig(4.0, 4, mscale=1.0, mscale_all_dim=0.5),
)
_FAMILIES = (('gqa', _GQA), ('mla', _MLA))


@functools.cache
def _params(config):
  """Random parameters, made without compiling anything."""
  generator = np.random.default_rng(0)
  tensors = {
    name: generator.standard_normal(slot.shape, np.float32)
    * (slot.shape[-1] ** -0.5 if name.endswith('proj.weight') else 1)
    for name, slot in hf.tensor_specs(config).items()
  }
  shapes = {name: array.shape for name, array in tensors.items()}
  return hf.from_hf(tensors.__getitem__, config, shapes=shapes)


@functools.partial(jax.jit, static_argnames='config')
def _compiled(params, tokens, positions, segment_ids, *, config):
  return transformer.apply(
    params, config, tokens, positions=positions, segment_ids=segment_ids
  )


def _rows(tokens, positions, segment_ids):
  """Pads to one shape, so that each family compiles once: [2, 14]."""
  return [
    np.pad(x, ((0, 2 - x.shape[0]), (0, 14 - x.shape[1])))
    for x in (tokens, positions, segment_ids)
  ]


def _forward(params, *rows, config):
  """Runs rows [B, T]; padding is cut off again, except of the entries."""
  batch, length = rows[0].shape
  out = _compiled(params, *_rows(*rows), config=config)
  return out._replace(
    hidden=np.asarray(out.hidden)[:batch, :length],
    routed_experts=np.asarray(out.routed_experts)[:batch, :length],
  )


@functools.partial(jax.jit, static_argnames='config')
def _decode(params, tokens, positions, cache, *, config):
  return transformer.apply(
    params, config, tokens, positions=positions, cache=cache
  )


def _tokens(length, seed=0):
  generator = np.random.default_rng(seed)
  return generator.integers(0, 32, length).astype(np.int32)


def _packed(first, second, padding=3):
  """Two sequences and padding in one row: tokens, positions, segment_ids."""
  sizes = (len(first), len(second), padding)
  tokens = np.concatenate([first, second, np.zeros(padding, np.int32)])
  positions = np.concatenate([np.arange(size) for size in sizes])
  segment_ids = np.repeat([1, 2, 0], sizes)
  return tuple(
    x[None].astype(np.int32) for x in (tokens, positions, segment_ids)
  )


class PackingTest(parameterized.TestCase):
  @parameterized.named_parameters(*_FAMILIES)
  def test_a_segment_depends_on_no_bit_of_the_others(self, config):
    params = _params(config)
    first, second = _tokens(5), _tokens(6, seed=1)
    out = _forward(params, *_packed(first, second), config=config)
    for changed, kept in (
      (_packed(_tokens(5, seed=2), second), slice(5, 11)),
      (_packed(first, _tokens(6, seed=3)), slice(0, 5)),
    ):
      other = _forward(params, *changed, config=config)
      np.testing.assert_array_equal(out.hidden[:, kept], other.hidden[:, kept])
      np.testing.assert_array_equal(
        out.routed_experts[:, kept], other.routed_experts[:, kept]
      )

  @parameterized.named_parameters(*_FAMILIES)
  def test_packed_equals_alone(self, config):
    params = _params(config)
    first, second = _tokens(5), _tokens(5, seed=1)
    out = _forward(params, *_packed(first, second, padding=4), config=config)
    for sequence, where in ((first, slice(0, 5)), (second, slice(5, 10))):
      positions = np.arange(sequence.size, dtype=np.int32)[None]
      alone = _forward(
        params,
        sequence[None],
        positions,
        np.ones_like(positions),
        config=config,
      )
      # Other shapes, other orders of summation: f32 rounding, no more.
      np.testing.assert_allclose(
        out.hidden[:, where], alone.hidden, rtol=2e-5, atol=2e-5
      )

  @parameterized.named_parameters(*_FAMILIES)
  def test_no_token_depends_on_a_later_one(self, config):
    params = _params(config)
    first, changed = _tokens(8), _tokens(8)
    changed[5:] = (changed[5:] + 1) % 32
    out, other = (
      _forward(params, *_packed(tokens, _tokens(3)), config=config).hidden
      for tokens in (first, changed)
    )
    np.testing.assert_array_equal(out[:, :5], other[:, :5])
    self.assertGreater(jnp.abs(out[:, 5:8] - other[:, 5:8]).max(), 1e-3)

  @parameterized.named_parameters(*_FAMILIES)
  def test_padding_is_finite_forward_and_backward(self, config):
    # The second row is padding as a whole.
    rows = _rows(*_packed(_tokens(4), _tokens(4)))

    @jax.jit
    @jax.value_and_grad
    def run(params):
      return (_compiled(params, *rows, config=config).hidden ** 2).sum()

    value, gradient = run(_params(config))
    self.assertTrue(np.isfinite(value))
    for array in jax.tree.leaves(gradient):
      self.assertTrue(np.isfinite(array).all())


class CacheTest(parameterized.TestCase):
  @parameterized.named_parameters(*_FAMILIES)
  def test_token_by_token_equals_the_whole_sequence(self, config):
    params = _params(config)
    # Two rows of different length, past the YaRN context of 4.
    tokens = np.stack([_tokens(10), _tokens(10, seed=1)])
    positions = np.broadcast_to(np.arange(10, dtype=np.int32), (2, 10))
    whole = _forward(
      params, tokens, positions, np.ones_like(tokens), config=config
    )
    cache = transformer.empty_cache(params, config, batch=2, length=12)
    for t in range(10):
      # The second row is three tokens behind; 12 writes nothing.
      at = np.asarray([[t], [t - 3 if t >= 3 else 12]], np.int32)
      fed = np.take_along_axis(tokens, np.minimum(at, 9), 1)
      out = _decode(params, fed, at, cache, config=config)
      cache = out.cache
      for row in range(2 if t >= 3 else 1):
        column = at[row, 0]
        np.testing.assert_allclose(
          out.hidden[row, 0], whole.hidden[row, column], rtol=2e-5, atol=2e-5
        )
        np.testing.assert_array_equal(
          out.routed_experts[row, 0], whole.routed_experts[row, column]
        )

  @parameterized.named_parameters(*_FAMILIES)
  def test_entries_of_a_prefill_continue_in_a_cache(self, config):
    params = _params(config)
    tokens = np.stack([_tokens(9), _tokens(9, seed=1)])
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    ones = np.ones_like(tokens)
    whole = _forward(params, tokens, positions, ones, config=config)
    prefill = _forward(
      params, tokens[:, :6], positions[:, :6], ones[:, :6], config=config
    )
    # What padding left behind lies past the position and is not attended to.
    out = _decode(
      params, tokens[:, 6:], positions[:, 6:], prefill.cache, config=config
    )
    np.testing.assert_allclose(
      out.hidden, whole.hidden[:, 6:], rtol=2e-5, atol=2e-5
    )


class AttendTest(parameterized.TestCase):
  def test_equals_a_slow_twin(self):
    generator = np.random.default_rng(0)
    q = generator.standard_normal((2, 3, 4, 5))  # [B, T, N, H]
    k = generator.standard_normal((2, 6, 2, 5))  # [B, S, K, H]
    v = generator.standard_normal((2, 6, 2, 7))
    allowed = generator.random((2, 3, 6)) < 0.6
    allowed[0, 1] = False  # a padding row
    out = jax.jit(attention.attend)(q, k, v, allowed=allowed, scale=0.3)
    for b, t, n in np.ndindex(2, 3, 4):
      wanted = np.zeros(7)
      sources = np.flatnonzero(allowed[b, t])
      if sources.size:
        scores = k[b, sources, n // 2] @ q[b, t, n] * 0.3
        weights = np.exp(scores - scores.max())
        wanted = weights / weights.sum() @ v[b, sources, n // 2]
      np.testing.assert_allclose(out[b, t, n], wanted, rtol=1e-5, atol=1e-6)


class RopeTest(parameterized.TestCase):
  def test_by_hand(self):
    # Two channels, theta irrelevant: the angle is the position in radians.
    config = dataclasses.replace(_GQA, head_dim=2)
    x = jnp.asarray([1.0, 0.0]).reshape(1, 1, 1, 2)
    out = attention.rotate(x, jnp.asarray([[2]]), config)
    np.testing.assert_allclose(out[0, 0, 0], [np.cos(2), np.sin(2)], rtol=1e-6)

  def test_scores_depend_on_the_distance_alone(self):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(i, j):
      a = attention.rotate(q, jnp.asarray([[i]]), _GQA)
      b = attention.rotate(k, jnp.asarray([[j]]), _GQA)
      return (a * b).sum()

    np.testing.assert_allclose(score(3, 1), score(40, 38), atol=1e-5)
    self.assertGreater(abs(score(3, 1) - score(40, 36)), 1e-3)

  def test_yarn_frequencies_by_hand(self):
    # H = 8, theta = 10^4: frequencies 1, 0.1, 0.01, 0.001. A channel turns r
    # times in 1000 tokens at 8 ln(1000 / (2 pi r)) / (2 ln 10^4): 0.697 for
    # r = 32, 2.202 for r = 1; so the ramp runs from 0 to 3. Channel 0 is
    # kept, 1 is a third of the way to a fourth, 2 two thirds, 3 all of it.
    config = dataclasses.replace(
      _GQA, rope_scaling=model_config.YarnConfig(4.0, 1000)
    )
    third = 1 / 3
    np.testing.assert_allclose(
      attention.rope_frequencies(config),
      [
        1,
        0.1 * (2 * third + third / 4),
        0.01 * (third + 2 * third / 4),
        0.001 / 4,
      ],
      rtol=1e-5,
    )


if __name__ == '__main__':
  absltest.main()
