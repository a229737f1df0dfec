"""Task files: what is written comes back, what is damaged is named."""

import dataclasses
import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe17_jax.core import records
from swe17_jax.tasks import dataset

TASK = records.Task(
  'f/L2',
  'train',
  'Fix it.',
  {'solution.py': 'def f():\n  return 1\n'},
  'f',
  (records.Call('[]', '2'),),
  (records.Call('[]', '2'),),
  {'line': '2'},
)
OTHER = dataclasses.replace(TASK, task_id='f/L3', split='heldout')
LINE = (
  '{"entry": "f", "files": {"solution.py": "def f():\\n  return 1\\n"}, '
  '"hidden": [{"arguments": "[]", "expected": "2"}], '
  '"instruction": "Fix it.", "metadata": {"line": "2"}, "split": "train", '
  '"task_id": "f/L2", "visible": [{"arguments": "[]", "expected": "2"}]}\n'
)


def test_fingerprint_by_hand():
  expected = hashlib.sha256(LINE.encode()).hexdigest()
  assert dataset.fingerprint([TASK]) == expected
  assert dataset.fingerprint([]) == hashlib.sha256(b'').hexdigest()


def test_bytes_on_disk_by_hand(tmp_path):
  path = tmp_path / 'tasks.jsonl'
  dataset.save([TASK], path)
  digest = hashlib.sha256(LINE.encode()).hexdigest()
  assert path.read_text() == (
    f'{{"count": 1, "fingerprint": "{digest}", "format": "swe17.tasks.1"}}\n'
    + LINE
  )
  assert os.listdir(tmp_path) == ['tasks.jsonl']


def test_fingerprint_knows_order_split_and_every_field():
  prints = {
    dataset.fingerprint(tasks)
    for tasks in (
      [TASK, OTHER],
      [OTHER, TASK],
      [TASK],
      [dataclasses.replace(TASK, split='heldout')],
      [dataclasses.replace(TASK, metadata={})],
      [dataclasses.replace(TASK, visible=())],
    )
  }
  assert len(prints) == 6


TEXTS = st.text(st.characters(exclude_categories=['Cs']))
CALLS = st.lists(st.builds(records.Call, TEXTS, TEXTS), min_size=1).map(tuple)
TASKS = st.builds(
  records.Task,
  TEXTS,
  st.sampled_from(['train', 'heldout']),
  TEXTS,
  st.dictionaries(TEXTS, TEXTS),
  TEXTS,
  CALLS,
  CALLS,
  st.dictionaries(TEXTS, TEXTS),
)


@given(tasks=st.lists(TASKS, max_size=4))
def test_round_trip(tmp_path_factory, tasks):
  path = tmp_path_factory.getbasetemp() / 'round_trip.jsonl'
  dataset.save(tasks, path)
  assert dataset.load(path) == tuple(tasks)


@pytest.mark.parametrize(
  'damage, message',
  (
    (lambda text: '', 'no readable task file'),
    (lambda text: 'x' + text, 'no readable task file'),
    (lambda text: '[]\n' + text, 'another format'),
    (lambda text: text.replace('tasks.1', 'tasks.9'), 'another format'),
    (lambda text: text[: text.rindex('{"entry')], 'holds 1 tasks'),
    (lambda text: text + text.splitlines()[1] + '\n', 'holds 3 tasks'),
    (lambda text: text[:-9], 'does not match its fingerprint'),
    (lambda text: text.replace('Fix', 'fix'), 'not match its fingerprint'),
    (lambda text: text.replace('"2"', '"3"'), 'not match its fingerprint'),
  ),
)
def test_damage_is_named_with_the_remedy(tmp_path, damage, message):
  path = tmp_path / 'tasks.jsonl'
  dataset.save([TASK, OTHER], path)
  path.write_text(damage(path.read_text()))
  with pytest.raises(dataset.DatasetError, match=message) as caught:
    dataset.load(path)
  assert 'generate it again' in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(dataset.DatasetError, match=r'none\.jsonl'):
    dataset.load(tmp_path / 'none.jsonl')


def test_a_well_signed_line_that_is_no_task_is_refused(tmp_path):
  path = tmp_path / 'tasks.jsonl'
  line = LINE.replace('"train"', '"test"')
  digest = hashlib.sha256(line.encode()).hexdigest()
  header = {'count': 1, 'fingerprint': digest, 'format': dataset.FORMAT}
  path.write_text(dataset._canonical(header) + line)
  with pytest.raises(dataset.DatasetError, match="'train' or 'heldout'"):
    dataset.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'tasks.jsonl'
  dataset.save([TASK], path)

  def full(fd):
    raise OSError('no space')

  monkeypatch.setattr(dataset.os, 'fsync', full)
  with pytest.raises(OSError, match='no space'):
    dataset.save([TASK, OTHER], path)
  assert dataset.load(path) == (TASK,)
