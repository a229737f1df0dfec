"""The quickstart: a MoE of 0.9M parameters learns to repair small functions.

Command:   bash launch/local.sh train
Hardware:  2 CPU cores, 2 GiB of memory
Expect:    see the table in README.md
"""

import dataclasses

from swe17_jax.core.dispatch import DispatchConfig
from swe17_jax.engine.programs import EngineConfig
from swe17_jax.model.config import TINY, MoEConfig
from swe17_jax.optim.optimizer import OptimizerConfig
from swe17_jax.rollout.harness import HarnessConfig
from swe17_jax.rollout.worker import WorkerConfig
from swe17_jax.train.cold_start import ColdStartConfig
from swe17_jax.train.loop import TrainConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Everything that a run is made of."""

  model: MoEConfig
  cold_start: ColdStartConfig
  train: TrainConfig
  dispatch: DispatchConfig
  worker: WorkerConfig
  harness: HarnessConfig
  engine: EngineConfig

  def __post_init__(self):
    if self.dispatch.max_staleness < self.train.publish_every - 1:
      raise ValueError(
        f'dispatch.max_staleness={self.dispatch.max_staleness} is below '
        f'train.publish_every - 1 = {self.train.publish_every - 1}: no group '
        'could start between two published versions'
      )
    longest = self.harness.max_tokens
    for name, limit in (
      ('engine.max_tokens', self.engine.max_tokens),
      ('train.batch.row_tokens', self.train.batch.row_tokens),
      ('model.max_position_embeddings', self.model.max_position_embeddings),
    ):
      if longest > limit:
        raise ValueError(
          f'harness.max_tokens={longest} is above {name}={limit}'
        )
    if self.worker.temperature != self.train.temperature:
      raise ValueError(
        f'worker.temperature={self.worker.temperature} must equal '
        f'train.temperature={self.train.temperature}'
      )


CONFIG = RunConfig(
  model=TINY,
  cold_start=ColdStartConfig(
    steps=300,
    demonstrations=300,
    optimizer=OptimizerConfig(muon_lr=3e-3, adam_lr=3e-3, decay_steps=300),
  ),
  train=TrainConfig(
    steps=110,
    optimizer=OptimizerConfig(muon_lr=5e-4, adam_lr=3e-4),
  ),
  dispatch=DispatchConfig(groups_per_step=16, group_size=8, max_staleness=2),
  worker=WorkerConfig(),
  harness=HarnessConfig(),
  engine=EngineConfig(),
)
