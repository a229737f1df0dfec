"""Runs untrusted Python functions away from everything they could misuse.

One long-lived runner (`sandbox_runner`) is started inside namespaces and
forks a child per job, so that a job costs about two milliseconds. The
expected values of a task never enter: jobs carry arguments, results come
back as JSON text, and the comparison happens here, outside, where nothing
that a job does can reach it.

Modes, strongest first; 'auto' takes the first that really runs a job:

    bwrap     own file system (read-only Python alone, no /proc, nothing
              writable), network, processes, users; as pid 1
    unshare   the same namespaces from util-linux, in an empty root
    rlimits   limits on time, memory, processes and files only

Started by root, the runner becomes an unprivileged user first: the kernel
does not apply process limits to root.

Example:
  >>> with Sandbox() as sandbox:
  ...   sandbox.run([Job('def f(x): return x + 1', 'f', ('[1]',))])
  [JobResult(outputs=('2',), error='', timed_out=False)]
"""

import dataclasses
import glob
import itertools
import json
import os
import pathlib
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from absl import logging

from swe17_jax.tasks import sandbox_runner

MODES = ('bwrap', 'unshare', 'rlimits')
_ATTEMPTS = 3  # runners that one job may take down before it is given up
_START_S = 20.0
_REPLY_S = sandbox_runner.WALL_S + 20.0  # a loaded machine is slow
_FIRST_UID, _UIDS = 61184, 4336  # the range that systemd keeps for services
_ENVIRONMENT = {'PYTHONHASHSEED': '0'}
_counter = itertools.count()
_FIXES = {
  'bwrap': (
    'install bubblewrap (apt install bubblewrap) and allow unprivileged user '
    'namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0, or '
    'an AppArmor profile for bwrap; in a container: --privileged)'
  ),
  'unshare': (
    'install util-linux and allow user namespaces (sysctl '
    'kernel.unprivileged_userns_clone=1; in a container: --privileged)'
  ),
  'rlimits': 'run on Linux with a Python that may fork',
}


class SandboxError(RuntimeError):
  """The sandbox itself does not work: an infra error, never a failed task."""


class _RunnerDied(Exception):
  """The runner went away or went silent; start another."""


@dataclasses.dataclass(frozen=True)
class Job:
  """One program and the calls to make, in one fresh process."""

  source: str
  entry: str  # name of the function that `source` defines
  calls: tuple[str, ...]  # JSON argument lists


@dataclasses.dataclass(frozen=True)
class JobResult:
  """What came back.

  Attributes:
    outputs: per call canonical JSON of the value; None where the call
      raised, was cut off, or returned something that JSON cannot carry.
    error: the first reason of a None, such as 'IndexError: ...'; else ''.
    timed_out: CPU or wall time ran out; calls before that keep their output.
  """

  outputs: tuple[str | None, ...]
  error: str
  timed_out: bool


class Sandbox:
  """A runner and its restarts; safe to share between threads."""

  def __init__(self, *, mode: str = 'auto'):
    """Starts the runner and proves that it works.

    Args:
      mode: 'auto' or one of `MODES`.

    Raises:
      SandboxError: the mode (for 'auto': every mode) fails its probe.
      ValueError: there is no such mode.
    """
    if mode not in ('auto', *MODES):
      raise ValueError(f'mode={mode!r} must be one of {("auto", *MODES)}')
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None
    self._closed = False
    self.mode = mode if mode != 'auto' else self._strongest()
    if self._process is None:
      self._start(self.mode)
    if self.mode == 'rlimits':
      logging.warning(
        'Sandbox mode rlimits: jobs reach the network and what this user can '
        'read; fix: %s',
        _FIXES['bwrap'],
      )

  def __enter__(self) -> 'Sandbox':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def run(self, jobs: Sequence[Job]) -> list[JobResult]:
    """Runs jobs one after another, each in a process of its own.

    Raises:
      SandboxError: a job took several runners down, none starts, or the
        sandbox was closed.
    """
    with self._lock:
      if self._closed:
        raise SandboxError('the sandbox is closed; make another')
      return [self._run(job) for job in jobs]

  def close(self) -> None:
    """Ends the runner and everything below it; may be called twice."""
    with self._lock:
      self._closed = True
      self._stop()

  def _strongest(self) -> str:
    for mode in MODES:
      try:
        self._start(mode)
        return mode
      except SandboxError as error:
        logging.warning('A weaker sandbox will be used: %s', error)
    raise SandboxError('no sandbox mode works here; see the warnings above')

  def _run(self, job: Job) -> JobResult:
    for _ in range(_ATTEMPTS):
      if self._process is None:
        self._start(self.mode)
      answered = False
      try:
        result = self._exchange(job)
        answered = True
        return result
      except _RunnerDied as error:
        reason = str(error)
      finally:
        if not answered:  # a late reply must not answer the next job
          self._stop()
    raise SandboxError(
      f'the {self.mode} sandbox died {_ATTEMPTS} times on one job '
      f'({reason}); fix: {_FIXES[self.mode]}'
    )

  def _exchange(self, job: Job) -> JobResult:
    body = json.dumps(dataclasses.asdict(job)).encode()
    try:
      stdin = self._process.stdin.fileno()
      frame = struct.pack('>I', len(body)) + body
      sandbox_runner.write_all(stdin, frame)
    except BrokenPipeError as error:
      raise _RunnerDied('its input is closed') from error
    reply = self._read_frame(_REPLY_S)
    outputs = tuple(reply['outputs'])
    return JobResult(outputs, reply['error'], reply['timed_out'])

  def _read_frame(self, timeout_s: float) -> dict:
    deadline = time.monotonic() + timeout_s
    (length,) = struct.unpack('>I', self._read(4, deadline))
    return json.loads(self._read(length, deadline))

  def _read(self, count: int, deadline: float) -> bytes:
    stdout, data = self._process.stdout.fileno(), b''
    while len(data) < count:
      left = max(0.0, deadline - time.monotonic())
      if not select.select([stdout], [], [], left)[0]:
        raise _RunnerDied('no answer in time')
      part = os.read(stdout, count - len(data))
      if not part:
        raise _RunnerDied('its output is closed')
      data += part
    return data

  def _start(self, mode: str) -> None:
    """Starts a runner in `mode` and runs one job in it."""
    command, options = _command(mode)
    try:
      self._process = _spawn(command, options)
      self._read_frame(_START_S)
      result = self._exchange(Job('def f(x): return x + 1', 'f', ('[1]',)))
    except (_RunnerDied, OSError) as error:
      detail = f'{error}; {self._stop()}'
    else:
      if result.outputs == ('2',):
        return
      detail = f'the probe gave {result}; {self._stop()}'
    raise SandboxError(
      f'sandbox mode {mode!r} does not work here ({detail}); '
      f'fix: {_FIXES[mode]}'
    )

  def _stop(self) -> str:
    """Ends the runner, waits for it and returns what it complained of."""
    process, self._process = self._process, None
    if process is None:
      return 'it did not start'
    process.stdin.close()  # the runner leaves, and with it its namespace
    try:
      process.wait(timeout=sandbox_runner.WALL_S + 1)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    process.stdout.close()
    with process.stderr:
      return process.stderr.read(2000).decode(errors='replace').strip()


def _spawn(command: list[str], options: list[str]) -> subprocess.Popen:
  """Starts `command`; `options` travel in a file, unseen from inside."""
  with open(os.memfd_create('sandbox-options'), 'wb') as file:
    file.write(b''.join(option.encode() + b'\0' for option in options))
    file.flush()
    file.seek(0)
    fd = str(file.fileno())
    return subprocess.Popen(
      [fd if part == '{options}' else part for part in command],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      pass_fds=[file.fileno()] if options else [],
      env=_ENVIRONMENT,
      cwd='/',
      start_new_session=True,
    )


def _command(mode: str) -> tuple[list[str], list[str]]:
  """Returns the command line of a mode and bwrap's hidden options."""
  root = os.geteuid() == 0
  uid = _FIRST_UID + (os.getpid() * 16 + next(_counter)) % _UIDS if root else 0
  python = os.path.realpath(getattr(sys, '_base_executable', sys.executable))
  source = pathlib.Path(sandbox_runner.__file__).read_text()
  runner = [python, '-P', '-s', '-S', '-B', '-c', source, str(uid)]
  if mode == 'bwrap':
    bwrap = shutil.which('bwrap')
    if bwrap is None:
      raise SandboxError(f'bwrap is not on PATH; fix: {_FIXES[mode]}')
    command = [bwrap, '--args', '{options}', '--', *runner, 'own_root']
    return command, _bwrap_options(root)
  if mode == 'unshare':
    unshare = shutil.which('unshare')
    if unshare is None:
      raise SandboxError(f'unshare is not on PATH; fix: {_FIXES[mode]}')
    command = [unshare, '-m', '-n', '-p', '-i', '-u', '--fork', '--kill-child']
    if not root:
      command += ['-U', '-r']
    return [*command, '--', *runner, 'empty_root'], []
  return [*runner, 'empty_root' if root else 'own_root'], []


def _bwrap_options(root: bool) -> list[str]:
  """Namespaces, and a file system of Python alone.

  Installed packages are masked: this project may be among them, and with it
  the correct programs.
  """
  options = ['--die-with-parent', '--as-pid-1', '--new-session']
  options += ['--cap-drop', 'ALL']
  if root:  # the runner leaves root by itself, and these two with it
    options += ['--cap-add', 'CAP_SETUID', '--cap-add', 'CAP_SETGID']
    options += ['--unshare-ipc', '--unshare-pid', '--unshare-net']
    options += ['--unshare-uts', '--unshare-cgroup-try']
  else:
    options += ['--unshare-all', '--uid', '65534', '--gid', '65534']
  options += ['--ro-bind', '/usr', '/usr']
  for path in ('/bin', '/lib', '/lib64'):
    if os.path.islink(path):
      options += ['--symlink', os.readlink(path), path]
    elif os.path.isdir(path):
      options += ['--ro-bind', path, path]
  prefix = os.path.realpath(sys.base_prefix)
  if not prefix.startswith('/usr'):
    options += ['--ro-bind', prefix, prefix]
  masked = glob.glob('/usr/lib/python3*/dist-packages')
  for base in ('/usr', '/usr/local', prefix):
    for name in ('site', 'dist'):
      masked += glob.glob(f'{base}/lib/python3*/{name}-packages')
  for path in sorted({os.path.realpath(path) for path in masked}):
    options += ['--tmpfs', path, '--remount-ro', path]
  options += ['--dev-bind', '/dev/null', '/dev/null', '--remount-ro', '/']
  return [*options, '--chdir', '/']
