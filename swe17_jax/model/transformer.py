"""The decoder as pure functions: `init`, `apply` and `logits`.

Blocks are Flax NNX modules; the rest of the codebase sees nested dicts of
arrays. Equal layers are stacked on a leading axis and run under `scan`:

    embed_tokens  [V, D]
    dense_layers  {...: [first_k_dense_replace, ...]}    where there are some
    moe_layers    {...: [moe_layers, ...]}
    norm          {'weight': [D]}
    lm_head       [V, D]                                 unless tied

Example:
  params = init(TINY, jax.random.key(0))
  out = apply(params, TINY, tokens, positions=..., segment_ids=...)
  scores = logits(params, TINY, out.hidden)              # [B, T, V] f32
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from swe17_jax.model import attention, moe
from swe17_jax.model.config import MoEConfig

Params = dict
Cache = tuple[attention.Entries, ...]  # one per layer


class Outputs(NamedTuple):
  """What `apply` returns.

  Attributes:
    hidden: [B, T, D], normalised; `logits` maps it to the vocabulary.
    routed_experts: int16 [B, T, L, A], the experts used by every token.
    cache: entries of every layer, written (decode) or fresh (prefill).
  """

  hidden: jax.Array
  routed_experts: jax.Array
  cache: Cache


class Block(nnx.Module):
  """Attention and a feed-forward layer, each with a norm and a residual."""

  def __init__(self, config: MoEConfig, *, sparse: bool, rngs: nnx.Rngs):
    eps = config.rms_norm_eps
    attend = (
      attention.LatentAttention
      if config.uses_mla
      else attention.GroupedQueryAttention
    )
    self.input_layernorm = attention.RMSNorm(config.hidden_size, eps=eps)
    self.self_attn = attend(config, rngs=rngs)
    self.post_attention_layernorm = attention.RMSNorm(
      config.hidden_size, eps=eps
    )
    self.sparse = sparse
    if sparse:
      self.mlp = moe.MoE(config, rngs=rngs)
    else:
      self.mlp = moe.MLP(
        config.hidden_size, config.intermediate_size, rngs=rngs
      )

  def __call__(self, x, positions, allowed, cache, recorded):
    with jax.named_scope('attention'):
      out, entries = self.self_attn(
        self.input_layernorm(x), positions, allowed, cache
      )
      x = x + out
    with jax.named_scope('mlp'):
      y = self.post_attention_layernorm(x)
      if not self.sparse:
        return x + self.mlp(y), entries, None
      out, routed = self.mlp(y, recorded)
      return x + out, entries, routed


def _build(config: MoEConfig, sparse: bool, key: jax.Array) -> Block:
  return Block(config, sparse=sparse, rngs=nnx.Rngs(key))


@functools.cache
def _graph(config: MoEConfig, sparse: bool) -> nnx.GraphDef:
  key = jax.eval_shape(lambda: jax.random.key(0))
  block = nnx.eval_shape(functools.partial(_build, config, sparse), key)
  return nnx.split(block)[0]


def _stacks(config: MoEConfig) -> tuple[tuple[str, bool, int], ...]:
  """Returns (name, sparse, layers) of each stack of equal layers, in order."""
  stacks = (
    ('dense_layers', False, config.first_k_dense_replace),
    ('moe_layers', True, config.moe_layers),
  )
  return tuple(stack for stack in stacks if stack[2])


def init(config: MoEConfig, key: jax.Array) -> Params:
  """Returns random f32 parameters, the tree of the module docstring."""
  keys = jax.random.split(key, 4)

  def one(sparse, key):
    return nnx.to_pure_dict(nnx.split(_build(config, sparse, key))[1])

  # Unit variance: the residual stream starts as the token itself.
  shape = (config.vocab_size, config.hidden_size)
  params = {
    'embed_tokens': jax.random.normal(keys[0], shape),
    'norm': {'weight': jnp.ones(config.hidden_size)},
  }
  if not config.tie_word_embeddings:
    scale = config.hidden_size**-0.5
    params['lm_head'] = jax.random.normal(keys[1], shape) * scale
  for (name, sparse, layers), key in zip(
    _stacks(config), keys[2:], strict=False
  ):
    params[name] = jax.vmap(functools.partial(one, sparse))(
      jax.random.split(key, layers)
    )
  return params


def apply(
  params: Params,
  config: MoEConfig,
  tokens: jax.Array,
  *,
  positions: jax.Array,
  segment_ids: jax.Array | None = None,
  routed_experts: jax.Array | None = None,
  cache: Cache | None = None,
) -> Outputs:
  """Runs the decoder.

  Args:
    params: as from `init`, in the dtype to compute in.
    config: the model.
    tokens: int32 [B, T].
    positions: int32 [B, T], position of each token in its own sequence. With
      a cache also the row that it is written to; a position past the end of
      the cache writes nothing.
    segment_ids: int32 [B, T], which sequence of a packed row a token belongs
      to; 0 is padding. None with a cache.
    routed_experts: int16 [B, T, L, A] experts to replay (-1: not recorded).
    cache: entries [B, S, ...] of each layer to read and write, for decoding.

  Returns:
    `Outputs`.
  """
  if cache is None:
    # Packed sequences are contiguous: causal order is the order of the row.
    length = tokens.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones((length, length), bool))
    allowed = same & causal & (segment_ids > 0)[:, :, None]  # [B, T, S]
  else:
    size = jax.tree.leaves(cache[0])[0].shape[1]
    allowed = jnp.arange(size) <= positions[:, :, None]
  hidden = jnp.take(params['embed_tokens'], tokens, axis=0)  # [B, T, D]
  entries: list[attention.Entries] = []
  routed = jnp.zeros((*tokens.shape, 0, 0), jnp.int16)
  for name, sparse, layers in _stacks(config):
    run = _run_scanned if cache is None else _run_cached
    replay = None
    if sparse and routed_experts is not None:
      replay = jnp.moveaxis(routed_experts, 2, 0)  # [L, B, T, A]
    start = len(entries)
    hidden, new, layer_routed = run(
      _graph(config, sparse),
      params[name],
      hidden,
      (positions, allowed),
      cache and cache[start : start + layers],
      replay,
    )
    entries += new
    if sparse:
      routed = jnp.moveaxis(layer_routed, 0, 2)  # [B, T, L, A]
  norm = attention.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
  norm.weight[...] = params['norm']['weight']
  return Outputs(norm(hidden), routed, tuple(entries))


def _run_scanned(graph, stacked, hidden, where, cache, replay):
  """Runs stacked layers under `scan`: one compiled body for all."""
  del cache

  def body(hidden, layer):
    layer_params, layer_replay = layer
    block = nnx.merge(graph, nnx.State(layer_params))
    hidden, entries, routed = block(hidden, *where, None, layer_replay)
    return hidden, (entries, routed)

  hidden, (entries, routed) = jax.lax.scan(body, hidden, (stacked, replay))
  layers = jax.tree.leaves(entries)[0].shape[0]
  return (
    hidden,
    [jax.tree.map(lambda x: x[i], entries) for i in range(layers)],  # noqa: B023
    routed,
  )


def _run_cached(graph, stacked, hidden, where, cache, replay):
  """Runs layers one by one, so that each cache is updated in place."""
  entries, routed = [], []
  for i, layer_cache in enumerate(cache):
    layer_params = jax.tree.map(lambda x: x[i], stacked)  # noqa: B023
    block = nnx.merge(graph, nnx.State(layer_params))
    layer_replay = None if replay is None else replay[i]
    hidden, new, used = block(hidden, *where, layer_cache, layer_replay)
    entries.append(new)
    routed.append(used)
  return hidden, entries, None if routed[0] is None else jnp.stack(routed)


def empty_cache(
  params: Params, config: MoEConfig, *, batch: int, length: int
) -> Cache:
  """Returns zeroed cache entries [batch, length, ...] for every layer."""
  tokens = jnp.zeros((batch, length), jnp.int32)
  shapes = jax.eval_shape(
    lambda p, t: apply(p, config, t, positions=t, segment_ids=t).cache,
    params,
    tokens,
  )
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def logits(params: Params, config: MoEConfig, hidden: jax.Array) -> jax.Array:
  """Maps hidden states [..., D] to f32 logits [..., V]."""
  tied = config.tie_word_embeddings
  head = params['embed_tokens'] if tied else params['lm_head']
  return jnp.einsum(
    '...d,vd->...v', hidden, head, preferred_element_type=jnp.float32
  )
