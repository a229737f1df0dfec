"""Takes tasks, runs groups of trajectories, writes them as records.

Groups are numbered in the order of dispatch (`core/dispatch`). The number
decides the task and every random seed, so a group that was lost with its
worker is issued again and asks the same question. A finished group is one
object, written once; after a restart the worker goes on with the numbers that
have no object yet.

Held-out tasks are evaluated at version 0, every `eval_every` versions and at
the last one, one trajectory per task, at temperature 1 without top-k or top-p.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging

from swe17_jax.core import dispatch, records
from swe17_jax.core.storage import Store
from swe17_jax.engine.interface import Engine, SamplingParams
from swe17_jax.rollout import harness
from swe17_jax.rollout.chat import Chat
from swe17_jax.tasks.sandbox import Sandbox

VERSION_POLL_S = 0.02  # how often a paused worker looks at the engine
HELDOUT_SEED = 1 << 29  # apart from every training seed


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
  """How a worker samples and when it evaluates."""

  inflight_groups: int = 8  # groups running at once
  temperature: float = 1.0
  top_k: int = 32
  top_p: float = 0.98
  eval_every: int = 30  # versions

  def __post_init__(self):
    if self.inflight_groups < 1 or self.eval_every < 1:
      raise ValueError(
        f'inflight_groups={self.inflight_groups} and eval_every='
        f'{self.eval_every} must be >= 1'
      )


def task_of(
  group_index: int, tasks: Sequence[records.Task], *, seed: int
) -> records.Task:
  """Returns the task of a group: a fresh permutation of all in each epoch."""
  epoch, place = divmod(group_index, len(tasks))
  order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
  return tasks[order[place]]


class Worker:
  """Runs trajectories on one engine until the run's last version."""

  def __init__(
    self,
    config: WorkerConfig,
    *,
    dispatch_config: dispatch.DispatchConfig,
    harness_config: harness.HarnessConfig,
    engine: Engine,
    chat: Chat,
    sandbox: Sandbox,
    store: Store,
    tasks: Sequence[records.Task],
    steps: int,
    seed: int,
  ):
    self._config, self._dispatch = config, dispatch_config
    self._harness = harness_config
    self._engine, self._chat, self._sandbox = engine, chat, sandbox
    self._store, self._steps, self._seed = store, steps, seed
    self._train = [task for task in tasks if task.split == 'train']
    self._heldout = [task for task in tasks if task.split == 'heldout']

  async def run(self) -> None:
    """Issues every group of the run, evaluating as versions pass.

    Raises:
      ExceptionGroup: what a group or an evaluation raised. The rest is
        cancelled: the trainer waits for the lost group, so no version that
        others wait for would come.
    """
    await self._wait_for_version(0)
    if not self._engine.weight_version:
      await self._evaluate(0)
    slots = asyncio.Semaphore(self._config.inflight_groups)
    done = set(self._store.list(dispatch.TRAIN_PREFIX))
    async with asyncio.TaskGroup() as running:
      running.create_task(self._evaluate_versions())
      for index in range(self._steps * self._dispatch.groups_per_step):
        if dispatch.train_name(index) in done:
          continue
        await slots.acquire()
        await self._wait_to_start(index)
        group = running.create_task(self._group(index))
        group.add_done_callback(lambda _: slots.release())

  async def _wait_for_version(self, version: int) -> None:
    while (
      self._engine.weight_version is None
      or self._engine.weight_version < version
    ):
      await asyncio.sleep(VERSION_POLL_S)

  async def _wait_to_start(self, index: int) -> None:
    while not self._dispatch.may_start(
      index, weight_version=self._engine.weight_version
    ):
      await asyncio.sleep(VERSION_POLL_S)

  async def _group(self, index: int) -> None:
    config, size = self._config, self._dispatch.group_size
    task = task_of(index, self._train, seed=self._seed)
    sampling = SamplingParams(
      temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
    )
    trajectories = await asyncio.gather(
      *(
        self._trajectory(task, sampling, index, seed=index * size + i)
        for i in range(size)
      )
    )
    await asyncio.to_thread(
      self._store.write_once,
      dispatch.train_name(index),
      records.group_to_bytes(trajectories),
    )

  async def _evaluate_versions(self) -> None:
    every = self._config.eval_every
    for version in range(every, self._steps, every):
      await self._wait_for_version(version)
      await self._evaluate(version)
    await self._wait_for_version(self._steps)
    await self._evaluate(self._steps)

  async def _evaluate(self, version: int) -> None:
    name = dispatch.heldout_name(version)
    if self._store.exists(name):
      return
    trajectories = await asyncio.gather(
      *(
        self._trajectory(task, SamplingParams(), i, seed=HELDOUT_SEED + i)
        for i, task in enumerate(self._heldout)
      )
    )
    solved = np.mean([trajectory.reward for trajectory in trajectories])
    logging.info('version %d solves %.3f of held-out', version, solved)
    await asyncio.to_thread(
      self._store.write_once, name, records.group_to_bytes(trajectories)
    )

  async def _trajectory(self, task, sampling, index, *, seed):
    return await harness.run(
      task,
      engine=self._engine,
      chat=self._chat,
      sandbox=self._sandbox,
      sampling=dataclasses.replace(sampling, seed=seed + self._seed * 7919),
      config=self._harness,
      group_index=index,
    )
