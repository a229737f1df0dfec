"""A weak demonstrator's runs on training tasks, recorded by the harness.

The demonstrator knows by heart what every line should say, but not where the
bug is: it guesses a line, remarks on it, and rewrites it, sometimes with
several more. Mostly it submits at once. When it runs the visible call first
and that fails, it goes on with other lines. So a cold start on its runs
teaches the format and the text; where to look, when to test and when to go on
is left to reinforcement learning.

The runs come out as `Trajectory` records like any other.
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
TESTS = 0.2  # chance of a test after an attempt, instead of a submit
THOROUGH = 0.15  # chance of an attempt that rewrites several lines, not one
MANY_EDITS = (5, 8)  # fewest and most lines of such an attempt


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


def script(
  task: records.Task, rng: np.random.Generator, *, turns: int
) -> list[str]:
  """Returns what the demonstrator writes in at most `turns` turns."""
  bug = int(task.metadata['line'])
  lines = task.files[harness.FILE].rstrip('\n').split('\n')
  lines[bug - 1] = task.metadata['original']
  untried = [int(n) + 1 for n in rng.permutation(len(lines))]
  written: list[str] = []
  while True:
    size = 1
    if rng.random() < THOROUGH:
      size = rng.integers(*MANY_EDITS, endpoint=True)
    chosen, untried = sorted(untried[:size]), untried[size:]
    text = '\n'.join(f'edit {n}|{lines[n - 1]}' for n in chosen)
    if not written:
      remark = REMARKS[rng.integers(len(REMARKS))].format(chosen[0])
      text = f'# {remark}\n{text}'
    if len(written) + 1 == turns or not untried or rng.random() >= TESTS:
      return [*written, f'{text}\nsubmit']
    written.append(f'{text}\ntest')
    if bug in chosen:
      return [*written, 'submit']


def record(
  tasks: Sequence[records.Task],
  *,
  chat: Chat,
  sandbox: Sandbox,
  config: harness.HarnessConfig,
  routed_shape: tuple[int, int],
  seed: int,
) -> list[records.Trajectory]:
  """Returns a run on each task, less those that the limits cut off."""
  rng = np.random.default_rng(seed)

  async def one(index: int, task: records.Task) -> records.Trajectory:
    turns = iter(script(task, rng, turns=config.max_turns))
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

  return [
    trajectory
    for trajectory in asyncio.run(everything())
    if trajectory.finish == 'submit'
  ]
