"""Sampling replay: log-probabilities over the tokens that could be sampled.

A rollout with top-p draws from a truncated, renormalised distribution. The
trainer must take its log-probability over the same support, or every ratio
is off by the lost mass (DeepSeek-V3.2, arXiv 2512.02556, "Keep Sampling
Mask"). A mask of one token gives log-probability 0 and no gradient.

Masks come flat: entry j says that token `ids[j]` was in the mask of row
`rows[j]`. Rows without entries mean the full vocabulary.
"""

import jax
import jax.numpy as jnp


def masked_logprobs(
  logits: jax.Array,
  targets: jax.Array,
  *,
  mask_ids: jax.Array,
  mask_rows: jax.Array,
) -> jax.Array:
  """Returns log pi(target) renormalised over each row's mask, f32 [R].

  Args:
    logits: f32 [R, V], already divided by the temperature.
    targets: int32 [R], each inside its row's mask.
    mask_ids: int32 [N], token ids; padding may hold anything.
    mask_rows: int32 [N], rising; R marks padding.
  """
  rows = logits.shape[0]
  full = jax.nn.logsumexp(logits, -1)
  entries = logits[jnp.minimum(mask_rows, rows - 1), mask_ids]  # [N]

  def total(values):
    return jax.ops.segment_sum(
      values, mask_rows, num_segments=rows + 1, indices_are_sorted=True
    )[:rows]

  # The largest logit of a row bounds its masked ones: exp cannot overflow.
  # A masked token far below it could underflow, so shift by the mask's own.
  peak = jax.lax.stop_gradient(
    jax.ops.segment_max(
      entries, mask_rows, num_segments=rows + 1, indices_are_sorted=True
    )[:rows]
  )
  has_mask = total(jnp.ones_like(entries)) > 0
  peak = jnp.where(has_mask, peak, 0.0)
  # Padding is cut off before exp: it is in no sum, but 0 * inf is NaN.
  shift = entries - peak[jnp.minimum(mask_rows, rows - 1)]
  shifted = jnp.exp(jnp.where(mask_rows < rows, shift, 0.0))
  masked = jnp.log(jnp.where(has_mask, total(shifted), 1.0)) + peak
  chosen = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
  return chosen - jnp.where(has_mask, masked, full)


def entropy(logits: jax.Array) -> jax.Array:
  """Returns the entropy of the full distribution in nats, f32 [R]."""
  logprobs = jax.nn.log_softmax(logits)
  return -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
