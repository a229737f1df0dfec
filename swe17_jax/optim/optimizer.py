"""Which parameter gets which rule, clipping and schedule.

Muon for the weight matrices of attention and experts; AdamW for embeddings,
head, norms and the router; nothing for the router's correction bias, which
no gradient reaches (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

import dataclasses

import jax
import optax

from swe17_jax.optim import muon


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Learning rates are per step, reached after a linear warm-up."""

  muon_lr: float = 1e-3
  adam_lr: float = 1e-3
  weight_decay: float = 0.0  # decoupled, times the learning rate
  warmup_steps: int = 5
  decay_steps: int = 0  # cosine to a tenth after so many steps; 0 = constant
  max_grad_norm: float = 1.0  # global norm
  momentum: float = 0.95  # Muon
  b1: float = 0.9  # AdamW
  b2: float = 0.95

  def __post_init__(self):
    if min(self.muon_lr, self.adam_lr, self.max_grad_norm) <= 0:
      raise ValueError(f'{self} must have positive rates and norm')


def rule(path: tuple[str, ...]) -> str:
  """Returns 'muon', 'adamw' or 'frozen' for a parameter's path."""
  leaf = path[-1]
  if leaf == 'e_score_correction_bias':
    return 'frozen'
  return 'muon' if leaf.endswith(('_proj', '_with_mqa')) else 'adamw'


def _labels(params):
  return jax.tree_util.tree_map_with_path(
    lambda path, _: rule(tuple(key.key for key in path)), params
  )


def _schedule(rate: float, config: OptimizerConfig) -> optax.Schedule:
  if not config.decay_steps:
    return optax.linear_schedule(
      rate / (config.warmup_steps + 1), rate, config.warmup_steps
    )
  return optax.warmup_cosine_decay_schedule(
    rate / (config.warmup_steps + 1),
    rate,
    config.warmup_steps,
    config.decay_steps,
    rate / 10,
  )


def build(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns the transformation that turns gradients into updates."""
  decay = optax.add_decayed_weights(config.weight_decay)
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.partition(
      {
        'muon': optax.chain(
          muon.scale_by_muon(momentum=config.momentum),
          decay,
          optax.scale_by_learning_rate(_schedule(config.muon_lr, config)),
        ),
        'adamw': optax.chain(
          optax.scale_by_adam(b1=config.b1, b2=config.b2),
          decay,
          optax.scale_by_learning_rate(_schedule(config.adam_lr, config)),
        ),
        'frozen': optax.set_to_zero(),
      },
      _labels,
    ),
  )
