"""What runs inside the sandbox: forks one child per job, returns its outputs.

Standard library only; `sandbox` passes this file's text to `python -c`, so
no path of the project is visible inside. It is pid 1 of its namespace where
there is one: signals from jobs do not reach it, and `kill(-1)` after each
job ends whatever the job left behind.

Frames on stdin and stdout: 4 bytes big-endian length, then JSON.

    in    {source, entry, calls}
    out   {outputs, error, timed_out}; the first frame is {ready: true}

A child writes one line per call to its pipe: '+' and the canonical JSON of
the value, or '-' and a short error. It never learns the expected values, so
what it writes can only be wrong.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time

CPU_S = 0.1  # CPU seconds of one job
WALL_S = 2.0  # for jobs that sleep
MEMORY_BYTES = 256 << 20
OUTPUT_BYTES = 64 << 10  # of one call
ERROR_CHARS = 200
# What jobs may import in every mode; an empty root has no other modules.
PRELOADED = (
  *('bisect', 'collections', 'copy', 'dataclasses', 'enum', 'fractions'),
  *('functools', 'heapq', 'itertools', 'math', 'operator', 'random', 're'),
  *('statistics', 'string', 'typing'),
)
NULL = os.open('/dev/null', os.O_RDWR)  # before a chroot hides it
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38


def read_exactly(file, count):
  """Reads `count` bytes; fewer at the end of the file."""
  data = b''
  while len(data) < count:
    part = os.read(file, count - len(data))
    if not part:
      break
    data += part
  return data


def write_all(file, data):
  """Writes all bytes, however many calls it takes."""
  while data:
    data = data[os.write(file, data) :]


def write_frame(file, message):
  """Writes one JSON value after its length."""
  body = json.dumps(message).encode()
  write_all(file, struct.pack('>I', len(body)) + body)


def confine(uid, empty_root):
  """Gives up everything that a job must not have; cannot be undone.

  Args:
    uid: user and group to become; 0 keeps the present one (unprivileged).
    empty_root: chroot into a directory that was removed, where nothing can
      be read or created. For modes without a mount namespace of their own.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  if empty_root:
    path = f'/tmp/swe17-root-{os.getpid()}-{time.monotonic_ns()}'
    os.mkdir(path, 0o700)
    os.chdir(path)
    os.rmdir(path)
    os.chroot('.')
  if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capset(2), version 3
  libc.capset(header, (ctypes.c_uint32 * 6)())
  libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
  libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # no ptrace, no /proc/1/mem
  libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # setuid clears it


def limit():
  """Sets the limits of a child; the kernel enforces them."""
  for name, value in (
    (resource.RLIMIT_AS, MEMORY_BYTES),
    (resource.RLIMIT_DATA, MEMORY_BYTES),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_NPROC, 0),  # no process and no thread
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NOFILE, 16),
    (resource.RLIMIT_CPU, 1),  # should the job ignore the timer
  ):
    resource.setrlimit(name, (value, value))
  signal.setitimer(signal.ITIMER_PROF, CPU_S)


def describe(error):
  """Returns 'Type: message', one bounded ASCII line."""
  try:
    text = f'{type(error).__name__}: {error}'
  except BaseException:  # the job's own __str__
    text = 'Exception: its message cannot be read'
  text = ' '.join(text[:ERROR_CHARS].split())
  return text.encode('ascii', 'backslashreplace').decode()


def child(job, pipe):
  """Runs one job's calls and writes one line for each; does not return."""
  for file in (0, 1, 2):
    os.dup2(NULL, file)
  os.dup2(pipe, 3)
  os.closerange(4, 256)
  limit()
  try:
    space = {'__name__': 'solution'}
    exec(compile(job['source'], 'solution.py', 'exec'), space)
    entry = space[job['entry']]
  except BaseException as error:  # whatever the job raises is its result
    lines = f'-{describe(error)}\n' * len(job['calls'])
    write_all(3, lines.encode())
    os._exit(0)
  for arguments in job['calls']:
    try:
      value = entry(*json.loads(arguments))
      line = '+' + json.dumps(value, sort_keys=True, allow_nan=False)
      if len(line) > OUTPUT_BYTES:
        raise ValueError(f'output is longer than {OUTPUT_BYTES} bytes')
    except BaseException as error:
      line = '-' + describe(error)
    write_all(3, line.encode('ascii', 'backslashreplace') + b'\n')
  os._exit(0)


def collect(pipe, limit_bytes):
  """Reads a child's lines until it ends, floods or runs out of time.

  Returns:
    (bytes, reason): reason is '', 'time' or 'flood'.
  """
  deadline = time.monotonic() + WALL_S
  parts, size = [], 0
  while True:
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([pipe], [], [], left)[0]:
      return b''.join(parts), 'time'
    part = os.read(pipe, 1 << 16)
    if not part:
      return b''.join(parts), ''
    parts.append(part)
    size += len(part)
    if size > limit_bytes:
      return b''.join(parts), 'flood'


def end(pid, is_init):
  """Ends the child and all that it started; returns its wait status."""
  os.kill(pid, signal.SIGKILL)  # a zombie keeps its own status
  if is_init:
    try:
      os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
      pass
  _, status = os.waitpid(pid, 0)
  while is_init:
    try:
      os.waitpid(-1, 0)
    except ChildProcessError:
      break
  return status


def run(job, is_init):
  """Runs one job in a child of its own; returns the reply frame."""
  reader, writer = os.pipe()
  pid = os.fork()
  if not pid:
    child(job, writer)
  os.close(writer)
  calls = len(job['calls'])
  data, reason = collect(reader, calls * (OUTPUT_BYTES + 2))
  os.close(reader)
  status = end(pid, is_init)
  return reply(data, calls, reason, status)


def reply(data, calls, reason, status):
  """Turns a child's lines and wait status into the reply frame."""
  outputs, errors = [], []
  for line in data.split(b'\n')[:-1][:calls]:
    text = ''.join(
      c if ' ' <= c <= '~' else '?' for c in line[1:].decode('latin-1')
    )
    good = line[:1] == b'+' and len(line) <= OUTPUT_BYTES
    outputs.append(text if good else None)
    if not good:
      errors.append(text[:ERROR_CHARS])
  killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
  late = len(outputs) < calls and (
    reason == 'time' or killer in (signal.SIGPROF, signal.SIGXCPU)
  )
  if late:
    errors.append('timed out')
  elif len(outputs) < calls:
    name = f'killed by signal {killer}' if killer else 'ended early'
    errors.append('flooded its output' if reason == 'flood' else name)
  outputs += [None] * (calls - len(outputs))
  error = errors[0] if errors else ''
  return {'outputs': outputs, 'error': error, 'timed_out': late}


def main(uid, empty_root):
  """Answers frames until stdin ends."""
  for name in PRELOADED:
    __import__(name)
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 only hears handlers
  confine(uid, empty_root)
  is_init = os.getpid() == 1
  gc.freeze()
  write_frame(1, {'ready': True})
  while True:
    header = read_exactly(0, 4)
    if len(header) < 4:
      os._exit(0)
    body = read_exactly(0, struct.unpack('>I', header)[0])
    write_frame(1, run(json.loads(body), is_init))


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2] == 'empty_root')
