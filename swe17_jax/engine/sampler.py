"""Temperature, top-k and top-p sampling that reports its own support.

The sampling mask that is returned is the support that was sampled from, not
one rebuilt afterwards: at ties and in the order of filters the two can
differ (SGLang #35966). The log-probability is renormalised over it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Controls(NamedTuple):
  """Sampling parameters of each row, all [B]."""

  temperature: jax.Array  # f32
  top_k: jax.Array  # int32; 0 = no limit
  top_p: jax.Array  # f32
  seed: jax.Array  # uint32


class Sampled(NamedTuple):
  """One sampled token per row.

  Attributes:
    token: int32 [B].
    logprob: f32 [B], renormalised over the mask.
    mask_ids: int32 [B, M], kept tokens from the most to the least likely.
    mask_size: int32 [B], how many of them count; 0 = the full vocabulary.
  """

  token: jax.Array
  logprob: jax.Array
  mask_ids: jax.Array
  mask_size: jax.Array


def sample(
  logits: jax.Array,
  positions: jax.Array,
  controls: Controls,
  *,
  max_mask_tokens: int,
) -> Sampled:
  """Samples one token per row; equal seeds and positions repeat it.

  A token is kept if it is among the `top_k` likeliest and the likelier ones
  together have less than `top_p` of the whole probability.

  Args:
    logits: f32 [B, V].
    positions: int32 [B], index of the token to be sampled in its sequence.
    controls: see `Controls`; `top_k` at most `max_mask_tokens`.
    max_mask_tokens: M, bound of a mask.
  """
  scaled = logits / controls.temperature[:, None]
  logprobs = jax.nn.log_softmax(scaled)  # [B, V]

  def gumbel(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, logits.shape[1:])

  noise = jax.vmap(gumbel)(controls.seed, positions)  # [B, V]
  width = min(max_mask_tokens, logits.shape[1])
  kept_logprobs, ids = jax.lax.top_k(logprobs, width)  # [B, M], descending
  probabilities = jnp.exp(kept_logprobs)
  before = jnp.cumsum(probabilities, -1) - probabilities
  limit = jnp.where(controls.top_k > 0, controls.top_k, width)
  kept = (jnp.arange(width) < limit[:, None]) & (
    before < controls.top_p[:, None]
  )
  kept_logprobs = jnp.where(kept, kept_logprobs, -jnp.inf)
  kept_logprobs = jax.nn.log_softmax(kept_logprobs)
  kept_noise = jnp.take_along_axis(noise, ids, -1)
  place = jnp.argmax(kept_logprobs + kept_noise, -1)[:, None]  # [B, 1]
  full_token = jnp.argmax(logprobs + noise, -1)[:, None]
  full = (controls.top_k == 0) & (controls.top_p >= 1)

  def pick(array, index):
    return jnp.take_along_axis(array, index, -1)[:, 0]

  return Sampled(
    token=jnp.where(full, full_token[:, 0], pick(ids, place)),
    logprob=jnp.where(
      full, pick(logprobs, full_token), pick(kept_logprobs, place)
    ),
    mask_ids=ids,
    mask_size=jnp.where(full, 0, kept.sum(-1)),
  )
