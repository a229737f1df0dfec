"""The agent loop, driven by a scripted engine."""

import asyncio
import dataclasses

import numpy as np
import pytest

from swe17_jax.core import records
from swe17_jax.engine.interface import EngineError, Generation, SamplingParams
from swe17_jax.rollout import harness

LAYERS, ACTIVE = 2, 2
TASK = records.Task(
  task_id='increment/L2',
  split='train',
  instruction='Fix the bug.',
  files={'solution.py': 'def f(x):\n  return x - 1\n'},
  entry='f',
  visible=(records.Call('[1]', '2'),),
  hidden=(records.Call('[4]', '5'), records.Call('[-1]', '0')),
)
RIGHT = 'edit 2|  return x + 1'
WRONG = 'edit 2|  return x + 2'
CONFIG = harness.HarnessConfig(
  max_turns=4, max_turn_tokens=64, max_tokens=320, observation_chars=40
)
SAMPLING = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=11)


class Script:
  """An engine that says what it is told; every field tells its place.

  Turn k, token i has logprob -(k + i / 100), version 3 * k + (i > 2), a mask
  of itself and 7 in every second place. The experts of input row r are
  100 * k + r: each turn says something else about the rows that it shares
  with earlier turns.
  """

  weight_version = 0

  def __init__(self, chat, *texts, finish='stop'):
    self._chat, self._texts, self._finish = chat, texts, finish
    self.prompts: list[np.ndarray] = []
    self.sampling: list[SamplingParams] = []
    self.said: list[list[int]] = []

  async def generate(self, prompt_ids, *, sampling):
    turn = len(self.said)
    self.prompts.append(np.array(prompt_ids))
    self.sampling.append(sampling)
    tokens = self._chat.encode(self._texts[turn])
    last = turn + 1 == len(self._texts)
    finish = self._finish if last else 'stop'
    if finish == 'stop':
      tokens.append(self._chat.end_id)
    self.said.append(tokens)
    rows = np.arange(len(prompt_ids) + len(tokens) - 1) + 100 * turn
    return Generation(
      token_ids=np.asarray(tokens, np.int32),
      rollout_logprobs=_logprobs(turn, len(tokens)),
      sampling_mask=records.SamplingMask.from_lists(_masks(tokens)),
      weight_versions=_versions(turn, len(tokens)),
      routed_experts=np.broadcast_to(
        rows[:, None, None], (rows.size, LAYERS, ACTIVE)
      ).astype(np.int16),
      finish_reason=finish,
    )


def _logprobs(turn, size):
  return np.asarray(-(turn + np.arange(size) / 100), np.float32)


def _versions(turn, size):
  return np.asarray(3 * turn + (np.arange(size) > 2), np.int32)


def _masks(tokens):
  return [[token, 7] if i % 2 else [] for i, token in enumerate(tokens)]


def _run(engine, *, chat, box, **changes) -> records.Trajectory:
  return asyncio.run(
    harness.run(
      TASK,
      engine=engine,
      chat=chat,
      sandbox=box,
      sampling=SAMPLING,
      config=dataclasses.replace(CONFIG, **changes),
      group_index=5,
    )
  )


# --------------------------------------------------------------- what it says


@pytest.mark.parametrize(
  'text, edits, call, error',
  [
    ('submit', (), 'submit', ''),
    ('test', (), 'test', ''),
    ('# hm\n\ntest', (), 'test', ''),
    ('edit 3|  x = 1\nsubmit', ((3, '  x = 1'),), 'submit', ''),
    (
      'edit 3|a|b\nedit 12|\ntest',
      ((3, 'a|b'), (12, '')),
      'test',
      '',
    ),
    ('edit 1|x', ((1, 'x'),), 'edit', None),
    ('edit 1|x\n# done', ((1, 'x'),), 'edit', None),
    # After test or submit nothing is read.
    ('submit\nedit 1|x\nnonsense', (), 'submit', ''),
    ('test\nsubmit', (), 'test', ''),
    # Malformed: said, with the edits that came before.
    ('', (), 'malformed', 'no command'),
    ('# only a remark', (), 'malformed', 'no command'),
    ('edit 1|x\nedit', ((1, 'x'),), 'malformed', 'unknown command edit'),
    ('edit x|1', (), 'malformed', 'unknown command edit x|1'),
    ('edit -1|x', (), 'malformed', 'unknown command edit -1|x'),
    ('edit 1', (), 'malformed', 'unknown command edit 1'),
    ('edit  1|x', (), 'malformed', 'unknown command'),
    ('edit 1 |x', (), 'malformed', 'unknown command'),
    (' submit', (), 'malformed', 'unknown command  submit'),
    ('submit ', (), 'malformed', 'unknown command submit '),
    ('Submit', (), 'malformed', 'unknown command Submit'),
    ('\nedit ٣|x', (), 'malformed', 'unknown command'),
    (f'edit {"9" * 5000}|x', (), 'malformed', 'unknown command edit 9999'),
    (
      'rm -rf / ' * 9,
      (),
      'malformed',
      'unknown command rm -rf / rm -rf / rm -rf',
    ),
    ('<|end|>', (), 'malformed', 'unknown command <|end|>'),
    ('\ufffd\0', (), 'malformed', 'unknown command \ufffd\0'),
  ],
)
def test_parse(text, edits, call, error):
  action = harness.parse(text)
  assert (action.edits, action.call) == (edits, call)
  if error is not None:
    assert error in action.error and bool(action.error) == bool(error)
  assert len(action.error) <= 64


@pytest.mark.parametrize(
  'edits, expected',
  [
    ((), 'a\n  b\nc\n'),
    (((2, 'x'),), 'a\nx\nc\n'),
    (((1, 'x'), (3, '')), 'x\n  b\n\n'),
    (((1, 'x'), (1, 'y')), 'y\n  b\nc\n'),
    (((0, 'x'),), None),
    (((4, 'x'),), None),
    (((1, 'x'), (999_999, 'y')), None),
  ],
)
def test_edited(edits, expected):
  assert harness.edited('a\n  b\nc\n', edits) == expected


def test_render_and_task_text():
  assert harness.render('a\n\n b\n') == '1|a\n2|\n3| b'
  assert harness.task_text(TASK) == (
    'Fix the bug.\n1|def f(x):\n2|  return x - 1\n'
  )


# ------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
  'texts, tools, answers, finish, reward, passed',
  [
    ([f'# off\n{RIGHT}\nsubmit'], ['submit'], [], 'submit', 1, 2),
    ([f'{WRONG}\nsubmit'], ['submit'], [], 'submit', 0, 0),
    (['submit'], ['submit'], [], 'submit', 0, 0),
    (['edit 1|def f(x:\nsubmit'], ['submit'], [], 'submit', 0, 0),
    (
      [f'{WRONG}\ntest', f'{RIGHT}\ntest', 'submit'],
      ['test', 'test', 'submit'],
      ['f(1) gave 3, expected 2', 'ok'],
      'submit',
      1,
      2,
    ),
    # What was edited stays edited, also when the turn goes on malformed.
    ([RIGHT, 'submit'], ['edit', 'submit'], ['edited'], 'submit', 1, 2),
    (
      [f'{RIGHT}\nlook', 'submit'],
      ['malformed', 'submit'],
      ['error: unknown command look'],
      'submit',
      1,
      2,
    ),
    # A line that does not exist: none of the turn's edits, and no submit.
    (
      [f'{RIGHT}\nedit 9|x\nsubmit', 'submit'],
      ['submit', 'submit'],
      ['error: no such line'],
      'submit',
      0,
      0,
    ),
    (
      ['test'] * 4,
      ['test'] * 4,
      ['f(1) gave 0, expected 2'] * 4,
      'turns',
      0,
      0,
    ),
  ],
)
def test_episodes(chat, box, texts, tools, answers, finish, reward, passed):
  engine = Script(chat, *texts)
  found = _run(engine, chat=chat, box=box)
  assert [turn.tool for turn in found.turns] == tools
  assert (found.finish, found.reward) == (finish, reward)
  assert found.verdict.calls_passed == passed and found.verdict.calls == 2
  assert found.verdict.passed == bool(reward)
  assert (found.task_id, found.group_index) == ('increment/L2', 5)
  lines = found.text.split('\n')
  assert [x[7:] for x in lines if x.startswith('<tool> ')] == answers
  assert len([x for x in lines if x.startswith('<agent>')]) == len(texts)
  if finish == 'turns':
    assert found.verdict.detail == 'ended by turns'


@pytest.mark.parametrize(
  'reason, finish', [('length', 'tokens'), ('abort',) * 2]
)
def test_a_turn_that_is_cut_is_not_carried_out(chat, box, reason, finish):
  engine = Script(chat, 'test', f'{RIGHT}\nsubmit', finish=reason)
  found = _run(engine, chat=chat, box=box)
  assert [turn.tool for turn in found.turns] == ['test', 'cut']
  assert (found.finish, found.reward) == (finish, 0)
  assert not found.verdict.passed
  assert found.windows[0].tokens[-1] != chat.end_id


def test_limits_and_seeds_of_a_turn(chat, box):
  engine = Script(chat, 'test', 'test', 'submit')
  found = _run(engine, chat=chat, box=box, max_tokens=100, max_turn_tokens=30)
  assert found.finish == 'submit'
  for turn, (prompt, sampling) in enumerate(
    zip(engine.prompts, engine.sampling)
  ):
    assert sampling == dataclasses.replace(
      SAMPLING,
      stop_token_ids=(chat.end_id,),
      max_new_tokens=min(30, 100 - prompt.size),
      seed=11 * 4 + turn,
    )
  assert engine.sampling[-1].max_new_tokens < 30


def test_no_turn_is_asked_for_where_none_fits(chat, box):
  """The answer that fills the window is left out of it."""
  engine = Script(chat, 'test', 'test')
  whole = _run(engine, chat=chat, box=box, max_turns=2)
  opening, second = engine.prompts
  for limit in (second.size, second.size - 3):
    engine = Script(chat, 'test')
    found = _run(engine, chat=chat, box=box, max_tokens=limit)
    assert (found.finish, len(found.turns)) == ('tokens', 1)
    size = opening.size + len(engine.said[0])
    np.testing.assert_array_equal(
      found.windows[0].tokens, whole.windows[0].tokens[:size]
    )


def test_a_prompt_that_fills_the_window_is_an_error(chat, box):
  size = len(chat.opening(harness.task_text(TASK)))
  with pytest.raises(
    harness.HarnessError, match=f'has {size} tokens; raise harness.max'
  ):
    _run(Script(chat), chat=chat, box=box, max_tokens=size)
  found = _run(
    Script(chat, 'test', finish='length'),
    chat=chat,
    box=box,
    max_tokens=size + 1,
  )
  assert found.finish == 'tokens'


def test_an_engine_error_is_not_recorded_as_a_failure(chat, box):
  class Broken(Script):
    async def generate(self, prompt_ids, *, sampling):
      raise EngineError('planted')

  with pytest.raises(EngineError, match='planted'):
    _run(Broken(chat), chat=chat, box=box)


def test_an_expected_value_never_enters_the_sandbox(chat):
  """Jobs carry arguments; the answers are compared outside."""
  from swe17_jax.tasks import sandbox as sandbox_lib

  class Spy:
    jobs = []

    def run(self, jobs):
      self.jobs += jobs
      return [
        sandbox_lib.JobResult(('41',) * len(job.calls), '', False)
        for job in jobs
      ]

  spy = Spy()
  _run(Script(chat, 'test', 'submit'), chat=chat, box=spy)
  assert [job.calls for job in spy.jobs] == [('[1]',), ('[4]', '[-1]')]
  assert {job.source for job in spy.jobs} == {TASK.files['solution.py']}


# -------------------------------------------------------- what is recorded


def test_the_window_is_what_was_sampled(chat, box):
  """Rebuilt token by token from what the engine was asked and said."""
  texts = [
    f'# two words\n{WRONG}\ntest',
    'nonsense',
    f'{RIGHT}\ntest',
    'submit',
  ]
  engine = Script(chat, *texts)
  found = _run(engine, chat=chat, box=box)
  [window] = found.windows
  tokens, owner = [], []  # owner: (turn, place in it), None where it was given
  for turn, (prompt, said) in enumerate(zip(engine.prompts, engine.said)):
    # The engine was asked with exactly what it had said, and more.
    np.testing.assert_array_equal(prompt[: len(tokens)], tokens)
    owner += [None] * (prompt.size - len(tokens))
    owner += [(turn, i) for i in range(len(said))]
    tokens = [*prompt.tolist(), *said]
  assert window.tokens.tolist() == tokens
  assert window.loss_mask.tolist() == [place is not None for place in owner]
  for t, place in enumerate(owner):
    span = window.sampling_mask.span(t).tolist()
    if place is None:
      assert window.rollout_logprobs[t] == 0
      assert window.weight_versions[t] == -1
      assert span == []
      continue
    turn, i = place
    size = len(engine.said[turn])
    assert window.rollout_logprobs[t] == _logprobs(turn, size)[i]
    assert window.weight_versions[t] == _versions(turn, size)[i]
    assert span == _masks(engine.said[turn])[i]
  starts = [owner.index((turn, 0)) for turn in range(4)]
  assert [(turn.start, turn.stop) for turn in found.turns] == [
    (start, start + len(said)) for start, said in zip(starts, engine.said)
  ]
  assert {turn.window for turn in found.turns} == {0}


def test_experts_are_those_of_the_turn_that_first_used_a_row(chat, box):
  engine = Script(chat, 'test', 'nonsense', 'submit')
  [window] = _run(engine, chat=chat, box=box).windows
  expected, known = [], 0
  for turn, (prompt, said) in enumerate(zip(engine.prompts, engine.said)):
    rows = prompt.size + len(said) - 1
    expected += [100 * turn + row for row in range(known, rows)]
    known = rows
  expected.append(-1)  # the last token was never an input
  assert window.routed_experts.shape == (len(expected), LAYERS, ACTIVE)
  assert window.routed_experts.dtype == np.int16
  np.testing.assert_array_equal(
    window.routed_experts,
    np.broadcast_to(
      np.array(expected)[:, None, None], window.routed_experts.shape
    ),
  )


def test_what_the_tool_wrote_is_never_in_the_loss(chat, box):
  engine = Script(chat, f'{WRONG}\ntest', 'test', 'submit')
  found = _run(engine, chat=chat, box=box)
  [window] = found.windows
  trained = window.tokens[window.loss_mask]
  assert trained.tolist() == sum(engine.said, [])
  answer = chat.observation('f(1) gave 3, expected 2')
  text = window.tokens.tolist()
  places = [i for i in range(len(text)) if text[i : i + len(answer)] == answer]
  assert len(places) == 2
  for place in places:
    assert not window.loss_mask[place : place + len(answer)].any()


def test_answers_are_cut(chat, box):
  engine = Script(chat, 'test', 'submit')
  found = _run(engine, chat=chat, box=box, observation_chars=9)
  [window] = found.windows
  assert '<tool> f(1) gave\n' in found.text
  answer = chat.observation('f(1) gave')
  start = engine.prompts[0].size + len(engine.said[0])
  assert window.tokens[start : start + len(answer)].tolist() == answer
  assert records.group_from_bytes(records.group_to_bytes([found]))


def test_the_same_text_said_in_other_tokens_stays_as_it_was_said(chat, box):
  """Ids are never decoded and encoded again."""

  class Letters(Script):
    async def generate(self, prompt_ids, *, sampling):
      if self.said:
        return await super().generate(prompt_ids, sampling=sampling)
      whole, self._chat = self._chat, _OneByOne(self._chat)
      found = await super().generate(prompt_ids, sampling=sampling)
      self._chat = whole
      return found

  engine = Letters(chat, f'{RIGHT}\ntest', 'submit')
  found = _run(engine, chat=chat, box=box)
  assert found.reward == 1
  assert engine.said[0][:-1] != chat.encode(f'{RIGHT}\ntest')
  start = engine.prompts[0].size
  stop = start + len(engine.said[0])
  assert found.windows[0].tokens[start:stop].tolist() == engine.said[0]


class _OneByOne:
  """Encodes every character alone."""

  def __init__(self, chat):
    self.end_id, self._chat = chat.end_id, chat

  def encode(self, text):
    return [token for letter in text for token in self._chat.encode(letter)]
