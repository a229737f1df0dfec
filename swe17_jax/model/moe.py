"""Mixture of experts: router, dispatch, combine, and routing replay.

Routing replay (R3, arXiv 2510.11370): the trainer uses the experts that the
engine recorded, and recomputes the gates of those experts from its own
router, `g_i = I_i exp(s_i) / sum_j I_j exp(s_j)`, so the router keeps its
gradient. A token whose recorded experts are -1 falls back to its own choice.

Two ways to compute the experts, chosen by `expert_dispatch`, equal up to
rounding: 'dense' runs every expert on every token, two plain matrix products
that beat any gather at a few experts on a CPU; 'ragged' sorts the tokens by
expert and multiplies each by its own expert alone (`jax.lax.ragged_dot`, a
grouped matrix product on TPUs). Both are dropless.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from swe17_jax.model import attention
from swe17_jax.model.config import MoEConfig


class MLP(nnx.Module):
  """The gated feed-forward layer, `down(silu(gate(x)) * up(x))`."""

  def __init__(self, hidden: int, width: int, *, rngs: nnx.Rngs):
    self.gate_proj = attention.matrix(rngs(), width, hidden)
    self.up_proj = attention.matrix(rngs(), width, hidden)
    self.down_proj = attention.matrix(rngs(), hidden, width)

  def __call__(self, x: jax.Array) -> jax.Array:
    gate = jax.nn.silu(attention.linear(x, self.gate_proj))
    up = attention.linear(x, self.up_proj)
    return attention.linear(gate * up, self.down_proj)


class Router(nnx.Module):
  """Scores the experts of each token and chooses A of them, in f32."""

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.weight = attention.matrix(
      rngs(), config.num_experts, config.hidden_size
    )
    if config.scoring_func == 'sigmoid':
      self.e_score_correction_bias = nnx.Param(jnp.zeros(config.num_experts))

  def __call__(
    self, x: jax.Array, recorded: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns experts int32 [T, A] and gates f32 [T, A].

    Args:
      x: [T, D].
      recorded: int [T, A] experts to replay, -1 where there are none.
    """
    config = self.config
    scores = attention.linear(
      x.astype(jnp.float32),
      self.weight.astype(jnp.float32),
    )  # [T, E] f32
    if config.scoring_func == 'sigmoid':
      scores = jax.nn.sigmoid(scores)
      bias = jax.lax.stop_gradient(self.e_score_correction_bias[...])
      experts = limited_top_k(scores + bias, config)
    else:
      scores = jax.nn.softmax(scores, -1)
      experts = jax.lax.top_k(scores, config.num_experts_per_tok)[1]
    if recorded is not None:
      experts = jnp.where(recorded >= 0, recorded.astype(jnp.int32), experts)
    gates = jnp.take_along_axis(scores, experts, -1)
    if config.norm_topk_prob:
      gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)  # DeepSeek-V3
    return experts, gates * config.routed_scaling_factor


def limited_top_k(scores: jax.Array, config: MoEConfig) -> jax.Array:
  """Chooses A experts out of the `topk_group` best groups, int32 [T, A].

  A group counts as good as the sum of its two best experts (DeepSeek-V3,
  arXiv 2412.19437, section 2.1.2).
  """
  grouped = scores.reshape(scores.shape[0], config.n_group, -1)
  best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
  chosen = jax.lax.top_k(best, config.topk_group)[1]  # [T, topk_group]
  kept = jax.nn.one_hot(chosen, config.n_group, dtype=bool).any(-2)
  grouped = jnp.where(kept[..., None], grouped, -jnp.inf)
  flat = grouped.reshape(scores.shape)
  return jax.lax.top_k(flat, config.num_experts_per_tok)[1]


class Experts(nnx.Module):
  """E gated feed-forward layers, each used by the tokens routed to it."""

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
    count, hidden = config.num_experts, config.hidden_size
    width = config.moe_intermediate_size
    self.dispatch = config.expert_dispatch
    self.gate_proj = attention.matrix(rngs(), count, width, hidden)
    self.up_proj = attention.matrix(rngs(), count, width, hidden)
    self.down_proj = attention.matrix(rngs(), count, hidden, width)

  def __call__(
    self, x: jax.Array, experts: jax.Array, gates: jax.Array
  ) -> jax.Array:
    """Returns the gated sum [T, D] over experts [T, A] with gates [T, A]."""
    if self.dispatch == 'dense':
      return self._dense(x, experts, gates)
    return self._ragged(x, experts, gates)

  def _dense(self, x, experts, gates):
    count, width, _ = self.gate_proj.shape
    merged = (count * width, x.shape[-1])  # [E * F, D]
    gate = x @ self.gate_proj[...].reshape(merged).T
    up = x @ self.up_proj[...].reshape(merged).T
    chosen = jax.nn.one_hot(experts, count, dtype=gates.dtype)
    weight = jnp.einsum('tae,ta->te', chosen, gates).astype(x.dtype)
    hidden = (jax.nn.silu(gate) * up).reshape(-1, count, width)  # [T, E, F]
    hidden = (hidden * weight[..., None]).reshape(gate.shape)
    return hidden @ self.down_proj[...].swapaxes(1, 2).reshape(merged)

  def _ragged(self, x, experts, gates):
    flat = experts.reshape(-1)  # [T * A]
    order = jnp.argsort(flat, stable=True)
    count = self.gate_proj.shape[0]
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    rows = x[order // experts.shape[1]]  # [T * A, D], sorted by expert

    def grouped(rows, weight):
      return jax.lax.ragged_dot(rows, weight[...].swapaxes(1, 2), sizes)

    gate = jax.nn.silu(grouped(rows, self.gate_proj))
    out = grouped(gate * grouped(rows, self.up_proj), self.down_proj)
    # Un-permuted with unique indices and summed over A: no scatter-add.
    out = out[jnp.argsort(order)].reshape(*experts.shape, -1)  # [T, A, D]
    return jnp.einsum('tad,ta->td', out, gates.astype(x.dtype))


class MoE(nnx.Module):
  """Router and experts, plus the shared experts of DeepSeek-V3."""

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
    self.gate = Router(config, rngs=rngs)
    self.experts = Experts(config, rngs=rngs)
    if config.n_shared_experts:
      width = config.moe_intermediate_size * config.n_shared_experts
      self.shared_experts = MLP(config.hidden_size, width, rngs=rngs)
    self.shared = bool(config.n_shared_experts)

  def __call__(
    self, x: jax.Array, recorded: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, D] and the experts used, int16 [B, T, A]."""
    flat = x.reshape(-1, x.shape[-1])
    if recorded is not None:
      recorded = recorded.reshape(flat.shape[0], -1)
    experts, gates = self.gate(flat, recorded)
    out = self.experts(flat, experts, gates)
    if self.shared:
      out = out + self.shared_experts(flat)
    routed = experts.reshape(*x.shape[:-1], -1).astype(jnp.int16)
    return out.reshape(x.shape), routed
