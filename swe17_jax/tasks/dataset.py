"""Task sets on disk: JSON lines under a fingerprint.

Format: UTF-8, one JSON object per line with sorted keys. The first line is

    {"count": 2, "fingerprint": "<64 hex digits>", "format": "swe17.tasks.1"}

and every further line holds the fields of one `Task`. The fingerprint is the
SHA-256 of those further lines, each with its newline, so it names the tasks,
their order and their split.

Example:
  >>> save(tasks, 'tasks.jsonl')
  >>> load('tasks.jsonl') == tuple(tasks)
  True
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from swe17_jax.core import records

FORMAT = 'swe17.tasks.1'


class DatasetError(ValueError):
  """A task file is missing, cut off, damaged or of another format."""


def fingerprint(tasks: Sequence[records.Task]) -> str:
  """Returns 64 hex digits that name these tasks in this order."""
  return _digest([_to_line(task) for task in tasks])


def save(tasks: Sequence[records.Task], path: str | os.PathLike) -> None:
  """Writes all tasks or nothing; replaces the file at `path`."""
  lines = [_to_line(task) for task in tasks]
  header = {
    'format': FORMAT,
    'count': len(lines),
    'fingerprint': _digest(lines),
  }
  path = pathlib.Path(path)
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  with open(partial, 'w', encoding='utf-8', newline='\n') as file:
    file.write(_canonical(header) + ''.join(lines))
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def load(path: str | os.PathLike) -> tuple[records.Task, ...]:
  """Reads what `save` wrote.

  Raises:
    DatasetError: the file is missing, or its format, count, fingerprint or a
      task in it is not right.
  """
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
    first, *lines = text.splitlines(keepends=True)
    header = json.loads(first)
  except (OSError, ValueError) as error:
    raise DatasetError(
      f'{path} is no readable task file ({error}); generate it again'
    ) from error
  if not isinstance(header, dict) or header.get('format') != FORMAT:
    raise DatasetError(
      f'{path} has another format than {FORMAT!r}; generate it again'
    )
  if len(lines) != header.get('count'):
    raise DatasetError(
      f'{path} holds {len(lines)} tasks and its header promises '
      f'{header.get("count")}; it was cut off or edited, generate it again'
    )
  if _digest(lines) != header.get('fingerprint'):
    raise DatasetError(
      f'{path} does not match its fingerprint {header.get("fingerprint")}; '
      'it was edited or damaged, generate it again'
    )
  try:
    return tuple(_from_line(line) for line in lines)
  except (TypeError, KeyError, ValueError) as error:
    raise DatasetError(f'{path} has a task that is none: {error}') from error


def _canonical(value: Any) -> str:
  return json.dumps(value, sort_keys=True, ensure_ascii=True) + '\n'


def _digest(lines: Sequence[str]) -> str:
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _to_line(task: records.Task) -> str:
  fields = {
    field.name: getattr(task, field.name) for field in dataclasses.fields(task)
  }
  for name in ('visible', 'hidden'):
    fields[name] = [dataclasses.asdict(call) for call in fields[name]]
  for name in ('files', 'metadata'):
    fields[name] = dict(fields[name])
  return _canonical(fields)


def _from_line(line: str) -> records.Task:
  fields = json.loads(line)
  for name in ('visible', 'hidden'):
    fields[name] = tuple(records.Call(**call) for call in fields[name])
  return records.Task(**fields)
