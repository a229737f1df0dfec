"""The agent loop of the quickstart: read, edit, test, submit.

The agent sees a function with numbered lines and answers in lines of text:

    # anything          a remark (its reasoning)
    edit 3|  x = x + 1  replaces line 3
    test                runs the visible call, ends the turn
    submit              hands the program to the verifier, ends the episode

A turn that does neither `test` nor `submit` is answered and goes on; a line
that is none of these is answered with an error, never raised. The sandbox
sees the program and arguments, never an expected value.
"""

import asyncio
import dataclasses
import re
import time
from collections.abc import Sequence

import numpy as np

from swe17_jax.core import records
from swe17_jax.engine.interface import Engine, Generation, SamplingParams
from swe17_jax.rollout.chat import Chat
from swe17_jax.tasks import sandbox as sandboxes
from swe17_jax.tasks import verifier

FILE = 'solution.py'
_EDIT = re.compile(r'edit ([0-9]{1,6})\|(.*)')


class HarnessError(ValueError):
  """A task does not fit the harness's limits."""


@dataclasses.dataclass(frozen=True)
class HarnessConfig:
  """Limits of one trajectory."""

  max_turns: int = 4
  max_turn_tokens: int = 128  # sampled tokens of a turn
  max_tokens: int = 320  # of a window, prompt included
  observation_chars: int = 48  # of a tool's answer


@dataclasses.dataclass(frozen=True)
class Action:
  """What one turn of the agent asks for, in order."""

  edits: tuple[tuple[int, str], ...]  # (line number from 1, new text)
  call: str  # 'test', 'submit', 'edit' (nothing after edits) or 'malformed'
  error: str = ''


def parse(text: str) -> Action:
  """Reads a turn of the agent; anything malformed is said, not raised."""
  edits: list[tuple[int, str]] = []
  for line in text.split('\n'):
    if not line or line.startswith('#'):
      continue
    if line in ('test', 'submit'):
      return Action(tuple(edits), line)
    match = _EDIT.fullmatch(line)
    if match is None:
      return Action(
        tuple(edits), 'malformed', f'error: unknown command {line[:24]}'
      )
    edits.append((int(match[1]), match[2]))
  return Action(tuple(edits), 'edit' if edits else 'malformed', 'no command')


def render(source: str) -> str:
  """Returns the program as the agent sees it, with line numbers."""
  lines = source.rstrip('\n').split('\n')
  return '\n'.join(f'{i}|{line}' for i, line in enumerate(lines, 1))


def task_text(task: records.Task) -> str:
  """Returns the first message of a task."""
  return f'{task.instruction}\n{render(task.files[FILE])}\n'


def edited(source: str, edits: Sequence[tuple[int, str]]) -> str | None:
  """Returns the source after the edits; None if a line does not exist."""
  lines = source.rstrip('\n').split('\n')
  for number, text in edits:
    if not 1 <= number <= len(lines):
      return None
    lines[number - 1] = text
  return '\n'.join(lines) + '\n'


class _Recorder:
  """Grows one window: the exact tokens and what replays them."""

  def __init__(self, prompt: Sequence[int]):
    self.tokens: list[int] = []
    self._parts: list[tuple] = []
    self._routed: list[np.ndarray] = []
    self.turns: list[records.Turn] = []
    self.given(prompt)

  def given(self, ids: Sequence[int]) -> None:
    """Appends tokens that the model did not sample."""
    size = len(ids)
    self.tokens += ids
    self._parts.append(
      (
        np.zeros(size, bool),
        np.zeros(size, np.float32),
        np.full(size, -1, np.int32),
        records.SamplingMask.empty(size),
      )
    )

  def sampled(self, generation: Generation) -> tuple[int, int]:
    """Appends a generation; returns its span."""
    start = len(self.tokens)
    self.tokens += generation.token_ids.tolist()
    self._parts.append(
      (
        np.ones(generation.token_ids.size, bool),
        generation.rollout_logprobs,
        generation.weight_versions,
        generation.sampling_mask,
      )
    )
    # Rows that earlier turns recorded stay: they were sampled from.
    known = sum(rows.shape[0] for rows in self._routed)
    self._routed.append(generation.routed_experts[known:])
    return start, len(self.tokens)

  def window(self) -> records.Window:
    """Returns the window; the last token has no routing of its own."""
    routed = np.concatenate(self._routed)
    missing = len(self.tokens) - routed.shape[0]
    routed = np.pad(routed, ((0, missing), (0, 0), (0, 0)), constant_values=-1)
    mask, logprobs, versions, sampling_masks = zip(*self._parts, strict=True)
    return records.Window(
      tokens=np.asarray(self.tokens, np.int32),
      loss_mask=np.concatenate(mask),
      rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
      weight_versions=np.concatenate(versions).astype(np.int32),
      sampling_mask=records.SamplingMask.concatenate(sampling_masks),
      routed_experts=routed.astype(np.int16),
    )


async def run(
  task: records.Task,
  *,
  engine: Engine,
  chat: Chat,
  sandbox: sandboxes.Sandbox,
  sampling: SamplingParams,
  config: HarnessConfig,
  group_index: int,
) -> records.Trajectory:
  """Runs the agent on one task and has its result judged.

  Args:
    sampling: temperature, top-k, top-p and the trajectory's seed; the limits
      and stop token are set here.

  Returns:
    A valid record, whatever the agent did.

  Raises:
    HarnessError: the prompt alone fills `config.max_tokens`.
    EngineError, SandboxError: not the agent's fault; nothing is recorded.
  """
  started = time.monotonic()
  source = task.files[FILE]
  recorder = _Recorder(chat.opening(task_text(task)))
  if len(recorder.tokens) >= config.max_tokens:
    raise HarnessError(
      f'the prompt of task {task.task_id!r} has {len(recorder.tokens)} tokens; '
      f'raise harness.max_tokens={config.max_tokens} above that'
    )
  transcript = [task_text(task)]
  finish = 'turns'
  for turn in range(config.max_turns):
    room = config.max_tokens - len(recorder.tokens)
    limits = {
      'stop_token_ids': (chat.end_id,),
      'max_new_tokens': min(config.max_turn_tokens, room),
      'seed': sampling.seed * config.max_turns + turn,
    }
    generation = await engine.generate(
      np.asarray(recorder.tokens, np.int32),
      sampling=dataclasses.replace(sampling, **limits),
    )
    span = recorder.sampled(generation)
    text = chat.decode(generation.token_ids)
    transcript.append(f'<agent> {text}')
    if generation.finish_reason != 'stop':
      recorder.turns.append(records.Turn(0, *span, 'cut', 0.0))
      finish = 'abort' if generation.finish_reason == 'abort' else 'tokens'
      break
    action = parse(text)
    changed = edited(source, action.edits)
    source = source if changed is None else changed
    tool_started = time.monotonic()
    answer = await _answer(action, changed is None, task, source, sandbox)
    seconds = time.monotonic() - tool_started
    recorder.turns.append(records.Turn(0, *span, action.call, seconds))
    if answer is None:
      finish = 'submit'
      break
    answer = answer[: config.observation_chars]
    transcript.append(f'<tool> {answer}')
    observation = chat.observation(answer)
    if len(recorder.tokens) + len(observation) >= config.max_tokens:
      finish = 'tokens'
      break
    recorder.given(observation)
  verdict = await _judge(finish, task, source, sandbox)
  return records.Trajectory(
    task_id=task.task_id,
    group_index=group_index,
    windows=(recorder.window(),),
    turns=tuple(recorder.turns),
    verdict=verdict,
    reward=float(verdict.passed),
    finish=finish,
    text='\n'.join(transcript),
    wall_s=time.monotonic() - started,
  )


async def _answer(action, missing_line, task, source, sandbox) -> str | None:
  """Returns the observation of a turn, or None if the agent submits."""
  if missing_line:
    return 'error: no such line'
  if action.call == 'submit':
    return None
  if action.call == 'test':
    return await asyncio.to_thread(
      verifier.run_visible, task, {**task.files, FILE: source}, sandbox=sandbox
    )
  return 'edited' if action.call == 'edit' else action.error


async def _judge(finish, task, source, sandbox) -> records.Verdict:
  """Grades what was submitted; nothing else can pass."""
  if finish != 'submit':
    return records.Verdict(False, 0, len(task.hidden), f'ended by {finish}')
  verdict = await asyncio.to_thread(
    verifier.verify, task, {**task.files, FILE: source}, sandbox=sandbox
  )
  if verdict.infra_error:  # not the agent's failure: no reward, no record
    raise sandboxes.SandboxError(verdict.infra_error)
  return verdict
