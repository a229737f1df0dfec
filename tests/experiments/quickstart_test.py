"""The quickstart's programs as a person runs them, at a tiny scale.

The model has learned next to nothing here; what is tested is what holds a run
together: resolved settings, one sentence on an error, resuming after any kind
of end, no process left behind, a final line and a report.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from swe17_jax.analysis import report
from swe17_jax.core import metrics

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc'),
]

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 24
SFT = (
  *('model.hidden_size=32', 'model.num_hidden_layers=2'),
  *('model.num_experts=4', 'model.moe_intermediate_size=16'),
  *('cold_start.steps=6', 'cold_start.demonstrations=20'),
  'cold_start.save_every=3',
)
RL = (
  *(f'train.steps={STEPS}', 'worker.eval_every=100'),
  *('dispatch.groups_per_step=2', 'dispatch.group_size=2'),
)
RESULTS = (
  *('heldout_before', 'heldout_after', 'entropy_first', 'entropy_last'),
  *('mismatch_kl_max', 'versions_applied', 'tokens_per_s', 'wall_s'),
)
END_S = 120  # until a program counts as hung; a loaded machine is slow


def _command(program, *arguments, settings=()):
  path = ROOT / 'experiments' / f'{program}.py'
  overrides = [f'--set={setting}' for setting in settings]
  return [sys.executable, str(path), *map(str, arguments), *overrides]


def _environment():
  # One device, as a person has; the tests' own setting is eight.
  changes = {'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '1'}
  return os.environ | changes


def _run(program, *arguments, settings=()):
  return subprocess.run(
    _command(program, *arguments, settings=settings),
    env=_environment(),
    capture_output=True,
    text=True,
    timeout=END_S,
  )


def _one_sentence(done, program, *parts):
  assert done.returncode == 1, done.stderr
  assert 'Traceback' not in done.stderr
  last = done.stderr.strip().split('\n')[-1]
  assert last.startswith(f'{program}: '), done.stderr
  for part in parts:
    assert part in last


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('quickstart')


@pytest.fixture(scope='module')
def init(folder):
  """The workdir of a finished cold start."""
  done = _run('sft', f'--workdir={folder / "sft"}', settings=SFT)
  assert done.returncode == 0, done.stderr
  return folder / 'sft'


# --------------------------------------------------------------- the surface


PROGRAMS = {
  'sft': ('--workdir={}/nowhere',),
  'train_rl': ('--workdir={}/nowhere', '--init={}/nothing'),
  'rollout': ('--store={}/nowhere', '--model={}/m', '--tasks={}/t'),
}


@pytest.mark.parametrize('program', PROGRAMS)
def test_help(program):
  done = _run(program, '--help')
  assert done.returncode in (0, 1)  # absl ends with 1
  assert done.stderr == ''
  for flag in ('--set', '--seed', '--[no]dry_run'):
    if (program, flag) != ('rollout', '--seed'):
      assert f'  {flag}: ' in done.stdout
  for argument in PROGRAMS[program]:
    assert f'  {argument.split("=")[0]}: ' in done.stdout
  assert 'Command:   python experiments/' in done.stdout


@pytest.mark.parametrize('program', PROGRAMS)
def test_dry_run_prints_the_configuration_and_does_nothing(program, tmp_path):
  arguments = [text.format(tmp_path) for text in PROGRAMS[program]]
  done = _run(program, '--dry_run', *arguments, settings=['train.steps=77'])
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines == sorted(lines)
  assert 'train.steps = 77' in lines
  golden = (ROOT / 'tests/golden/tiny_config.txt').read_text().splitlines()
  assert [x for x in golden if x not in lines] == [
    x for x in golden if x.startswith('train.steps = ')
  ]
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('program', PROGRAMS)
def test_a_wrong_setting_is_one_sentence(program, tmp_path):
  arguments = [text.format(tmp_path) for text in PROGRAMS[program]]
  done = _run(program, *arguments, settings=['trian.steps=77'])
  _one_sentence(done, program, "no field 'trian'", "did you mean 'train'?")
  assert not list(tmp_path.iterdir())


def test_a_setting_that_fits_nothing_is_one_sentence(tmp_path):
  done = _run(
    'sft', f'--workdir={tmp_path}', settings=['harness.max_tokens=9000']
  )
  _one_sentence(done, 'sft', 'harness.max_tokens=9000 is above')


def test_a_missing_cold_start_is_one_sentence(tmp_path):
  done = _run(
    'train_rl', f'--workdir={tmp_path / "rl"}', f'--init={tmp_path / "sft"}'
  )
  _one_sentence(done, 'train_rl', 'no finished cold start', 'experiments/sft')


# ---------------------------------------------------------------- cold start


def test_cold_start_ends_at_once_when_it_is_done(init):
  before = {path: path.stat().st_mtime_ns for path in init.rglob('*')}
  done = _run('sft', f'--workdir={init}', settings=SFT)
  assert done.returncode == 0, done.stderr
  assert before == {path: path.stat().st_mtime_ns for path in init.rglob('*')}


def test_too_many_demonstrations_are_one_sentence(tmp_path):
  settings = ['cold_start.demonstrations=100000']
  done = _run('sft', f'--workdir={tmp_path}', settings=settings)
  _one_sentence(done, 'sft', '100000 demonstrations need as many')


# ------------------------------------------------------------------- training


class Run:
  """A running train_rl.py, in a process group as a terminal makes one."""

  def __init__(self, workdir, init):
    self._metrics = workdir / 'metrics.jsonl'
    self.log = workdir.parent / f'{workdir.name}.stderr'
    with self.log.open('w') as log:
      self.process = subprocess.Popen(
        _command(
          'train_rl', f'--workdir={workdir}', f'--init={init}', settings=RL
        ),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
      )

  def wait_for_step(self, step) -> set[tuple[int, str]]:
    """Waits for the row of a step; returns the processes below, see `_tree`."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
      assert self.process.poll() is None, self.log.read_text()
      if self._metrics.exists() and step in _trained(self._metrics):
        return _tree(self.process.pid)
      time.sleep(0.02)
    raise AssertionError(f'no step {step}: {self.log.read_text()}')


def _trained(path) -> list[int]:
  """Returns the steps with a training row; the last line may be cut."""
  rows = path.read_text().split('\n')[:-1]
  rows = [json.loads(row) for row in rows]
  return [row['step'] for row in rows if 'train/reward' in row]


def _stat(pid) -> list[str] | None:
  """Returns the fields of /proc/PID/stat after the name, None for the dead."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return None
  fields = text.rpartition(')')[2].split()
  return None if fields[0] in 'ZX' else fields


def _tree(root) -> set[tuple[int, str]]:
  """Returns (pid, start time) of every process below `root`."""
  found = {int(p.name) for p in pathlib.Path('/proc').glob('[0-9]*')}
  stats = {pid: stat for pid in found if (stat := _stat(pid))}
  below, more = set(), {root}
  while more:
    below |= more
    more = {p for p, s in stats.items() if int(s[1]) in below} - below
  return {(pid, stats[pid][19]) for pid in below - {root} if pid in stats}


def _assert_gone(processes) -> None:
  until = time.monotonic() + END_S
  left = processes
  while left and time.monotonic() < until:
    left = {
      (pid, start)
      for pid, start in left
      if (stat := _stat(pid)) and stat[19] == start
    }
    time.sleep(0.05)
  assert not left


@pytest.fixture
def runs():
  """Starts runs; ends what is left of them."""
  started = []

  def start(workdir, init):
    started.append(Run(workdir, init))
    return started[-1]

  yield start
  for run in started:
    if run.process.poll() is None:
      run.process.kill()
    run.process.wait()
    run.process.stdout.close()


def test_a_run_survives_kill_and_ctrl_c(folder, init, runs):
  workdir = folder / 'rl'
  killed = runs(workdir, init)
  below = killed.wait_for_step(3)
  assert len(below) >= 2  # the rollout worker and its sandbox
  killed.process.kill()
  assert killed.process.wait() == -signal.SIGKILL
  _assert_gone(below)
  rows = _trained(workdir / 'metrics.jsonl')

  stopped = runs(workdir, init)
  below = stopped.wait_for_step(max(rows) + 2)
  os.killpg(stopped.process.pid, signal.SIGINT)
  assert stopped.process.wait(END_S) in (0, 130)
  _assert_gone(below)
  assert 'the same command resumes' in stopped.log.read_text()
  assert 'Traceback' not in stopped.log.read_text()
  rows = _trained(workdir / 'metrics.jsonl')
  assert max(rows) < STEPS - 1

  last = runs(workdir, init)
  below = last.wait_for_step(max(rows) + 1)
  output, _ = last.process.communicate(timeout=END_S)
  assert last.process.returncode == 0, last.log.read_text()
  _assert_gone(below)

  results = json.loads(output.strip().split('\n')[-1])
  assert set(RESULTS) <= set(results)
  assert 0 <= results['mismatch_kl_max'] <= 1e-3
  assert results['versions_applied'] >= 1
  assert 0 <= results['heldout_before'] <= 1 >= results['heldout_after'] >= 0
  found = metrics.read(workdir / 'metrics.jsonl')
  assert report.gaps(found) == []
  assert _trained(workdir / 'metrics.jsonl') == list(range(STEPS))
  evaluated = [row['step'] for row in found if 'heldout/reward' in row]
  assert sorted(evaluated) == [0, STEPS]
  page = (workdir / 'report.html').read_text()
  assert page.rstrip().endswith('</html>') and '<svg' in page
  assert list((workdir / 'tensorboard').iterdir())
  config = (workdir / 'config.txt').read_text()
  assert f'train.steps = {STEPS}\n' in config
  store = workdir / 'store/rollouts/train'
  assert len(list(store.iterdir())) == 2 * STEPS


def test_a_worker_that_cannot_start_ends_the_run(folder, init, runs):
  broken = folder / 'broken'
  shutil.copytree(init, broken)
  (broken / 'tasks.jsonl').unlink()
  run = runs(folder / 'hopeless', broken)
  assert run.process.wait(END_S) == 1
  log = run.log.read_text()
  assert 'Traceback' not in log
  assert 'the rollout worker died 6 times; see' in log.split('\n')[-2]
  worker = (folder / 'hopeless' / 'rollout.log').read_text()
  assert worker.count('rollout: ') == 6 and 'tasks.jsonl' in worker
