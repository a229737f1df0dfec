"""The smallest ring: one model, trainer and shape of batch for many tests.

Nearly all the time of these tests would go into compiling. The trainer is
therefore made once per process, and every test that updates or probes uses
its shapes.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from swe17_jax.core import records
from swe17_jax.model import transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.optim.optimizer import OptimizerConfig
from swe17_jax.rl import batching, loss
from swe17_jax.train import loop
from swe17_jax.train import step as steps

MODEL = MoEConfig(
  vocab_size=64,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=16,
  num_experts=4,
  num_experts_per_tok=2,
  moe_intermediate_size=16,
  expert_dispatch='dense',
)
ROUTED = (2, 2)  # MoE layers, experts per token
TEMPERATURE = 0.8  # not 1, so that a forgotten division shows
BATCH = batching.BatchConfig(row_tokens=16, rows=4, min_mask_entries=256)
OPTIMIZER = OptimizerConfig(muon_lr=1e-2, adam_lr=1e-2, warmup_steps=1)
TRAIN = loop.TrainConfig(
  steps=4, temperature=TEMPERATURE, batch=BATCH, optimizer=OPTIMIZER
)


class _Trainer(steps.Trainer):
  """Begins on a device, as a restored state does: else all compiles twice."""

  def init(self, params):
    return jax.device_put(super().init(params), jax.devices()[0])


@functools.cache
def _compiled(model, function, keywords, optimizer, temperature):
  objective = functools.partial(function, **dict(keywords))
  return _Trainer(model, objective, optimizer, temperature=temperature)


def _shared(model, objective, optimizer, *, temperature):
  flat = functools.partial(objective)
  keywords = tuple(sorted(flat.keywords.items()))
  return _compiled(model, flat.func, keywords, optimizer, temperature)


def trainer() -> steps.Trainer:
  """Returns the compiled trainer of all tests in this process."""
  objective = functools.partial(
    loss.policy_gradient, truncation=TRAIN.truncation
  )
  return _shared(MODEL, objective, OPTIMIZER, temperature=TEMPERATURE)


def _draw(seed: int):
  """Random parameters from numpy: `init` would take seconds to compile."""
  shapes = jax.eval_shape(
    functools.partial(transformer.init, MODEL), jax.random.key(0)
  )
  rng = np.random.default_rng(seed)

  def one(path, leaf):
    noise = rng.normal(size=leaf.shape)
    if 'norm' in jax.tree_util.keystr(path):
      return (1 + 0.1 * noise).astype(np.float32)
    return (noise * leaf.shape[-1] ** -0.5).astype(np.float32)

  return jax.tree_util.tree_map_with_path(one, shapes)


def parameters(seed: int = 0) -> transformer.Params:
  """Returns fresh random parameters: an update donates them."""
  return jax.tree.map(jnp.array, _draw(seed))


def state(seed: int = 0) -> steps.TrainState:
  """Returns the trainer's state before its first step."""
  return trainer().init(parameters(seed))


def shared_trainers():
  """Returns a context in which equal trainers are one, compiled once."""
  return mock.patch.object(steps, 'Trainer', _shared)


def window(
  rng: np.random.Generator,
  length: int,
  *,
  version: int = 0,
  prompt: int | None = None,
) -> records.Window:
  """Returns random tokens, about half of them sampled under masks.

  Args:
    rng: of everything.
    length: tokens, at least 2.
    version: of every sampled token.
    prompt: tokens before the first sampled one; drawn if not given.
  """
  tokens = rng.integers(0, MODEL.vocab_size, length)
  prompt = int(rng.integers(1, length)) if prompt is None else prompt
  sampled = (np.arange(length) >= prompt) & (rng.random(length) < 0.7)
  sampled[prompt] = True
  spans = [[]] * length
  for t in np.flatnonzero(sampled):
    others = rng.permutation(MODEL.vocab_size)[: rng.integers(0, 5)]
    kept = rng.permutation(np.union1d(others, tokens[t]))
    spans[t] = [] if rng.random() < 0.3 else kept.tolist()
  routed = rng.random((length, *ROUTED[:1], MODEL.num_experts)).argsort(-1)
  routed = routed[..., : ROUTED[1]]
  routed[-1] = -1
  return records.Window(
    tokens=tokens.astype(np.int32),
    loss_mask=sampled,
    rollout_logprobs=np.where(sampled, -rng.random(length), 0.0).astype(
      np.float32
    ),
    weight_versions=np.where(sampled, version, -1).astype(np.int32),
    sampling_mask=records.SamplingMask.from_lists(spans),
    routed_experts=routed.astype(np.int16),
  )


def trajectory(
  *windows: records.Window, group_index: int = 0, reward: float = 0.0
) -> records.Trajectory:
  """Returns a finished trajectory without turns."""
  return records.Trajectory(
    task_id='task',
    group_index=group_index,
    windows=windows,
    turns=(),
    verdict=records.Verdict(bool(reward), int(reward), 1),
    reward=reward,
    finish='submit',
  )


def bits(tree) -> list[bytes]:
  """Returns what is compared where two trees must be equal bit for bit."""
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
