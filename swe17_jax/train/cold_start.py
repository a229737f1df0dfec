"""Cold start: imitation of a few demonstrations, before any reward.

The same microbatches and the same update as in reinforcement learning, with
`loss.behaviour_cloning` in place of the policy gradient. A model that starts
from nothing must first learn to read, so the tokens of the prompt are
predicted too, at a smaller weight.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from swe17_jax.core import records
from swe17_jax.model import transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.optim.optimizer import OptimizerConfig
from swe17_jax.rl import batching, loss
from swe17_jax.train import checkpoint
from swe17_jax.train import step as steps

FILL = 0.9  # of a microbatch's positions that windows are drawn for


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
  """How long to imitate, and what."""

  steps: int = 300
  demonstrations: int = 300  # training tasks with a demonstrator's run
  prompt_weight: float = 0.5  # of a prompt token, a sampled one has 1
  save_every: int = 100  # steps
  batch: batching.BatchConfig = batching.BatchConfig()
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    if min(self.steps, self.demonstrations, self.save_every) < 1:
      raise ValueError(f'{self} must have positive counts')


def run(
  config: ColdStartConfig,
  *,
  model: MoEConfig,
  windows: Sequence[records.Window],
  workdir: pathlib.Path,
  seed: int,
  on_step: Callable[[int, float], None],
) -> transformer.Params:
  """Trains from random parameters; resumes from the newest checkpoint.

  Args:
    windows: of the demonstrations.
    workdir: of checkpoints.
    seed: of the parameters and of the order of demonstrations.
    on_step: called with each step's number and loss.

  Returns:
    The parameters as engines get them.
  """
  trainer = steps.Trainer(
    model, loss.behaviour_cloning, config.optimizer, temperature=1.0
  )

  def initial():
    return trainer.init(transformer.init(model, jax.random.key(seed)))

  folder = workdir / 'checkpoints'
  state, before_s = checkpoint.restore(folder, jax.eval_shape(initial)) or (
    initial(),
    0.0,
  )
  started = time.monotonic()
  for step in range(int(state.step), config.steps):
    batch = draw(windows, config, seed=seed, step=step)
    state, sums, _ = trainer.update(state, [batch])
    if (step + 1) % config.save_every == 0:
      wall_s = before_s + time.monotonic() - started
      checkpoint.save(folder, state, wall_s=wall_s)
    on_step(step, float(sums.loss))
  return jax.tree.map(np.asarray, trainer.published(state.params))


def draw(
  windows: Sequence[records.Window],
  config: ColdStartConfig,
  *,
  seed: int,
  step: int,
) -> batching.Microbatch:
  """Returns a random microbatch in which every token is predicted."""
  order = np.random.default_rng([seed, step]).permutation(len(windows))
  budget = FILL * config.batch.rows * config.batch.row_tokens
  chosen: list[records.Window] = []
  for index in order:
    budget -= windows[index].tokens.size
    if budget < 0:
      break
    chosen.append(windows[index])
  batch = batching.pack(chosen, [1.0] * len(chosen), config.batch)[0]
  inside = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
  predicts = np.pad(inside, ((0, 0), (0, 1))) & (batch.segment_ids > 0)
  credit = np.where(batch.loss_mask, 1.0, config.prompt_weight)
  return batch._replace(
    loss_mask=predicts, advantages=credit.astype(np.float32)
  )
