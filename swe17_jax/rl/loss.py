"""The policy gradient loss and its diagnostics. Arrays in, arrays out.

With `r = pi / mu` the ratio of the policy being trained to the one that
sampled, the loss of a token is

    -min(sg(r), C) * A * log pi            (truncated importance sampling)

(Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training"). Sums are divided by the number of trained tokens of the whole
step, so that neither packing nor the number of microbatches changes a
token's weight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
  """What one microbatch adds to the loss and diagnostics (f32 scalars)."""

  loss: jax.Array
  tokens: jax.Array  # trained tokens
  off_policy_kl: jax.Array  # sum of r - log r - 1
  truncated: jax.Array  # tokens whose ratio was cut at C
  singletons: jax.Array  # tokens whose mask held only themselves


def k3(log_ratio: jax.Array) -> jax.Array:
  """Returns `r - log r - 1`, an estimator of KL(mu || pi) that is >= 0.

  Reference: Schulman 2020, "Approximating KL divergence", estimator k3.
  """
  return jnp.expm1(log_ratio) - log_ratio


def policy_gradient(
  policy_logprobs: jax.Array,
  *,
  rollout_logprobs: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  singletons: jax.Array,
  denominator: jax.Array,
  truncation: float,
) -> Sums:
  """Sums the loss over the tokens of a microbatch.

  Args:
    policy_logprobs: f32 [R], log pi of each token; carries the gradient.
    rollout_logprobs: f32 [R], log mu, recorded at sampling.
    advantages: f32 [R].
    loss_mask: bool [R], the tokens that the model sampled.
    singletons: bool [R], whose mask holds one token.
    denominator: f32, trained tokens of the whole step.
    truncation: C, largest importance ratio (2.0 in verl, slime, SkyRL).
  """
  log_ratio = jax.lax.stop_gradient(policy_logprobs) - rollout_logprobs
  log_ratio = jnp.where(loss_mask, jnp.clip(log_ratio, -20.0, 20.0), 0.0)
  ratio = jnp.exp(log_ratio)
  weight = jnp.where(loss_mask, jnp.minimum(ratio, truncation), 0.0)
  terms = -weight * advantages * policy_logprobs
  return Sums(
    loss=jnp.sum(jnp.where(loss_mask, terms, 0.0)) / denominator,
    tokens=loss_mask.sum().astype(jnp.float32),
    off_policy_kl=jnp.sum(k3(log_ratio)),
    truncated=jnp.sum((ratio > truncation) & loss_mask).astype(jnp.float32),
    singletons=jnp.sum(singletons & loss_mask).astype(jnp.float32),
  )


def behaviour_cloning(
  policy_logprobs: jax.Array,
  *,
  rollout_logprobs: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  singletons: jax.Array,
  denominator: jax.Array,
) -> Sums:
  """Sums `-A log pi`: imitation of demonstrations, whoever made them.

  Arguments as in `policy_gradient`; nothing is known of the policy that
  wrote the demonstrations, so there is no ratio.
  """
  del rollout_logprobs, singletons
  terms = -advantages * policy_logprobs
  zero = jnp.zeros(())
  return Sums(
    loss=jnp.sum(jnp.where(loss_mask, terms, 0.0)) / denominator,
    tokens=loss_mask.sum().astype(jnp.float32),
    off_policy_kl=zero,
    truncated=zero,
    singletons=zero,
  )
