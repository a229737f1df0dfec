"""The compiled programs of the embedded engine, all of fixed shape.

One decode step for all slots, and one prefill per padded prompt length.
"""

import dataclasses

import jax
import jax.numpy as jnp

from swe17_jax.engine import sampler
from swe17_jax.model import transformer


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Sizes of the embedded engine."""

  slots: int = 64  # requests decoded together
  max_tokens: int = 320  # prompt and output of one request
  prefill_lengths: tuple[int, ...] = (96, 160, 320)  # padded prompt sizes
  prefill_prompts: int = 8  # distinct prompts per prefill
  max_fed_tokens: int = 64  # of a next turn, fed to the slot of the last
  max_mask_tokens: int = 64  # largest top_k, as SGLang's flag of that name

  def __post_init__(self):
    if sorted(self.prefill_lengths)[-1] < self.max_tokens:
      raise ValueError(
        f'the largest of {self.prefill_lengths=} must reach '
        f'{self.max_tokens=}, or some prompts would have no shape'
      )


def prefill(
  params, cache, tokens, lengths, source, target, controls, *, model, config
):
  """Runs prompts [P, T], copies their entries to slots, samples a token.

  Row i of `source` and `target` [slots] says which prompt goes to which slot;
  a target past the last slot goes nowhere.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  inside = (positions < lengths[:, None]).astype(jnp.int32)
  out = transformer.apply(
    params, model, tokens, positions=positions, segment_ids=inside
  )
  cache = jax.tree.map(
    lambda c, e: c.at[target, : e.shape[1]].set(e[source], mode='drop'),
    cache,
    out.cache,
  )
  last = out.hidden[jnp.arange(tokens.shape[0]), lengths - 1]  # [P, D]
  logits = transformer.logits(params, model, last)[source]
  sampled = sampler.sample(
    logits,
    lengths[source],
    controls,
    max_mask_tokens=config.max_mask_tokens,
  )
  return sampled, out.routed_experts, cache


def decode(params, cache, tokens, positions, controls, *, model, config):
  """One token for every slot: tokens and positions int32 [slots]."""
  out = transformer.apply(
    params,
    model,
    tokens[:, None],
    positions=positions[:, None],
    cache=cache,
  )
  logits = transformer.logits(params, model, out.hidden[:, 0])
  sampled = sampler.sample(
    logits,
    positions + 1,
    controls,
    max_mask_tokens=config.max_mask_tokens,
  )
  return sampled, out.routed_experts, out.cache
