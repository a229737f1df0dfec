"""Judges files by what their functions return.

The sandbox is handed arguments and returns canonical JSON; the comparison
with the expected text is made here. Values must be equal as JSON: `2` is not
`2.0`, a float must match to the last digit, a tuple counts as a list.

A `Verdict` tells a failure (the program's fault, reward 0) from an infra
error (ours: the sample must be dropped).

Example:
  >>> verify(task, {'solution.py': source}, sandbox=box).passed
  True
"""

import json
from collections.abc import Mapping, Sequence

from swe17_jax.core import records
from swe17_jax.tasks import sandbox as sandbox_lib

SOLUTION = 'solution.py'
LINE_CHARS = 80  # what the agent reads of a visible call


def verify(
  task: records.Task,
  files: Mapping[str, str],
  *,
  sandbox: sandbox_lib.Sandbox,
) -> records.Verdict:
  """Runs the hidden calls on `files['solution.py']`."""
  return verify_many([(task, files)], sandbox=sandbox)[0]


def verify_many(
  items: Sequence[tuple[records.Task, Mapping[str, str]]],
  *,
  sandbox: sandbox_lib.Sandbox,
) -> list[records.Verdict]:
  """Judges many (task, files) pairs; one verdict for each, in order."""
  return [_verdict(task, files, sandbox) for task, files in items]


def run_visible(
  task: records.Task,
  files: Mapping[str, str],
  *,
  sandbox: sandbox_lib.Sandbox,
) -> str:
  """Runs the visible calls; returns 'ok' or one line on the first failure.

  Raises:
    SandboxError: the sandbox does not work; the program is not to blame.
  """
  if SOLUTION not in files:
    return f'no file {SOLUTION}'
  result = _run(task, files, task.visible, sandbox)
  for call, output in zip(task.visible, result.outputs):
    if output != call.expected:
      return _complaint(task.entry, call, output, result)[:LINE_CHARS]
  return 'ok'


def _run(task, files, calls, sandbox) -> sandbox_lib.JobResult:
  arguments = tuple(call.arguments for call in calls)
  job = sandbox_lib.Job(files[SOLUTION], task.entry, arguments)
  return sandbox.run([job])[0]


def _verdict(task, files, sandbox) -> records.Verdict:
  calls = len(task.hidden)
  if SOLUTION not in files:
    return records.Verdict(False, 0, calls, f'no file {SOLUTION}')
  try:
    result = _run(task, files, task.hidden, sandbox)
  except sandbox_lib.SandboxError as error:
    return records.Verdict(False, 0, calls, infra_error=str(error))
  good = sum(
    output == call.expected for call, output in zip(task.hidden, result.outputs)
  )
  detail = result.error or ('' if good == calls else 'wrong value')
  return records.Verdict(good == calls, good, calls, detail)


def _complaint(entry, call, output, result) -> str:
  """One line on a failed call; `output` None is the error's first call."""
  shown = f'{entry}({_python(call.arguments)[1:-1]})'
  if output is not None:
    return f'{shown} gave {_python(output)}, expected {_python(call.expected)}'
  if result.timed_out:
    return f'{shown} timed out'
  name, colon, _ = result.error.partition(':')
  return f'{shown} raised {name}' if colon else f'{shown} {name}'


def _python(text: str) -> str:
  """Shows JSON as Python writes it; keeps it where it is no plain JSON."""
  try:
    return repr(json.loads(text))
  except (ValueError, RecursionError):
    return text
