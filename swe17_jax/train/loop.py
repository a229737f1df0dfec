"""THE MAIN LOOP: take, pack, step, save, publish, log.

`run` touches nothing outside its arguments. Version `v` is the weights after
`v` steps. A version is published only after its checkpoint is on disk, so a
trainer that comes back never finds engines ahead of it.
"""

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from swe17_jax.core import metrics, records, storage
from swe17_jax.model import hf, transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.optim.optimizer import OptimizerConfig
from swe17_jax.rl import advantage, batching, loss
from swe17_jax.train import checkpoint, source
from swe17_jax.train import step as steps
from swe17_jax.weights import publisher as publishers


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The trainer's side of a run."""

  steps: int = 120
  publish_every: int = 1  # K, steps from one published version to the next
  base_every: int = 50  # versions from one full base to the next
  truncation: float = 2.0  # C of truncated importance sampling
  temperature: float = 1.0  # of the rollouts
  group_timeout_s: float = 300.0
  batch: batching.BatchConfig = batching.BatchConfig()
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    if min(self.steps, self.publish_every, self.base_every) < 1:
      raise ValueError(
        f'steps={self.steps}, publish_every={self.publish_every} and '
        f'base_every={self.base_every} must be >= 1'
      )


def run(
  config: TrainConfig,
  *,
  model: MoEConfig,
  initial: Callable[[], Mapping],
  groups: source.GroupSource,
  store: storage.Store,
  workdir: pathlib.Path,
  on_step: Callable[[int, Mapping[str, float]], None],
  clock: Callable[[], float] = time.monotonic,
) -> steps.TrainState:
  """Trains until `config.steps`, from the newest checkpoint if there is one.

  Args:
    initial: returns the f32 parameters to start from.
    groups: where trajectories come from.
    store: where weights go.
    workdir: of checkpoints and metrics.
    on_step: called with each step's number and metrics.
    clock: seconds.

  Raises:
    source.Stopped: the source was told to stop; every finished step is saved.
    FloatingPointError: the loss or a gradient is not finite.
  """
  objective = functools.partial(
    loss.policy_gradient, truncation=config.truncation
  )
  trainer = steps.Trainer(
    model, objective, config.optimizer, temperature=config.temperature
  )
  folder = workdir / 'checkpoints'
  like = jax.eval_shape(
    lambda: trainer.init(transformer.init(model, jax.random.key(0)))
  )
  state, before_s = checkpoint.restore(folder, like) or (
    trainer.init(initial()),
    0.0,
  )
  publisher = publishers.Publisher(store, base_every=config.base_every)
  weights = trainer.published(state.params)
  first = int(state.step)
  history = collections.OrderedDict({first: weights})
  if not publisher.resume(first, host(weights, model)):
    publisher.publish(first, host(weights, model))
  started = begun = clock()
  with metrics.MetricsWriter(workdir) as writer:
    writer.truncate(first)
    evaluated = last_evaluated(workdir)
    for step in range(first, config.steps):
      asked = clock()
      taken = groups.take(step)
      waited = clock() - asked
      batches, row = pack(taken, config.batch, step=step)
      row |= probe(trainer, history, taken, config.batch)
      if batches:
        state, sums, norm = trainer.update(state, batches)
        row |= diagnostics(sums, norm)
      else:  # every group agrees: nothing to learn, but the version counts
        state = state._replace(step=state.step + 1)
      wall_s = before_s + clock() - started
      row |= timing(row['rollout/tokens'], waited, clock() - begun, wall_s)
      begun = clock()
      # The row comes first: no checkpoint is ahead of the metrics.
      writer.write(step, row)
      checkpoint.save(folder, state, wall_s=wall_s)
      weights = trainer.published(state.params)
      if (step + 1) % config.publish_every == 0 or step + 1 == config.steps:
        published = publisher.publish(step + 1, host(weights, model))
        sizes = {
          'weights/delta_bytes': published.bytes,
          'weights/changed_fraction': published.changed_fraction,
        }
        writer.write(step, sizes)
        row |= sizes
        history[step + 1] = weights
        while len(history) > groups.max_staleness + 1:
          history.popitem(last=False)
      for version, rate in groups.heldout(after=evaluated).items():
        writer.write(version, {'heldout/reward': rate})
        row['heldout/reward'], evaluated = rate, version
      on_step(step, row)
  return state


def last_evaluated(workdir: pathlib.Path) -> int:
  """Returns the newest version with a recorded solve rate; -1 for none."""
  rows = metrics.read(workdir / 'metrics.jsonl')
  return max((r['step'] for r in rows if 'heldout/reward' in r), default=-1)


def timing(
  tokens: float, wait_s: float, step_s: float, wall_s: float
) -> dict[str, float]:
  """Returns the metrics of a step's time.

  Args:
    tokens: of all groups of the step.
    wait_s: spent waiting for them.
    step_s: since the last step's row, its checkpoint and version included.
    wall_s: of training so far, over all restarts.
  """
  return {
    'train/wait_s': wait_s,
    'train/step_s': step_s,
    'train/tokens_per_s': tokens / step_s,
    'train/wall_s': wall_s,
  }


def host(weights, model: MoEConfig) -> dict[str, np.ndarray]:
  """Returns the published weights as named host arrays."""
  return hf.views(jax.tree.map(np.asarray, weights), model)


def pack(
  groups: Sequence[Sequence[records.Trajectory]],
  config: batching.BatchConfig,
  *,
  step: int,
) -> tuple[list[batching.Microbatch], dict[str, float]]:
  """Turns groups into microbatches and describes them.

  Groups without variance have no gradient; they are counted, not computed.
  """
  windows, credits, informative = [], [], 0
  for group in groups:
    values = advantage.group_advantages([t.reward for t in group])
    if not values.any():
      continue
    informative += 1
    for trajectory, value in zip(group, values, strict=True):
      windows += trajectory.windows
      credits += [value] * len(trajectory.windows)
  everything = [t for group in groups for t in group]
  ages = np.concatenate(
    [
      step - window.weight_versions[window.loss_mask]
      for trajectory in everything
      for window in trajectory.windows
    ]
  )
  tokens = sum(w.tokens.size for t in everything for w in t.windows)
  return batching.pack(windows, credits, config), {
    'train/reward': float(np.mean([t.reward for t in everything])),
    'train/informative_groups': informative / len(groups),
    'train/staleness': float(ages.mean()),
    'train/staleness_max': float(ages.max()),
    'rollout/newest_version': float(step - ages.min()),
    'rollout/tokens': float(tokens),
    'rollout/sampled_tokens': ages.size / len(everything),
    'rollout/turns': float(np.mean([len(t.turns) for t in everything])),
  }


def probe(
  trainer: steps.Trainer,
  history: Mapping[int, Mapping],
  groups: Sequence[Sequence[records.Trajectory]],
  config: batching.BatchConfig,
) -> dict[str, float]:
  """Compares engine and trainer under equal weights, on one microbatch.

  Takes trajectories of all groups in turn, uninformative ones too, whose
  first token's version is the most frequent one that is still in memory.
  After a version seam a token's context was computed by older weights (the
  KV cache stays); what it differs by is staleness, so only tokens up to the
  first seam of their window count.
  """
  chosen = collections.defaultdict(list)
  for column in zip(*groups, strict=True):
    for trajectory in column:
      for window in trajectory.windows:
        versions = window.weight_versions[window.loss_mask]
        if versions.size and (version := int(versions[0])) in history:
          chosen[version].append(before_seam(window))
  if not chosen:
    return {}  # after a restart, the first steps' versions are gone
  version = max(chosen, key=lambda v: (len(chosen[v]), v))
  windows, budget = [], config.rows * config.row_tokens
  for window in chosen[version]:
    budget -= window.tokens.size
    if budget < 0:
      break
    windows.append(window)
  batch = batching.pack(windows, [0.0] * len(windows), config)[0]
  sums = jax.device_get(trainer.probe(history[version], batch))
  return {
    'train/mismatch_kl': float(sums.mismatch_kl / sums.tokens),
    'train/mismatch_max': float(sums.mismatch_max),
    'train/entropy': float(sums.entropy / sums.tokens),
  }


def before_seam(window: records.Window) -> records.Window:
  """Returns the window cut where its second weight_version begins."""
  sampled = np.flatnonzero(window.loss_mask)
  versions = window.weight_versions[sampled]
  later = sampled[versions != versions[0]]
  return window if not later.size else window.head(int(later[0]))


def diagnostics(sums: loss.Sums, norm: jax.Array) -> dict[str, float]:
  """Returns the metrics of an update.

  Raises:
    FloatingPointError: the loss or the gradient is not finite.
  """
  sums, norm = jax.device_get((sums, norm))
  if not (np.isfinite(sums.loss) and np.isfinite(norm)):
    raise FloatingPointError(
      f'loss {sums.loss} or gradient norm {norm} is not finite; the last '
      'checkpoint is good: lower the learning rate and start again'
    )
  return {
    'train/offpolicy_kl': float(sums.off_policy_kl / sums.tokens),
    'train/truncated_fraction': float(sums.truncated / sums.tokens),
    'train/singleton_fraction': float(sums.singletons / sums.tokens),
    'train/grad_norm': float(norm),
  }
