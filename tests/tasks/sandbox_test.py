"""The sandbox against programs that misbehave, in every mode that works."""

import json
import os
import pathlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.tasks import sandbox as sandbox_lib
from swe17_jax.tasks import sandbox_runner
from swe17_jax.tasks.sandbox import Job, JobResult, Sandbox, SandboxError

GOOD = Job('def f(x): return x + 1', 'f', ('[1]', '[5]'))
GOOD_RESULT = JobResult(('2', '6'), '', False)
ISOLATED = ('bwrap', 'unshare')


@pytest.fixture(scope='module', params=sandbox_lib.MODES)
def any_box(request):
  try:
    sandbox = Sandbox(mode=request.param)
  except SandboxError as error:
    pytest.skip(str(error))
  with sandbox:
    yield sandbox


def run(sandbox, source, *calls):
  return sandbox.run([Job(source, 'f', calls or ('[1]',))])[0]


# Name, source, part of the error. Each must give no output at all.
ATTACKS = (
  ('exit', 'import os\ndef f(x): os._exit(0)', 'ended early'),
  ('system exit', 'import sys\ndef f(x): sys.exit(0)', 'SystemExit'),
  ('exit on import', 'import os\nos._exit(0)\ndef f(x): 1', 'ended early'),
  ('loop', 'def f(x):\n  while True: pass', 'timed out'),
  (
    'loop that ignores the timer',
    'import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n'
    'def f(x):\n  while True: pass',
    'killed by signal',
  ),
  ('memory', 'def f(x): return len("x" * (1 << 30))', 'MemoryError'),
  ('long value', 'def f(x): return "x" * 70000', 'ValueError'),
  (
    'flood of its pipe',
    'import os\ndef f(x):\n  while True: os.write(3, b"+2" * 9999)',
    'flooded',
  ),
  (
    'fork bomb',
    'import os\ndef f(x):\n  while True: os.fork()',
    'BlockingIOError',
  ),
  (
    'threads',
    'import _thread\ndef f(x): _thread.start_new_thread(f, (x,))',
    "can't start new thread",
  ),
  (
    'always equal',
    'class E:\n  def __eq__(s, o): return True\ndef f(x): return E()',
    'not JSON serializable',
  ),
  (
    'json patched',
    'import json\njson.dumps = lambda *a, **k: 1 / 0\ndef f(x): return x + 1',
    'ZeroDivisionError',
  ),
  ('not a number', 'def f(x): return float("nan")', 'ValueError'),
  ('huge integer', 'def f(x): return 10 ** 9999', 'ValueError'),
  ('recursion', 'def f(x): return f(x)', 'RecursionError'),
  (
    'deep value',
    'def f(x):\n  a = []\n  for _ in range(99999): a = [a]\n  return a',
    'RecursionError',
  ),
  (
    'error that cannot be shown',
    'class E(Exception):\n  def __str__(s): return 1\ndef f(x): raise E',
    'cannot be read',
  ),
  ('syntax', 'def f(x) return', 'SyntaxError'),
  ('no function', 'g = 1', 'KeyError'),
  ('NUL', 'def f(x): return "\0"', 'null bytes'),
)


@pytest.mark.parametrize('_, source, error', ATTACKS, ids=lambda v: v[:14])
def test_an_attack_gives_no_output_and_the_next_job_works(
  any_box, _, source, error
):
  result, after = any_box.run([Job(source, 'f', ('[1]', '[2]')), GOOD])
  assert result.outputs == (None, None)
  assert error in result.error
  assert len(result.error) <= sandbox_runner.ERROR_CHARS
  assert after == GOOD_RESULT


# These try to reach something; the reason they fail depends on the mode.
OUTSIDE = {
  'network': 'import socket\ndef f(x):\n'
  '  s = socket.create_connection(("127.0.0.1", PORT), 1)\n  return "in"',
  'environment': 'def f(x): return open("/proc/1/environ").read()',
  'memory of the runner': 'def f(x): return open("/proc/1/mem", "rb").read(1)',
  'write': 'def f(x): open("/tmp/swe17-write", "w").close()',
  'write in place': 'def f(x): open("swe17-write", "w").close()',
  'directory': 'import os\ndef f(x): os.mkdir("/dev/shm/swe17-write")',
  'this repository': f'def f(x): return open({__file__!r}).read()',
  'password file': 'def f(x): return open("/etc/passwd").read()',
  'become root': 'import os\ndef f(x): os.setuid(7)',
  'chroot': 'import os\ndef f(x): os.chroot(".")',
}


@pytest.mark.parametrize('name', OUTSIDE)
def test_nothing_outside_is_reached(any_box, name):
  if any_box.mode not in ISOLATED:
    pytest.skip('rlimits mode does not isolate, and warns of it')
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    result = run(any_box, OUTSIDE[name].replace('PORT', str(port)))
  assert result.outputs == (None,)
  assert result.error.partition(':')[0] in (
    'ConnectionRefusedError',
    'FileNotFoundError',
    'ModuleNotFoundError',
    'OSError',
    'PermissionError',
  )
  assert any_box.run([GOOD]) == [GOOD_RESULT]


def test_signals_do_not_reach_the_runner(any_box):
  if any_box.mode not in ISOLATED:
    pytest.skip('without a pid namespace the runner has no protection')
  result = run(
    any_box,
    'import os, signal\ndef f(x):\n'
    '  for s in (1, 2, 9, 11, 15, 19): os.kill(os.getppid(), s)\n'
    '  return os.getppid()',
  )
  assert result == JobResult(('1',), '', False)
  assert any_box.run([GOOD]) == [GOOD_RESULT]


def test_installed_packages_are_not_visible(any_box):
  # This project may be one of them, with the correct programs in it.
  result = run(any_box, 'import numpy\ndef f(x): return 1')
  assert result.outputs == (None,)


def test_a_hang_keeps_the_calls_before_it(any_box):
  source = 'def f(x):\n  while x == 2: pass\n  return x'
  result = run(any_box, source, '[1]', '[2]', '[3]')
  assert result == JobResult(('1', None, None), 'timed out', True)


def test_a_sleeper_meets_the_wall_limit(box):
  result = run(box, 'import time\ndef f(x): time.sleep(60)')
  assert result == JobResult((None,), 'timed out', True)
  assert box.run([GOOD]) == [GOOD_RESULT]


def test_jobs_share_no_state(any_box):
  source = (
    'import math\nn = getattr(math, "n", 0)\nmath.n = 1\ndef f(): return n'
  )
  results = any_box.run([Job(source, 'f', ('[]',))] * 2)
  assert [result.outputs for result in results] == [('0',), ('0',)]


VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**30), 10**30)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_json_values_survive_the_way_in_and_out(box, values):
  texts = tuple(json.dumps(value, sort_keys=True) for value in values)
  result = run(box, 'def f(x): return x', *(f'[{text}]' for text in texts))
  assert result == JobResult(texts, '', False)


def test_order_of_jobs_does_not_matter(box):
  jobs = [Job(f'def f(x): return x * {n}', 'f', ('[3]',)) for n in range(9)]
  forward, backward = box.run(jobs), box.run(jobs[::-1])
  assert forward == backward[::-1]
  assert [result.outputs for result in forward] == [
    (str(3 * n),) for n in range(9)
  ]


def test_threads_get_their_own_results(box):
  results = {}

  def work(n):
    job = Job(f'def f(x): return {n}', 'f', ('[0]',))
    results[n] = box.run([job] * 5)

  threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for n in range(4):
    assert [result.outputs for result in results[n]] == [(str(n),)] * 5


def test_a_dead_runner_is_replaced():
  with Sandbox() as sandbox:
    sandbox._process.kill()
    assert sandbox.run([GOOD, GOOD]) == [GOOD_RESULT] * 2


def test_a_sandbox_made_in_a_thread_that_ended_still_works():
  made = []
  thread = threading.Thread(target=lambda: made.append(Sandbox()))
  thread.start()
  thread.join()
  with made[0] as sandbox:
    assert sandbox.run([GOOD] * 3) == [GOOD_RESULT] * 3


def test_a_job_that_always_takes_the_runner_down_is_an_infra_error(
  monkeypatch,
):
  with Sandbox() as sandbox:

    def die(job):
      raise sandbox_lib._RunnerDied('its output is closed')

    monkeypatch.setattr(sandbox, '_start', lambda mode: None)
    monkeypatch.setattr(sandbox, '_exchange', die)
    with pytest.raises(SandboxError, match='died 3 times on one job'):
      sandbox.run([GOOD])


def test_an_interrupted_reply_does_not_answer_the_next_job(monkeypatch):
  with Sandbox() as sandbox:
    read = sandbox._read_frame

    def interrupt(timeout_s):
      monkeypatch.setattr(sandbox, '_read_frame', read)
      raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, '_read_frame', interrupt)
    with pytest.raises(KeyboardInterrupt):
      run(sandbox, 'def f(x): return "late"')
    assert sandbox.run([GOOD]) == [GOOD_RESULT]


def _namespace_members(namespace):
  members = []
  for entry in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if os.readlink(entry / 'ns/pid') == namespace:
        members.append(int(entry.name))
    except OSError:
      continue  # it ended, or is not ours
  return members


def _runner_namespace(sandbox):
  """The pid namespace of the runner, which is the child of the starter."""
  parent = sandbox._process.pid
  children = pathlib.Path(f'/proc/{parent}/task/{parent}/children')
  return os.readlink(f'/proc/{children.read_text().split()[0]}/ns/pid')


@pytest.mark.parametrize('mode', ISOLATED)
def test_daemons_end_with_their_job(mode, monkeypatch, tmp_path):
  # The process limit would stop them earlier: take it away.
  text = pathlib.Path(sandbox_runner.__file__).read_text()
  weak = tmp_path / 'runner.py'
  weak.write_text(text.replace('(resource.RLIMIT_NPROC, 0)', '(7, 50)'))
  assert weak.read_text() != text
  monkeypatch.setattr(sandbox_runner, '__file__', str(weak))
  try:
    sandbox = Sandbox(mode=mode)
  except SandboxError as error:
    pytest.skip(str(error))
  daemon = (
    'import os, signal, time\ndef f(x):\n'
    '  pid = os.fork()\n'
    '  if pid: return pid\n'
    '  os.setsid()\n'
    '  signal.signal(15, signal.SIG_IGN)\n'
    '  os.closerange(0, 99)\n'
    '  time.sleep(600)'
  )
  alive = 'import os\ndef f(pid): return os.kill(pid, 0)'
  with sandbox:
    [pid] = run(sandbox, daemon).outputs
    assert int(pid) > 1
    assert 'ProcessLookupError' in run(sandbox, alive, f'[{pid}]').error
    namespace = None
    if os.geteuid() == 0:
      namespace = _runner_namespace(sandbox)
      assert len(_namespace_members(namespace)) == 1
  if namespace:
    assert not _namespace_members(namespace)


def test_close_leaves_no_process_and_ends_the_sandbox():
  sandbox = Sandbox()
  pid = sandbox._process.pid
  sandbox.close()
  sandbox.close()
  assert not os.path.exists(f'/proc/{pid}')
  with pytest.raises(SandboxError, match='closed'):
    sandbox.run([GOOD])


def test_a_missing_tool_is_named_with_its_fix(monkeypatch):
  monkeypatch.setattr(sandbox_lib.shutil, 'which', lambda name: None)
  with pytest.raises(SandboxError, match='apt install bubblewrap'):
    Sandbox(mode='bwrap')


def test_auto_falls_back_with_one_warning_for_each_weaker_mode(monkeypatch):
  warnings = []
  monkeypatch.setattr(sandbox_lib.shutil, 'which', lambda name: None)
  monkeypatch.setattr(
    sandbox_lib.logging,
    'warning',
    lambda text, *args: warnings.append(text % args),
  )
  with Sandbox() as sandbox:
    assert sandbox.mode == 'rlimits'
    assert sandbox.run([GOOD]) == [GOOD_RESULT]
  assert len(warnings) == 3
  assert 'apt install bubblewrap' in warnings[0]
  assert 'util-linux' in warnings[1]
  assert 'jobs reach the network' in warnings[2]


def test_an_unknown_mode_is_refused():
  with pytest.raises(ValueError, match="mode='docker'"):
    Sandbox(mode='docker')
