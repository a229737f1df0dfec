"""Scalars of a run: `metrics.jsonl`, and the same as TensorBoard event files.

Names are `area/name` with the unit last (`loss/policy`, `weights/apply_s`);
the string is the same in both files, in the report and in the documentation.

Format of `metrics.jsonl`: one JSON object per line and `write`, flushed.

    {"step": 3, "time": 1700000000.5, "loss/policy": -0.25, "train/lr": 3e-05}

`step` counts trainer steps, `time` is seconds since 1970, the rest are finite
numbers; null stands for NaN or an infinity, which JSON cannot spell. A line
counts once its newline is there: a process that dies may leave the last line
cut off, and every reader drops that piece.

`metrics.jsonl` is the record; the event files are a copy made of it. Opening
and truncating make both anew from the lines that are kept (the old file is
replaced in one rename), so that a resumed run has neither a gap nor a point
twice in any reader, even where a kill lost what TensorBoard had in memory.
"""

import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = re.compile(r'[a-z][a-z0-9_]*/[a-z][a-z0-9_]*')
_EVENTS = 'events.out.tfevents.*'  # as EventFileWriter names them


class MetricsError(ValueError):
  """A metrics.jsonl is damaged somewhere else than in its last line."""


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the records of a metrics.jsonl, in the order of writing.

  Args:
    path: the file; one that does not exist has no records.

  Returns:
    One dict per line, with 'step', 'time' and the scalars; None where a value
    was not finite.

  Raises:
    MetricsError: a line that has its newline is not a JSON object.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = path.read_bytes().split(b'\n')
  lines.pop()  # empty, or the piece that a dying process left
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      int(record['step']), float(record['time'])
    except (ValueError, KeyError, TypeError) as error:
      raise MetricsError(
        f'{path}:{number} is not a metrics record: {line[:80]!r}; remove the '
        'line, or start in another folder'
      ) from error
    records.append(record)
  return records


class MetricsWriter:
  """Appends scalars to `metrics.jsonl` and `tensorboard/` of a folder.

  One writer per folder at a time. Needs tensorboard (extra `trainer`).
  """

  def __init__(self, workdir: str | os.PathLike):
    """Opens the folder, made where it is missing; old records are kept.

    Args:
      workdir: a local folder.

    Raises:
      ModuleNotFoundError: tensorboard is not installed.
      MetricsError: see `read`.
    """
    self.path = pathlib.Path(workdir) / 'metrics.jsonl'
    self._logdir = pathlib.Path(workdir) / 'tensorboard'
    self._logdir.mkdir(parents=True, exist_ok=True)
    self._start(read(self.path))

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends one record; when it returns, a kill does not lose it.

    Args:
      step: trainer step, >= 0.
      scalars: metric name -> value; anything that `float` accepts.

    Raises:
      ValueError: a name is not `area/name`.
    """
    for name in scalars:
      if not _NAME.fullmatch(name):
        raise ValueError(
          f'metric {name!r} must be area/name in lower case, for example '
          "'loss/policy'"
        )
    values = {name: float(scalars[name]) for name in sorted(scalars)}
    record = {'step': int(step), 'time': time.time()} | {
      name: value if math.isfinite(value) else None
      for name, value in values.items()
    }
    self._file.write(_line(record))
    self._file.flush()
    self._events.add_event(_event(record))

  def truncate(self, step: int) -> None:
    """Drops all records of `step` and later; call it when a run resumes."""
    self._close_files()
    self._start([r for r in read(self.path) if r['step'] < step])

  def close(self) -> None:
    """Flushes and closes both files."""
    self._close_files()

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _start(self, records: Sequence[dict[str, Any]]) -> None:
    temporary = self.path.with_suffix('.tmp')
    with open(temporary, 'w') as file:
      file.writelines(_line(record) for record in records)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, self.path)
    for stale in self._logdir.glob(_EVENTS):
      # Emptied, not removed: a TensorBoard that has it open would stay on it.
      os.truncate(stale, 0)
    self._file = open(self.path, 'a')
    self._events = _event_writer(self._logdir)
    for record in records:
      self._events.add_event(_event(record))
    self._events.flush()

  def _close_files(self) -> None:
    self._file.close()
    self._events.close()


def _line(record: Mapping[str, Any]) -> str:
  return json.dumps(record, allow_nan=False) + '\n'


def _event_writer(logdir: pathlib.Path):
  # Imported here: engine and sandbox hosts read metrics without tensorboard.
  try:
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer import event_file_writer
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"MetricsWriter needs tensorboard ({error}); pip install 'swe17_jax"
      "[trainer]'"
    ) from error
  writer = event_file_writer.EventFileWriter(str(logdir), flush_secs=5)
  # A TensorBoard that is watching forgets what the old files said.
  log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  writer.add_event(event_pb2.Event(step=0, session_log=log))
  return writer


def _event(record: Mapping[str, Any]):
  from tensorboard.compat.proto import event_pb2, summary_pb2

  values = [
    summary_pb2.Summary.Value(
      tag=name, simple_value=math.nan if value is None else value
    )
    for name, value in record.items()
    if name not in ('step', 'time')
  ]
  return event_pb2.Event(
    step=record['step'],
    wall_time=record['time'],
    summary=summary_pb2.Summary(value=values),
  )
