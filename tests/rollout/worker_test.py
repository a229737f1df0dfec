"""The worker's bookkeeping, with trajectories that a stub makes up."""

import asyncio
import dataclasses
from unittest import mock

import numpy as np
from absl.testing import absltest

from swe17_jax.core import dispatch, records, storage
from swe17_jax.engine.interface import EngineError
from swe17_jax.rollout import worker

GROUPS, SIZE, STALENESS, STEPS, EVERY = 3, 2, 1, 7, 3
TIMEOUT_S = 30  # of what would hang if it were wrong
CONFIG = worker.WorkerConfig(
  inflight_groups=4, temperature=0.8, top_k=9, top_p=0.7, eval_every=EVERY
)


def _task(name: str, split: str) -> records.Task:
  calls = (records.Call('[1]', '2'),)
  return records.Task(name, split, 'Fix.', {}, 'f', calls, calls)


TASKS = [_task(f'train/{i}', 'train') for i in range(5)]
TASKS += [_task(f'heldout/{i}', 'heldout') for i in range(4)]


def _trajectory(task, group_index, version) -> records.Trajectory:
  window = records.Window(
    tokens=np.array([1, 2], np.int32),
    loss_mask=np.array([False, True]),
    rollout_logprobs=np.array([0, -1], np.float32),
    weight_versions=np.array([-1, version], np.int32),
    sampling_mask=records.SamplingMask.empty(2),
    routed_experts=np.zeros((2, 1, 1), np.int16),
  )
  return records.Trajectory(
    task_id=task.task_id,
    group_index=group_index,
    windows=(window,),
    turns=(records.Turn(0, 1, 2, 'submit', 0.0),),
    verdict=records.Verdict(True, 1, 1),
    reward=1.0,
    finish='submit',
  )


@dataclasses.dataclass(frozen=True)
class Started:
  """A trajectory that the worker asked for."""

  task_id: str
  index: int  # of its group; of the task in an evaluation
  seed: int
  version: int  # of the engine when it started
  sampling: tuple  # temperature, top_k, top_p


class Stage:
  """Engine, trainer and harness of one worker, seen from outside."""

  def __init__(self, store, *, version=0):
    self.store = store
    self.weight_version = version
    self.started: list[Started] = []
    self.busiest = 0  # most training groups at once
    self.fail = lambda _: None  # raises to lose a trajectory
    self._running: list[int] = []

  async def harness(self, task, *, engine, sampling, group_index, **rest):
    """Stands for `harness.run`."""
    assert engine is self and set(rest) == {'chat', 'sandbox', 'config'}
    kind = (sampling.temperature, sampling.top_k, sampling.top_p)
    run = Started(
      task.task_id, group_index, sampling.seed, self.weight_version, kind
    )
    self.started.append(run)
    version = self.weight_version
    if task.split == 'train':
      self._running.append(group_index)
      self.busiest = max(self.busiest, len(set(self._running)))
    # Later groups are quicker than earlier ones.
    for _ in range(6 - group_index % 6):
      await asyncio.sleep(0.001)
    self.fail(run)
    if task.split == 'train':
      self._running.remove(group_index)
    return _trajectory(task, group_index, version)

  async def train(self):
    """Stands for the trainer: a version when all its groups are there."""
    for step in range(self.weight_version, STEPS):
      wanted = {
        dispatch.train_name(index)
        for index in range(step * GROUPS, (step + 1) * GROUPS)
      }
      while not wanted <= set(self.store.list(dispatch.TRAIN_PREFIX)):
        await asyncio.sleep(0.001)
      # Evaluations of a version are done under that version here.
      while step in (0, EVERY, 2 * EVERY) and not self.store.exists(
        dispatch.heldout_name(step)
      ):
        await asyncio.sleep(0.001)
      self.weight_version = step + 1

  def run(self, *, seed=0, timeout_s=TIMEOUT_S):
    """Runs a worker to its end beside the trainer."""

    async def everything():
      training = asyncio.create_task(self.train())
      one = worker.Worker(
        CONFIG,
        dispatch_config=dispatch.DispatchConfig(GROUPS, SIZE, STALENESS),
        harness_config=None,
        engine=self,
        chat=None,
        sandbox=None,
        store=self.store,
        tasks=TASKS,
        steps=STEPS,
        seed=seed,
      )
      try:
        await asyncio.wait_for(one.run(), timeout_s)
      finally:
        training.cancel()

    with mock.patch.object(worker.harness, 'run', self.harness):
      asyncio.run(everything())

  def training(self) -> list[Started]:
    """Returns the training trajectories, in the order of their start."""
    return [run for run in self.started if run.task_id.startswith('train')]


def _spots(runs):
  """Returns what must not depend on when a group runs."""
  return {(run.index, run.task_id, run.seed) for run in runs}


class RunTest(absltest.TestCase):
  def test_every_group_once_in_order_and_in_time(self):
    stage = Stage(storage.MemoryStore())
    stage.run()
    runs = stage.training()
    order = [run.index for run in runs][::SIZE]
    self.assertEqual(order, list(range(GROUPS * STEPS)))
    self.assertLen(runs, GROUPS * STEPS * SIZE)
    for run in runs:
      self.assertLessEqual(run.index // GROUPS - run.version, STALENESS)
    # The bound is used: groups do run ahead of the version that is served.
    self.assertEqual(
      max(run.index // GROUPS - run.version for run in runs), STALENESS
    )
    self.assertEqual(stage.busiest, CONFIG.inflight_groups)
    seeds = {run.seed for run in runs}
    self.assertLen(seeds, len(runs))
    self.assertEmpty(seeds & {r.seed for r in stage.started if r not in runs})
    for index in range(GROUPS * STEPS):
      group = records.group_from_bytes(
        stage.store.read(dispatch.train_name(index))
      )
      self.assertEqual([t.group_index for t in group], [index] * SIZE)
    self.assertEqual({run.sampling for run in runs}, {(0.8, 9, 0.7)})
    # Evaluations are at temperature 1, without truncation.
    rest = [run for run in stage.started if run not in runs]
    self.assertEqual({run.sampling for run in rest}, {(1.0, 0, 1.0)})

  def test_evaluations(self):
    stage = Stage(storage.MemoryStore())
    stage.run()
    self.assertEqual(
      stage.store.list(dispatch.HELDOUT_PREFIX),
      [dispatch.heldout_name(version) for version in (0, 3, 6, 7)],
    )
    runs = [run for run in stage.started if 'heldout' in run.task_id]
    for version in (0, 3, 6, 7):
      found = records.group_from_bytes(
        stage.store.read(dispatch.heldout_name(version))
      )
      self.assertEqual(
        [t.task_id for t in found], [t.task_id for t in TASKS[5:]]
      )
      for trajectory in found:
        self.assertEqual(trajectory.windows[0].weight_versions[1], version)
    # The same questions every time; training waits for the first answers.
    self.assertLen(_spots(runs), 4)
    self.assertEqual(
      [run.task_id for run in stage.started[:4]],
      [run.task_id for run in runs[:4]],
    )

  def test_seeds_differ_between_runs(self):
    one, other = (Stage(storage.MemoryStore()) for _ in range(2))
    one.run(seed=1)
    other.run(seed=2)
    seeds = [{run.seed for run in stage.started} for stage in (one, other)]
    self.assertEmpty(seeds[0] & seeds[1])


class InterruptionTest(absltest.TestCase):
  def _interrupted(self, *, lost, error):
    """Runs a worker that loses a trajectory of group `lost`."""
    stage = Stage(storage.MemoryStore())

    def fail(run):
      if run.task_id.startswith('train') and run.index == lost:
        raise error

    stage.fail = fail
    return stage

  def test_a_lost_group_is_issued_again_and_asks_the_same(self):
    whole = Stage(storage.MemoryStore())
    whole.run()
    first = self._interrupted(lost=7, error=EngineError('gone'))
    with self.assertRaises(ExceptionGroup):
      first.run()
    there = set(first.store.list(dispatch.TRAIN_PREFIX))
    self.assertNotIn(dispatch.train_name(7), there)
    self.assertTrue(there)
    second = Stage(first.store, version=first.weight_version)
    second.run()
    missing = [
      index
      for index in range(GROUPS * STEPS)
      if dispatch.train_name(index) not in there
    ]
    order = [run.index for run in second.training()][::SIZE]
    self.assertEqual(order, missing)
    self.assertEqual(
      _spots(second.training()),
      {spot for spot in _spots(whole.training()) if spot[0] in missing},
    )
    lost = {s for s in _spots(first.training()) if s[0] == 7}
    self.assertLessEqual(lost, _spots(second.training()))
    self.assertEqual(
      second.store.list(dispatch.TRAIN_PREFIX),
      whole.store.list(dispatch.TRAIN_PREFIX),
    )

  def test_a_finished_run_has_nothing_to_do(self):
    first = Stage(storage.MemoryStore())
    first.run()
    second = Stage(first.store, version=STEPS)
    second.run()
    self.assertEmpty(second.started)

  def test_an_error_of_the_engine_ends_the_worker(self):
    """The trainer waits for the group, so no version comes: no hang."""
    stage = self._interrupted(lost=1, error=EngineError('planted'))
    with self.assertRaises(ExceptionGroup) as raised:
      stage.run()
    self.assertIsNotNone(raised.exception.subgroup(EngineError))
    self.assertIn('planted', str(raised.exception.exceptions))
    self.assertLess(stage.weight_version, STEPS)

  def test_an_error_of_an_evaluation_ends_the_worker(self):
    stage = Stage(storage.MemoryStore())

    def fail(run):
      if 'heldout' in run.task_id and run.version == EVERY:
        raise EngineError('planted')

    stage.fail = fail
    with self.assertRaises(ExceptionGroup) as raised:
      stage.run()
    self.assertIsNotNone(raised.exception.subgroup(EngineError))


class OrderTest(absltest.TestCase):
  def test_each_epoch_is_a_permutation_of_all_tasks(self):
    tasks = TASKS[:5]
    epochs = [
      [worker.task_of(5 * e + i, tasks, seed=3).task_id for i in range(5)]
      for e in range(6)
    ]
    for names in epochs:
      self.assertCountEqual(names, [task.task_id for task in tasks])
    self.assertGreater(len({tuple(names) for names in epochs}), 3)
    self.assertNotEqual(
      epochs[0],
      [worker.task_of(i, tasks, seed=4).task_id for i in range(5)],
    )

  def test_settings_that_cannot_run_are_refused(self):
    for name in ('inflight_groups', 'eval_every'):
      with self.assertRaisesRegex(ValueError, f'{name}=0'):
        worker.WorkerConfig(**{name: 0})


if __name__ == '__main__':
  absltest.main()
