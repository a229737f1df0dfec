"""Verdicts, and what the agent reads of a visible call."""

import pytest

from swe17_jax.core import records
from swe17_jax.tasks import sandbox as sandbox_lib
from swe17_jax.tasks import verifier

CALLS = (
  records.Call('[3, [1]]', '3'),
  records.Call('[0, []]', '0'),
  records.Call('[2, [5, 6]]', '4'),
)
TASK = records.Task('t', 'train', 'Fix it.', {}, 'f', CALLS[:1], CALLS, {})


class BrokenSandbox:
  def run(self, jobs):
    raise sandbox_lib.SandboxError('no namespaces left')


def _verify(box, source):
  return verifier.verify(TASK, {'solution.py': source}, sandbox=box)


def _visible(box, body):
  files = {'solution.py': f'def f(n, a):\n  {body}\n'}
  return verifier.run_visible(TASK, files, sandbox=box)


def test_a_correct_program_passes_by_hand(box):
  verdict = _verify(box, 'def f(n, a): return n * len(a)')
  assert verdict == records.Verdict(True, 3, 3)


def test_calls_are_counted_by_hand(box):
  verdict = _verify(box, 'def f(n, a): return n if a else 0')
  assert verdict == records.Verdict(False, 2, 3, 'wrong value')


def test_the_first_error_is_the_detail(box):
  verdict = _verify(box, 'def f(n, a): return n * (a[0] * 0 + len(a))')
  expected = 'IndexError: list index out of range'
  assert verdict == records.Verdict(False, 2, 3, expected)


@pytest.mark.parametrize(
  'value',
  ('3.0', 'True', '"3"', '[3]', 'type("I", (int,), {"__eq__": any})(4)'),
)
def test_what_is_not_the_same_json_fails(box, value):
  source = f'def f(n, a): return {value} if n == 3 else n * len(a)'
  assert _verify(box, source) == records.Verdict(False, 2, 3, 'wrong value')


def test_a_forged_pipe_line_is_no_pass(box):
  source = 'import os\ndef f(n, a):\n  os.write(3, b"+pass\\n" * 3)\n  return 0'
  verdict = _verify(box, source)
  assert not verdict.passed and verdict.calls_passed == 0


def test_a_missing_file_is_a_failure_not_an_infra_error(box):
  verdict = verifier.verify(TASK, {'other.py': ''}, sandbox=box)
  assert verdict == records.Verdict(False, 0, 3, 'no file solution.py')
  line = verifier.run_visible(TASK, {}, sandbox=box)
  assert line == 'no file solution.py'


def test_a_broken_sandbox_is_an_infra_error_not_a_failure():
  files = {'solution.py': 'def f(n, a): return n * len(a)'}
  verdict = verifier.verify(TASK, files, sandbox=BrokenSandbox())
  assert not verdict.passed
  assert verdict.infra_error == 'no namespaces left'
  with pytest.raises(sandbox_lib.SandboxError):
    verifier.run_visible(TASK, files, sandbox=BrokenSandbox())


def test_many_equal_one_by_one(box):
  sources = ('return n * len(a)', 'return n', 'return a[9]', 'while 1: pass')
  items = [(TASK, {'solution.py': f'def f(n, a): {s}'}) for s in sources]
  verdicts = verifier.verify_many(items, sandbox=box)
  assert [verdict.calls_passed for verdict in verdicts] == [3, 2, 0, 0]
  assert verdicts == [
    verifier.verify(task, files, sandbox=box) for task, files in items
  ]


@pytest.mark.parametrize(
  'body, line',
  (
    ('return n * len(a)', 'ok'),
    ('return 2', 'f(3, [1]) gave 2, expected 3'),
    ('return None', 'f(3, [1]) gave None, expected 3'),
    ('return a[7]', 'f(3, [1]) raised IndexError'),
    ('while True: pass', 'f(3, [1]) timed out'),
    ('import os; os._exit(0)', 'f(3, [1]) ended early'),
    ('return n +', 'f(3, [1]) raised SyntaxError'),
    ('return "x" * 500', "f(3, [1]) gave '" + 'x' * 64),
    ('return "\\x1b[2J\\n"', "f(3, [1]) gave '\\x1b[2J\\n', expected 3"),
  ),
)
def test_lines_that_the_agent_reads(box, body, line):
  assert _visible(box, body) == line
  assert len(line) <= verifier.LINE_CHARS
