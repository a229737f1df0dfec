"""TrainState and the one update, in three executables of fixed shape.

`gradient` runs one microbatch, `add` sums two results, `update` applies the
optimizer. They are compiled apart on purpose: the gradient of a microbatch is
then the same program whatever surrounds it, and the sum over microbatches has
a fixed order, so the bits of an update depend on its trajectories alone.

The forward pass sees the weights that engines see: the f32 master weights
rounded to the published dtype. The gradient goes straight through to the
master weights.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from swe17_jax.model import transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.optim import optimizer
from swe17_jax.rl import batching, loss, sampling_mask

PUBLISHED_DTYPE = jnp.bfloat16


class TrainState(NamedTuple):
  """All that an update changes; `step` is also the weight_version."""

  params: transformer.Params  # f32 master weights
  opt_state: optax.OptState
  step: jax.Array  # int32


class Probe(NamedTuple):
  """Sums over the sampled tokens of a microbatch, f32 scalars."""

  tokens: jax.Array
  mismatch_kl: jax.Array  # sum of r - log r - 1
  mismatch_max: jax.Array  # largest |log r|
  entropy: jax.Array  # sum, nats, full vocabulary


def published(params: transformer.Params) -> transformer.Params:
  """Returns the weights as engines get them."""
  return jax.tree.map(lambda x: x.astype(PUBLISHED_DTYPE), params)


def _logits(weights, model: MoEConfig, batch, temperature: float):
  """Returns f32 [B * T, V], divided by the temperature."""
  dtype = jnp.float32 if jax.default_backend() == 'cpu' else PUBLISHED_DTYPE
  weights = jax.tree.map(lambda x: x.astype(dtype), weights)
  out = transformer.apply(
    weights,
    model,
    batch.tokens,
    positions=batch.positions,
    segment_ids=batch.segment_ids,
    routed_experts=batch.routed_experts,
  )
  hidden = out.hidden.reshape(-1, out.hidden.shape[-1])
  return transformer.logits(weights, model, hidden) / temperature


def _logprobs(logits, batch):
  return sampling_mask.masked_logprobs(
    logits,
    batch.targets.reshape(-1),
    mask_ids=batch.mask_ids,
    mask_rows=batch.mask_rows,
  )


class Trainer:
  """The jitted functions of one model, objective and optimizer.

  `objective` is a function of `rl/loss.py`; `temperature` is the rollouts'.
  """

  def __init__(
    self,
    model: MoEConfig,
    objective: Callable[..., loss.Sums],
    optimizer_config: optimizer.OptimizerConfig,
    *,
    temperature: float,
  ):
    self.model = model
    self._objective = objective
    self._temperature = temperature
    self._tx = optimizer.build(optimizer_config)
    self._gradient = jax.jit(self._gradient_of)
    self._add = jax.jit(
      functools.partial(jax.tree.map, jnp.add), donate_argnums=0
    )
    self._update = jax.jit(self._updated, donate_argnums=0)
    self._probe = jax.jit(self._probed)
    self.published: Callable = jax.jit(published)

  def init(self, params: transformer.Params) -> TrainState:
    """Returns the state at step 0 for f32 parameters."""
    return TrainState(params, self._tx.init(params), jnp.zeros((), jnp.int32))

  def update(
    self,
    state: TrainState,
    batches: Sequence[batching.Microbatch],
  ) -> tuple[TrainState, loss.Sums, jax.Array]:
    """One optimizer step over microbatches.

    Args:
      state: donated.
      batches: at least one microbatch.

    Returns:
      The new state, the diagnostics and the gradient's global norm.
    """
    tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
    weights = self.published(state.params)
    total = None
    for batch in batches:
      result = self._gradient(weights, batch, jnp.float32(max(tokens, 1.0)))
      total = result if total is None else self._add(total, result)
    grads, sums = total
    state, norm = self._update(state, grads)
    return state, sums, norm

  def probe(self, weights, batch: batching.Microbatch) -> Probe:
    """Compares rollout and trainer under the published weights given."""
    return self._probe(weights, batch)

  def _gradient_of(self, weights, batch, denominator):
    def objective(weights):
      logits = _logits(weights, self.model, batch, self._temperature)
      sums = self._objective(
        _logprobs(logits, batch),
        rollout_logprobs=batch.rollout_logprobs.reshape(-1),
        advantages=batch.advantages.reshape(-1),
        loss_mask=batch.loss_mask.reshape(-1),
        singletons=batch.singletons.reshape(-1),
        denominator=denominator,
      )
      return sums.loss, sums

    weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(weights)
    return grads, sums

  def _updated(self, state, grads):
    updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norm = optax.tree.norm(grads)
    return TrainState(params, opt_state, state.step + 1), norm

  def _probed(self, weights, batch):
    logits = _logits(weights, self.model, batch, self._temperature)
    mask = batch.loss_mask.reshape(-1)
    ratio = _logprobs(logits, batch) - batch.rollout_logprobs.reshape(-1)
    ratio = jnp.where(mask, ratio, 0.0)
    each = jnp.where(mask, sampling_mask.entropy(logits), 0.0)
    return Probe(
      tokens=mask.sum().astype(jnp.float32),
      mismatch_kl=loss.k3(ratio).sum(),
      mismatch_max=jnp.abs(ratio).max(),
      entropy=each.sum(),
    )
