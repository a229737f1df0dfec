"""The demonstrator knows the text of every line, and guesses where to look."""

import dataclasses
import re

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


def _edited_lines(text: str) -> list[int]:
  return [int(number) for number in re.findall(r'edit (\d+)\|', text)]


def test_a_run_solves_its_task_if_it_found_the_line(runs):
  solved = 0
  for number, run in enumerate(runs):
    task = _task(number)
    assert run.task_id == task.task_id and run.finish == 'submit'
    tools = [turn.tool for turn in run.turns]
    assert tools[-1] == 'submit' and set(tools[:-1]) <= {'test'}
    found = int(task.metadata['line']) in _edited_lines(run.text)
    assert run.reward == run.verdict.passed == found
    solved += found
    answers = [
      line[7:] for line in run.text.split('\n') if line.startswith('<tool> ')
    ]
    assert len(answers) == len(tools) - 1
    # Only what is wrong is gone on with; what passes is submitted.
    for answer in answers[:-1]:
      assert answer.startswith('f(0) gave 4, expected 3')
    if tools[-1:] == run.text.split('<agent> ')[-1].split('\n'):
      assert answers[-1] == 'ok'
  assert 0 < solved < len(runs)


def test_shares_of_the_kinds(runs):
  first = [run.text.split('<agent>')[1].split('<tool>')[0] for run in runs]
  tests = np.mean(['test' in text.split('\n') for text in first])
  several = np.mean([len(_edited_lines(text)) > 1 for text in first])
  # Three standard deviations of 60 draws are below 0.2.
  assert abs(tests - demonstrations.TESTS) < 0.2
  assert abs(several - demonstrations.THOROUGH) < 0.2


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


def test_no_line_is_tried_twice_and_the_turns_are_kept():
  generator = np.random.default_rng(0)
  for program in micro_functions.PROGRAMS:
    lines = program.source.rstrip('\n').split('\n')
    task = dataclasses.replace(
      _task(0),
      files={'solution.py': program.source},
      metadata={'line': '2', 'original': lines[1]},
    )
    for _ in range(20):
      turns = demonstrations.script(task, generator, turns=3)
      assert len(turns) <= 3 and turns[-1].endswith('submit')
      tried = _edited_lines('\n'.join(turns))
      assert len(set(tried)) == len(tried) > 0
      # A test that finds the bug is followed by nothing but the submit.
      if 2 in _edited_lines('\n'.join(turns[:-1])):
        assert turns[-1] == 'submit'
