"""The whole ring in one process: at its end the engine has the trainer's bits.

Real are the worker and its numbering, the records, the source, the loop, the
publisher and the controller, each in its thread over one store. Only the ends
are small: the engine hashes tokens instead of computing them, and the agent's
reward is whether its first token is even.
"""

import asyncio
import concurrent.futures
import dataclasses
import pathlib
import threading
from unittest import mock

import numpy as np
from absl.testing import parameterized

from swe17_jax.core import dispatch, metrics, records, storage
from swe17_jax.engine import fake_engine
from swe17_jax.rollout import worker
from swe17_jax.train import loop, source
from swe17_jax.weights import controller as controllers
from swe17_jax.weights import delta
from swe17_jax.weights import manifest as manifests
from tests import miniature

STEPS = 3
DISPATCH = dispatch.DispatchConfig(
  groups_per_step=2, group_size=4, max_staleness=1
)
PROMPT = 4  # tokens; with the engine's four, two windows fill a row


def task(name, split):
  return records.Task(
    task_id=name,
    split=split,
    instruction='',
    files={},
    entry='f',
    visible=(),
    hidden=(records.Call('[]', '0'),),
  )


TASKS = [task(f't{i}', 'train') for i in range(3)] + [task('h', 'heldout')]


async def agent(task, *, engine, sampling, group_index, **_):
  """Plays `harness.run`: one turn of tokens that the engine made up."""
  rng = np.random.default_rng(sampling.seed)
  prompt = rng.integers(0, miniature.MODEL.vocab_size, PROMPT)
  generation = await engine.generate(
    prompt, sampling=dataclasses.replace(sampling, stop_token_ids=(1,))
  )
  await asyncio.sleep(0.001)
  size = generation.token_ids.size
  window = records.Window(
    tokens=np.concatenate([prompt, generation.token_ids]).astype(np.int32),
    loss_mask=np.arange(PROMPT + size) >= PROMPT,
    rollout_logprobs=np.pad(generation.rollout_logprobs, (PROMPT, 0)),
    weight_versions=np.pad(
      generation.weight_versions, (PROMPT, 0), constant_values=-1
    ),
    sampling_mask=records.SamplingMask.concatenate(
      [records.SamplingMask.empty(PROMPT), generation.sampling_mask]
    ),
    routed_experts=np.pad(
      generation.routed_experts, ((0, 1), (0, 0), (0, 0)), constant_values=-1
    ),
  )
  reward = float(generation.token_ids[0] % 2 == 0)
  return dataclasses.replace(
    miniature.trajectory(window, group_index=group_index, reward=reward),
    task_id=task.task_id,
    turns=(records.Turn(0, PROMPT, PROMPT + size, 'submit', 0.0),),
  )


class RingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(miniature.shared_trainers())
    self.enter_context(mock.patch.object(worker.harness, 'run', agent))
    self.store = storage.MemoryStore()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.engine = fake_engine.FakeEngine(
      vocab_size=miniature.MODEL.vocab_size, routed_shape=miniature.ROUTED
    )
    self.controller = controllers.Controller(
      self.store, self.engine, poll_s=0.01
    )
    self.stop = threading.Event()
    self.groups = source.GroupSource(
      self.store, DISPATCH, timeout_s=20.0, stop=self.stop
    )

  def rollouts(self):
    """Runs the worker to its end, in the thread that calls."""
    asyncio.run(
      worker.Worker(
        worker.WorkerConfig(inflight_groups=3, eval_every=2),
        dispatch_config=DISPATCH,
        harness_config=None,
        engine=self.engine,
        chat=None,
        sandbox=None,
        store=self.store,
        tasks=TASKS,
        steps=STEPS,
        seed=0,
      ).run()
    )

  def train(self, config):
    return loop.run(
      config,
      model=miniature.MODEL,
      initial=miniature.parameters,
      groups=self.groups,
      store=self.store,
      workdir=self.workdir,
      on_step=lambda step, row: None,
    )

  def turn(self, stops, publish_every):
    """Turns the ring; the trainer is started anew at each of `stops`."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
      controlled = pool.submit(self.controller.run, self.stop)
      rolled = pool.submit(self.rollouts)
      try:
        for steps in stops:
          state = self.train(
            dataclasses.replace(
              miniature.TRAIN, steps=steps, publish_every=publish_every
            )
          )
        rolled.result(timeout=20.0)
      finally:
        self.stop.set()
      controlled.result(timeout=20.0)
    return state

  @parameterized.named_parameters(
    ('straight', (STEPS,), 1, [0, 1, 2, 3]),
    ('every_second_version', (STEPS,), 2, [0, 2, 3]),
    ('trainer_restarts', (1, STEPS), 1, [0, 1, 2, 3]),
  )
  def test_the_engine_ends_with_the_bytes_of_the_trainer(
    self, stops, publish_every, versions
  ):
    state = self.turn(stops, publish_every)

    weights = miniature.trainer().published(state.params)
    wanted = loop.host(weights, miniature.MODEL)
    found = self.engine.tensors()
    self.assertEqual(int(state.step), STEPS)
    self.assertEqual(self.engine.weight_version, STEPS)
    self.assertEqual(set(found), set(wanted))
    for name, array in wanted.items():
      self.assertEqual(found[name].dtype, array.dtype, name)
      self.assertEqual(found[name].tobytes(), array.tobytes(), name)
    chain = [manifests.read(self.store, version=v) for v in versions]
    self.assertEqual(delta.digest(found), chain[-1].tensors_digest)

    # It was a ring: every version came as a delta, was used, and differs.
    self.assertEqual(manifests.versions(self.store), versions)
    self.assertEqual(
      [link.kind for link in chain], ['base'] + ['delta'] * len(chain[1:])
    )
    self.assertLen({link.tensors_digest for link in chain}, len(chain))
    self.assertEqual(self.controller.versions_applied, len(versions))
    self.assertEqual(self.controller.errors, 0)
    rows = metrics.read(self.workdir / 'metrics.jsonl')
    rows = [row for row in rows if 'train/reward' in row]
    self.assertEqual([row['step'] for row in rows], list(range(STEPS)))
    for row in rows:
      self.assertLessEqual(row['train/staleness_max'], DISPATCH.max_staleness)
    self.assertGreater(rows[-1]['rollout/newest_version'], 0)
    self.assertEqual(list(self.groups.heldout(after=-1)), [0, 2, 3])
