"""What the tests of the embedded engine serve, and its replay.

What an engine says about a token is recomputed from the whole sequence with
`transformer.apply`, the way the trainer does it.
"""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from swe17_jax.engine import programs
from swe17_jax.engine.interface import Generation, SamplingParams
from swe17_jax.model import config as model_config
from swe17_jax.model import hf, transformer
from swe17_jax.rl import sampling_mask

SIZES = {
  'vocab_size': 64,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_experts': 4,
  'moe_intermediate_size': 16,
}
GQA = dataclasses.replace(
  model_config.TINY, **SIZES, num_attention_heads=2, head_dim=16
)
MLA = dataclasses.replace(
  model_config.TINY_MLA,
  **SIZES,
  **{'intermediate_size': 48, 'n_group': 2, 'topk_group': 1},
  **{'kv_lora_rank': 16, 'q_lora_rank': 24, 'v_head_dim': 16},
)
MAX_TOKENS = 48
CONFIG = programs.EngineConfig(
  slots=6,
  max_tokens=MAX_TOKENS,
  prefill_lengths=(12, 24, MAX_TOKENS),
  prefill_prompts=3,
  max_fed_tokens=6,
  max_mask_tokens=16,
)
# One slot and one prefill length: quick to compile.
SINGLE = dataclasses.replace(
  CONFIG, slots=1, prefill_lengths=(MAX_TOKENS,), prefill_prompts=1
)
SETTINGS = (
  SamplingParams(max_new_tokens=20, seed=1),
  SamplingParams(top_k=8, max_new_tokens=20, seed=2),
  SamplingParams(top_k=16, top_p=0.9, temperature=0.7, max_new_tokens=20),
  SamplingParams(top_k=1, max_new_tokens=5),
  SamplingParams(temperature=1.7, max_new_tokens=1, seed=3),
)


@functools.cache
def random_weights(model, seed: int, dtype='bfloat16'):
  """Returns random weights as a publisher has them."""
  params = transformer.init(model, jax.random.key(seed))
  kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  host = jax.tree.map(lambda x: np.asarray(x).astype(kind), params)
  return hf.views(host, model)


def compute_params(model, tensors):
  """Returns the parameters that the trainer computes with."""
  shapes = {name: x.shape for name, x in tensors.items()}
  host = hf.from_hf(tensors.__getitem__, model, shapes=shapes)
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), host)


def copied(tensors):
  return {name: np.array(x) for name, x in tensors.items()}


def make_prompt(seed: int, size: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 64, size).astype(np.int32)


async def generate_all(engine, requests) -> list[Generation]:
  return await asyncio.gather(
    *(engine.generate(p, sampling=s) for p, s in requests)
  )


def generate_one(engine, prompt, sampling) -> Generation:
  return asyncio.run(engine.generate(prompt, sampling=sampling))


@functools.cache
def scorer(model):
  """Returns a program of fixed shape for whole sequences."""

  @jax.jit
  def score(params, tokens, routed, mask_ids, mask_rows, temperature):
    out = transformer.apply(
      params,
      model,
      tokens[None],
      positions=jnp.arange(MAX_TOKENS)[None],
      segment_ids=jnp.ones((1, MAX_TOKENS), jnp.int32),
      routed_experts=routed[None],
    )
    logprobs = sampling_mask.masked_logprobs(
      transformer.logits(params, model, out.hidden)[0] / temperature,
      jnp.roll(tokens, -1),
      mask_ids=mask_ids,
      mask_rows=mask_rows,
    )
    return logprobs, out.routed_experts[0]

  return score


def replay(model, params, prompt, generation, temperature):
  """Returns logprobs [n] and experts [prompt + n - 1, L, A] of a sequence.

  The log-probabilities are computed with the recorded experts, the experts
  without. Padding stands behind the sequence, where attention never looks.
  """
  tokens = np.zeros(MAX_TOKENS, np.int32)
  sequence = np.concatenate([prompt, generation.token_ids])
  tokens[: sequence.size] = sequence
  shape = (MAX_TOKENS, model.moe_layers, model.num_experts_per_tok)
  own, routed = np.full((2, *shape), -1, np.int16)
  first, rows = prompt.size - 1, sequence.size - 1
  routed[:rows] = generation.routed_experts
  mask = generation.sampling_mask
  mask_ids = np.zeros(MAX_TOKENS * 16, np.int32)
  mask_rows = np.full(MAX_TOKENS * 16, MAX_TOKENS, np.int32)
  mask_ids[: mask.token_ids.size] = mask.token_ids
  mask_rows[: mask.token_ids.size] = np.repeat(
    np.arange(first, rows), mask.sizes()
  )
  score, rest = scorer(model), (mask_ids, mask_rows, temperature)
  logprobs, _ = score(params, tokens, routed, *rest)
  _, experts = score(params, tokens, own, *rest)
  return np.asarray(logprobs)[first:rows], np.asarray(experts)[:rows]


def assert_exact(model, params, prompt, generation, sampling):
  size = generation.token_ids.size
  assert generation.rollout_logprobs.shape == (size,)
  assert len(generation.sampling_mask) == size
  assert generation.routed_experts.shape == (
    prompt.size + size - 1,
    model.moe_layers,
    model.num_experts_per_tok,
  )
  assert generation.routed_experts.dtype == np.int16
  logprobs, routed = replay(
    model, params, prompt, generation, sampling.temperature
  )
  assert np.abs(logprobs - generation.rollout_logprobs).max() <= 1e-5
  np.testing.assert_array_equal(routed, generation.routed_experts)


def assert_same(a: Generation, b: Generation):
  np.testing.assert_array_equal(a.token_ids, b.token_ids)
  np.testing.assert_allclose(
    a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-5
  )
  np.testing.assert_array_equal(
    a.sampling_mask.offsets, b.sampling_mask.offsets
  )
  np.testing.assert_array_equal(a.weight_versions, b.weight_versions)
  assert a.finish_reason == b.finish_reason
