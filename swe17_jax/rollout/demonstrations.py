"""An expert's runs on training tasks, recorded by the ordinary harness.

The expert knows each task's original line. It remarks on a line in one of
several ways and rewrites it, sometimes with lines that were right.
Sometimes it runs the visible call before it submits, and sometimes it suspects
another line first and goes on when the test fails.
The runs come out as `Trajectory` records like any other, so the cold start
reads the same data as reinforcement learning does.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from swe17_jax.core import records
from swe17_jax.engine.interface import Generation, SamplingParams
from swe17_jax.rollout import harness
from swe17_jax.rollout.chat import Chat
from swe17_jax.tasks.sandbox import Sandbox

REMARKS = (
  'line {} is off',
  'line {} looks wrong',
  'the bug is in line {}',
  'check line {}',
  'I would change line {}',
  'suspect: line {}',
  'line {} does not fit',
  'something is odd in line {}',
)
# Shares of the three kinds of run; the rest submits without a test.
TESTED = 0.15  # edits, tests, submits
RETRIED = 0.15  # first rewrites a line that was right, and goes on
ANOTHER_EDIT = 0.3  # chance of one more edit in the same turn


class DemonstrationError(ValueError):
  """Demonstrations cannot be made; the message says what to change."""


class ScriptedEngine:
  """Answers with the tokens that `script(prompt_ids)` returns."""

  weight_version = 0

  def __init__(
    self,
    script: Callable[[np.ndarray], Sequence[int]],
    *,
    routed_shape: tuple[int, int],
  ):
    self._script = script
    self._routed_shape = routed_shape

  async def generate(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> Generation:
    """Returns the script's answer; its experts are not recorded (-1)."""
    del sampling
    tokens = np.asarray(self._script(prompt_ids), np.int32)
    rows = len(prompt_ids) + tokens.size - 1
    return Generation(
      token_ids=tokens,
      rollout_logprobs=np.zeros(tokens.size, np.float32),
      sampling_mask=records.SamplingMask.empty(tokens.size),
      weight_versions=np.zeros(tokens.size, np.int32),
      routed_experts=np.full((rows, *self._routed_shape), -1, np.int16),
      finish_reason='stop',
    )


def choose(
  tasks: Sequence[records.Task], *, count: int, seed: int
) -> list[records.Task]:
  """Returns `count` distinct training tasks."""
  train = [task for task in tasks if task.split == 'train']
  if count > len(train):
    raise DemonstrationError(
      f'{count} demonstrations need as many training tasks; there are '
      f'{len(train)}'
    )
  order = np.random.default_rng(seed).permutation(len(train))
  return [train[i] for i in order[:count]]


def script(task: records.Task, rng: np.random.Generator) -> list[str]:
  """Returns what the expert writes in each turn."""
  bug = int(task.metadata['line'])
  lines = task.files[harness.FILE].rstrip('\n').split('\n')
  lines[bug - 1] = task.metadata['original']
  # Lines that are right, in random order; every attempt takes the next ones.
  others = [n for n in range(1, len(lines) + 1) if n != bug]
  others = [others[i] for i in rng.permutation(len(others))]

  def attempt(size: int, *, finds_bug: bool) -> str:
    chosen = [others.pop() for _ in range(size - finds_bug) if others]
    chosen += [bug] if finds_bug else []
    return '\n'.join(f'edit {n}|{lines[n - 1]}' for n in sorted(chosen))

  kind = rng.random()
  if kind < RETRIED:
    attempts = [attempt(1, finds_bug=False), attempt(1, finds_bug=True)]
  else:
    attempts = [attempt(rng.geometric(1 - ANOTHER_EDIT), finds_bug=True)]
  first = attempts[0].split('|')[0].removeprefix('edit ')
  remark = REMARKS[rng.integers(len(REMARKS))].format(first)
  attempts[0] = f'# {remark}\n{attempts[0]}'
  if kind < RETRIED + TESTED:
    return [f'{text}\ntest' for text in attempts] + ['submit']
  return [f'{attempts[0]}\nsubmit']


def record(
  tasks: Sequence[records.Task],
  *,
  chat: Chat,
  sandbox: Sandbox,
  config: harness.HarnessConfig,
  routed_shape: tuple[int, int],
  seed: int,
) -> list[records.Trajectory]:
  """Runs the expert on each task.

  Raises:
    DemonstrationError: a demonstration did not solve its task.
  """
  rng = np.random.default_rng(seed)

  async def one(index: int, task: records.Task) -> records.Trajectory:
    turns = iter(script(task, rng))
    engine = ScriptedEngine(
      lambda _: [*chat.encode(next(turns)), chat.end_id],
      routed_shape=routed_shape,
    )
    return await harness.run(
      task,
      engine=engine,
      chat=chat,
      sandbox=sandbox,
      sampling=SamplingParams(),
      config=dataclasses.replace(config, max_turn_tokens=config.max_tokens),
      group_index=index,
    )

  async def everything():
    return [await one(index, task) for index, task in enumerate(tasks)]

  trajectories = asyncio.run(everything())
  for trajectory in trajectories:
    if not trajectory.verdict.passed:
      raise DemonstrationError(
        f'the demonstration of {trajectory.task_id} does not solve it: '
        f'{trajectory.verdict}'
      )
  return trajectories
