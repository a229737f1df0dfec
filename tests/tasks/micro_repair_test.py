"""The generated task set: its bugs, its split and its fingerprint."""

import collections
import json

from swe17_jax.tasks import dataset, micro_functions, micro_repair, verifier
from swe17_jax.tasks import sandbox as sandbox_lib

GOLDEN = '73c2bac8f62ad53ff9583273c7cfc0104934ef8619803e195a85fb528b8db1b0'
SOURCES = {program.name: program.source for program in micro_functions.PROGRAMS}


def _lines(source):
  bugs = micro_repair.mutate(source)
  return [(bug.line, bug.kind, bug.buggy.strip()) for bug in bugs]


def test_edits_of_a_sum_by_hand():
  assert sorted(_lines('def f(a, b):\n  return a + b\n')) == [
    (2, 'arith', 'return a * b'),
    (2, 'arith', 'return a - b'),
    (2, 'variable', 'return a + a'),
    (2, 'variable', 'return b + b'),
  ]


def test_edits_of_a_loop_by_hand():
  source = 'def f(n):\n  while n > 0 and True:\n    n -= 2\n    break\n'
  assert sorted(_lines(source)) == [
    (2, 'bool', 'while n > 0 or True:'),
    (2, 'compare', 'while n < 0 and True:'),
    (2, 'compare', 'while n >= 0 and True:'),
    (2, 'constant', 'while n > 0 and False:'),
    (2, 'constant', 'while n > 1 and True:'),
    (3, 'assign', 'n += 2'),
    (3, 'assign', 'n = 2'),
    (3, 'constant', 'n -= 1'),
    (3, 'constant', 'n -= 3'),
    (4, 'flow', 'continue'),
  ]


def test_edits_of_bounds_and_calls_by_hand():
  source = 'def f(a):\n  return max(abs(a[:len(a) + 1]), 7)\n'
  kept = [edit for edit in _lines(source) if edit[1] in ('bound', 'call')]
  assert sorted(kept) == [
    (2, 'bound', 'return max(abs(a[:len(a) + 1 + 1]), 7)'),
    (2, 'bound', 'return max(abs(a[:len(a) + 1 - 1]), 7)'),
    (2, 'bound', 'return max(abs(a[:len(a)]), 7)'),
    (2, 'call', 'return max(a[:len(a) + 1], 7)'),
    (2, 'call', 'return min(abs(a[:len(a) + 1]), 7)'),
  ]


def test_golden_fingerprint_of_seed_0(tasks):
  # A change here changes every number measured on the task set.
  assert dataset.fingerprint(tasks) == GOLDEN


def test_the_same_program_gives_the_same_tasks_whatever_ran_before(box):
  program = micro_functions.PROGRAMS[1]
  first = micro_repair._program_tasks(program, 0, box)
  other = micro_repair._program_tasks(program, 1, box)
  assert micro_repair._program_tasks(program, 0, box) == first
  assert dataset.fingerprint(other) != dataset.fingerprint(first)


def test_size_and_balance(tasks):
  functions = collections.Counter(task.entry for task in tasks)
  assert len(tasks) >= 800
  assert set(functions) == set(SOURCES)
  assert min(functions.values()) >= 16
  assert max(functions.values()) <= micro_repair.BUGS_PER_FUNCTION
  assert len({task.task_id for task in tasks}) == len(tasks)


def test_programs_are_short():
  for program in micro_functions.PROGRAMS:
    assert 90 <= len(program.source) <= 220, program.name
    assert 6 <= len(program.arguments) <= 12, program.name


def test_each_task_differs_from_its_program_in_the_line_it_names(tasks):
  for task in tasks:
    good = SOURCES[task.entry].splitlines()
    bad = task.files['solution.py'].splitlines()
    assert len(good) == len(bad)
    changed = [i for i, pair in enumerate(zip(good, bad)) if len(set(pair)) > 1]
    line = int(task.metadata['line'])
    assert changed == [line - 1]
    assert good[line - 1] == task.metadata['original']
    assert bad[line - 1] == task.metadata['buggy']


def test_no_task_occurs_twice_not_even_over_the_split(tasks):
  sources = [task.files['solution.py'] for task in tasks]
  assert len(set(sources)) == len(sources)
  assert not set(sources) & set(SOURCES.values())


def test_split_is_new_bugs_in_known_places(tasks):
  train = [task for task in tasks if task.split == 'train']
  heldout = [task for task in tasks if task.split == 'heldout']
  assert len(heldout) >= 200
  assert 0.2 <= len(heldout) / len(tasks) <= 0.3

  def places(part):
    return {(task.entry, task.metadata['line']) for task in part}

  def pairs(part):
    return {(task.entry, task.metadata['buggy']) for task in part}

  assert places(heldout) <= places(train)
  assert places(train) == places(tasks)
  assert not pairs(heldout) & pairs(train)


def test_the_correct_program_passes_and_the_bugs_fail(tasks, box):
  gold = {task.entry: task for task in tasks}
  for task in gold.values():
    files = {'solution.py': SOURCES[task.entry]}
    verdict = verifier.verify(task, files, sandbox=box)
    assert verdict.passed and verdict.calls_passed == verdict.calls
    assert verifier.run_visible(task, files, sandbox=box) == 'ok'
  for task in tasks[::5]:
    verdict = verifier.verify(task, task.files, sandbox=box)
    assert not verdict.passed and verdict.infra_error is None
    assert verifier.run_visible(task, task.files, sandbox=box) != 'ok'


def test_expected_values_equal_those_of_plain_python(tasks):
  # A slow twin of the sandbox: run the correct programs right here.
  for task in {task.entry: task for task in tasks}.values():
    space = {}
    exec(SOURCES[task.entry], space)
    for call in (*task.visible, *task.hidden):
      value = space[task.entry](*json.loads(call.arguments))
      assert json.loads(call.expected) == value


def test_a_program_that_fails_its_own_calls_is_refused(box):
  program = micro_functions.Program('def f(a):\n  return a[0]\n', ([[]],))
  try:
    micro_repair._program_tasks(program, 0, box)
  except ValueError as error:
    assert 'f fails its own calls: IndexError' in str(error)
  else:
    raise AssertionError('no error')


def test_sandbox_is_the_only_judge_of_a_bug(box):
  # `x * 1 -> x * 2` never shows when every call is 0: no task comes of it.
  program = micro_functions.Program('def f(x):\n  return x * 1\n', ([0],))
  kept = micro_repair._program_tasks(program, 0, box)
  assert [task.metadata['buggy'] for task in kept] == [
    bug.buggy
    for bug in micro_repair._interleave(
      micro_repair.mutate(program.source), '0/f'
    )
    if box.run([sandbox_lib.Job(bug.source, 'f', ('[0]',))])[0].outputs
    != ('0',)
  ]
  assert '  return x * 2' not in [task.metadata['buggy'] for task in kept]
