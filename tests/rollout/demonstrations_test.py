"""The expert solves every task, in each of its ways."""

import dataclasses

import numpy as np
import pytest

from swe17_jax.core import records
from swe17_jax.rollout import demonstrations, harness
from swe17_jax.tasks import micro_functions

CONFIG = harness.HarnessConfig(max_tokens=2000, observation_chars=200)
ROUTED = (3, 2)


def _task(number: int) -> records.Task:
  """A program whose `+ 1` became `+ 2` in one of three places."""
  lines = ['def f(x):', '  a = x + 1', '  b = a + 1', '  c = b + 1']
  lines += ['  return c']
  line = 2 + number % 3
  original, lines[line - 1] = lines[line - 1], lines[line - 1][:-1] + '2'
  return records.Task(
    task_id=f'f/L{line}/{number}',
    split='train',
    instruction='Fix the bug.',
    files={'solution.py': '\n'.join(lines) + '\n'},
    entry='f',
    visible=(records.Call('[0]', '3'),),
    hidden=(records.Call('[1]', '4'), records.Call('[5]', '8')),
    metadata={'line': str(line), 'original': original},
  )


def _record(tasks, *, chat, box, seed=0):
  return demonstrations.record(
    tasks,
    chat=chat,
    sandbox=box,
    config=CONFIG,
    routed_shape=ROUTED,
    seed=seed,
  )


@pytest.fixture(scope='module')
def runs(chat, box):
  return _record([_task(i) for i in range(60)], chat=chat, box=box)


def test_every_kind_of_run_solves_its_task(runs):
  kinds = set()
  for number, run in enumerate(runs):
    assert run.task_id == _task(number).task_id
    assert run.verdict.passed and run.reward == 1 and run.finish == 'submit'
    tools = [turn.tool for turn in run.turns]
    assert tools[-1] == 'submit' and set(tools[:-1]) <= {'test'}
    answers = [
      line[7:] for line in run.text.split('\n') if line.startswith('<tool> ')
    ]
    # Every test fails but the last one.
    assert len(answers) == len(tools) - 1
    if answers:
      assert answers[-1] == 'ok'
    for answer in answers[:-1]:
      assert answer.startswith('f(0) gave 4, expected 3')
    kinds.add(len(tools))
  # Without a test; with one that passes; after one and after two misses.
  assert kinds == {1, 2, 3, 4}


def test_shares_of_the_kinds(runs):
  turns = np.array([len(run.turns) for run in runs])
  tested, retried = demonstrations.TESTED, demonstrations.RETRIED
  # Three standard deviations of 60 draws are below 0.2.
  assert abs((turns == 1).mean() - (1 - tested - retried)) < 0.2
  assert abs((turns >= 3).mean() - retried) < 0.2


def test_records_are_fit_for_imitation(runs, chat):
  for run in runs:
    [window] = run.windows
    assert (window.routed_experts == -1).all()
    assert window.routed_experts.shape[1:] == ROUTED
    assert not window.weight_versions[window.loss_mask].any()
    for turn in run.turns:
      assert window.tokens[turn.stop - 1] == chat.end_id
      assert window.loss_mask[turn.start : turn.stop].all()
  assert records.group_from_bytes(records.group_to_bytes(runs[:3]))


def test_a_miss_rewrites_lines_that_were_right(runs):
  """A wrong suspicion teaches to look on, not to break a program."""
  for number, run in enumerate(runs):
    task = _task(number)
    source = task.files['solution.py']
    for line in run.text.split('\n'):
      text = line.removeprefix('<agent> ')
      if not text.startswith('edit '):
        continue
      place, new = text.removeprefix('edit ').split('|', 1)
      old = source.split('\n')[int(place) - 1]
      if place == task.metadata['line']:
        assert new == task.metadata['original']
      else:
        assert new == old


def test_the_seed_decides(chat, box, runs):
  tasks = [_task(i) for i in range(8)]
  again = _record(tasks, chat=chat, box=box)
  assert [run.text for run in again] == [run.text for run in runs[:8]]
  other = _record(tasks, chat=chat, box=box, seed=1)
  assert [run.text for run in other] != [run.text for run in again]


def test_an_expert_that_fails_is_an_error(chat, box):
  task = _task(0)
  wrong = dataclasses.replace(
    task, metadata=task.metadata | {'original': '  a = x + 3'}
  )
  with pytest.raises(
    demonstrations.DemonstrationError, match='f/L2/0 does not solve it'
  ):
    _record([wrong], chat=chat, box=box)


def test_choose_distinct_training_tasks():
  tasks = [_task(i) for i in range(20)]
  tasks += [
    dataclasses.replace(_task(i), split='heldout') for i in range(20, 25)
  ]
  chosen = demonstrations.choose(tasks, count=12, seed=0)
  names = [task.task_id for task in chosen]
  assert len(set(names)) == 12
  assert {task.split for task in chosen} == {'train'}
  assert names == [
    task.task_id for task in demonstrations.choose(tasks, count=12, seed=0)
  ]
  assert names != [
    task.task_id for task in demonstrations.choose(tasks, count=12, seed=1)
  ]
  everything = demonstrations.choose(tasks, count=20, seed=3)
  assert len({task.task_id for task in everything}) == 20
  with pytest.raises(
    demonstrations.DemonstrationError, match='21 demonstrations need .* are 20'
  ):
    demonstrations.choose(tasks, count=21, seed=0)


def test_the_shortest_program_has_a_line_to_suspect():
  """`script` takes wrong lines out of those that are right."""
  generator = np.random.default_rng(0)
  for program in micro_functions.PROGRAMS:
    lines = program.source.rstrip('\n').split('\n')
    assert len(lines) >= 2
    task = dataclasses.replace(
      _task(0),
      files={'solution.py': program.source},
      metadata={'line': '2', 'original': lines[1]},
    )
    for _ in range(20):
      turns = demonstrations.script(task, generator)
      assert turns[-1].endswith('submit')
      assert any(f'edit 2|{lines[1]}' in turn for turn in turns)
