"""Attention: grouped-query with q/k norm, and multi-head latent (MLA).

Both have one call for training, prefill and decoding. What a position leaves
behind for later ones is its *entry* (GQA: keys and values; MLA: the
compressed latent and the rotated key, DeepSeek-V2, arXiv 2405.04434, section
2.1). Without a cache the entries of the call itself are attended to; with
one they are first written into it at `positions`.

Weights keep the orientation of Hugging Face, `[out, in]`, so that a
checkpoint tensor is a slice of ours and weight deltas need no transposition.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from swe17_jax.model.config import MoEConfig

Entries = dict[str, jax.Array]


def matrix(key: jax.Array, *shape: int) -> nnx.Param:
  """A weight `[..., out, in]` drawn from N(0, 1 / in), f32."""
  return nnx.Param(jax.random.normal(key, shape) * shape[-1] ** -0.5)


def linear(x: jax.Array, weight: nnx.Param) -> jax.Array:
  """Returns `x @ weight.T` for a weight `[out, in]`."""
  return jnp.einsum('...d,fd->...f', x, weight[...])


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, computed in f32."""

  def __init__(self, size: int, *, eps: float):
    self.weight = nnx.Param(jnp.ones(size))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    return self.weight[...] * y.astype(x.dtype)


def rope_frequencies(config: MoEConfig) -> jax.Array:
  """Returns the angle per position of each channel pair, f32 [H/2].

  With YaRN (arXiv 2309.00071, section 3.2) low frequencies are divided by the
  factor, high ones kept, with a linear ramp between them.
  """
  dim = config.rope_dim
  inverse = config.rope_theta ** (-jnp.arange(0, dim, 2) / dim)  # [H/2]
  yarn = config.rope_scaling
  if yarn is None:
    return inverse

  def channel(rotations):
    length = yarn.original_max_position_embeddings
    angle = math.log(length / (rotations * 2 * math.pi))
    return dim * angle / (2 * math.log(config.rope_theta))

  low = max(math.floor(channel(yarn.beta_fast)), 0)
  high = min(math.ceil(channel(yarn.beta_slow)), dim - 1)
  width = max(high - low, 0.001)  # avoids 0 / 0, as in the YaRN code
  ramp = jnp.clip((jnp.arange(dim // 2) - low) / width, 0, 1)
  return inverse * (1 - ramp) + inverse / yarn.factor * ramp


def rotate(x: jax.Array, positions: jax.Array, config: MoEConfig) -> jax.Array:
  """Applies rotary embeddings. x [B, T, N, H], positions int32 [B, T]."""
  angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
  yarn = config.rope_scaling
  factor = 1.0 if yarn is None else yarn.attention_factor()
  cos = (jnp.cos(angles) * factor)[:, :, None]  # [B, T, 1, H/2]
  sin = (jnp.sin(angles) * factor)[:, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return rotated.astype(x.dtype)


def write(
  cache: Entries | None, entries: Entries, positions: jax.Array
) -> Entries:
  """Returns the cache with the entries written at their positions."""
  if cache is None:
    return entries
  rows = jnp.arange(positions.shape[0])[:, None]
  return {
    name: cache[name].at[rows, positions].set(entries[name], mode='drop')
    for name in cache
  }


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, *, allowed: jax.Array, scale: float
) -> jax.Array:
  """Softmax attention in f32.

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H]; K divides N.
    v: [B, S, K, Hv].
    allowed: bool [B, T, S].
    scale: multiplies q·k.

  Returns:
    [B, T, N, Hv].
  """
  batch, length, heads, _ = q.shape
  kv_heads = k.shape[2]
  groups = heads // kv_heads
  # Queries that share a key head are rows of one matrix: [B, K, G * T, H].
  q = q.reshape(batch, length, kv_heads, groups, -1).transpose(0, 2, 3, 1, 4)
  q = q.reshape(batch, kv_heads, groups * length, -1)
  scores = jnp.einsum(
    'bkth,bksh->bkts',
    q,
    k.swapaxes(1, 2),
    preferred_element_type=jnp.float32,
  ).reshape(batch, kv_heads, groups, length, -1)
  scores = jnp.where(allowed[:, None, None], scores * scale, -jnp.inf)
  # A padding row allows nothing; its weights must be 0, not NaN.
  peak = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
  weights = jnp.exp(scores - jax.lax.stop_gradient(peak))
  weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
  weights = weights.reshape(batch, kv_heads, groups * length, -1)
  out = jnp.einsum(
    'bkts,bksh->bkth', weights.astype(v.dtype), v.swapaxes(1, 2)
  ).reshape(batch, kv_heads, groups, length, -1)
  return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, -1)


class GroupedQueryAttention(nnx.Module):
  """GQA with RMSNorm on every query and key head (Qwen3)."""

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
    hidden, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    self.config = config
    self.q_proj = matrix(rngs(), heads * head, hidden)
    self.k_proj = matrix(rngs(), kv_heads * head, hidden)
    self.v_proj = matrix(rngs(), kv_heads * head, hidden)
    self.o_proj = matrix(rngs(), hidden, heads * head)
    self.q_norm = RMSNorm(head, eps=config.rms_norm_eps)
    self.k_norm = RMSNorm(head, eps=config.rms_norm_eps)

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    allowed: jax.Array,
    cache: Entries | None,
  ) -> tuple[jax.Array, Entries]:
    """Returns the output [B, T, D] and the (written) entries."""
    shape = (*x.shape[:2], -1, self.config.head_dim)
    q = self.q_norm(linear(x, self.q_proj).reshape(shape))
    k = self.k_norm(linear(x, self.k_proj).reshape(shape))
    v = linear(x, self.v_proj).reshape(shape)
    k = rotate(k, positions, self.config)
    entries = write(cache, {'k': k, 'v': v}, positions)
    out = attend(
      rotate(q, positions, self.config),
      entries['k'],
      entries['v'],
      allowed=allowed,
      scale=self.config.softmax_scale,
    )
    return linear(out.reshape(*x.shape[:2], -1), self.o_proj), entries


class LatentAttention(nnx.Module):
  """MLA: keys and values are expanded from a cached latent."""

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    eps, value = config.rms_norm_eps, config.v_head_dim
    self.config = config
    if config.q_lora_rank is None:
      self.q_proj = matrix(rngs(), heads * (nope + rope), hidden)
    else:
      self.q_a_proj = matrix(rngs(), config.q_lora_rank, hidden)
      self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=eps)
      self.q_b_proj = matrix(rngs(), heads * (nope + rope), config.q_lora_rank)
    self.kv_a_proj_with_mqa = matrix(rngs(), config.kv_lora_rank + rope, hidden)
    self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=eps)
    self.kv_b_proj = matrix(rngs(), heads * (nope + value), config.kv_lora_rank)
    self.o_proj = matrix(rngs(), hidden, heads * value)

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    allowed: jax.Array,
    cache: Entries | None,
  ) -> tuple[jax.Array, Entries]:
    """Returns the output [B, T, D] and the (written) entries."""
    config, (batch, length) = self.config, x.shape[:2]
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    if config.q_lora_rank is None:
      q = linear(x, self.q_proj)
    else:
      q = linear(self.q_a_layernorm(linear(x, self.q_a_proj)), self.q_b_proj)
    q = q.reshape(batch, length, heads, -1)
    latent = linear(x, self.kv_a_proj_with_mqa)
    latent, k_rope = jnp.split(latent, [config.kv_lora_rank], -1)
    entries = {
      'latent': self.kv_a_layernorm(latent),
      'k_rope': self._rope(k_rope[:, :, None], positions)[:, :, 0],
    }
    entries = write(cache, entries, positions)
    kv = linear(entries['latent'], self.kv_b_proj)
    kv = kv.reshape(batch, kv.shape[1], heads, -1)  # [B, S, N, nope + Hv]
    k_rope = jnp.broadcast_to(
      entries['k_rope'][:, :, None], (*kv.shape[:3], config.qk_rope_head_dim)
    )
    q_rope = self._rope(q[..., nope:], positions)
    out = attend(
      jnp.concatenate([q[..., :nope], q_rope], -1),
      jnp.concatenate([kv[..., :nope], k_rope], -1),
      kv[..., nope:],
      allowed=allowed,
      scale=config.softmax_scale,
    )
    return linear(out.reshape(batch, length, -1), self.o_proj), entries

  def _rope(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    # DeepSeek stores the two channels of a pair side by side.
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    x = jnp.concatenate([pairs[..., 0], pairs[..., 1]], -1)
    return rotate(x, positions, self.config)
