"""Tests of swe17_jax/core/metrics.py."""

import json
import math
import pathlib
import tempfile
from unittest import mock

import hypothesis
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import strategies

from swe17_jax.core import metrics

event_accumulator = pytest.importorskip(
  'tensorboard.backend.event_processing.event_accumulator',
  reason='needs tensorboard (extra trainer)',
)


def _points(workdir, tag):
  """What TensorBoard shows: [(step, value)] of one tag."""
  accumulator = event_accumulator.EventAccumulator(
    str(pathlib.Path(workdir) / 'tensorboard')
  )
  accumulator.Reload()
  if tag not in accumulator.Tags()['scalars']:
    return []
  return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def _steps(path):
  return [record['step'] for record in metrics.read(path)]


class MetricsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = pathlib.Path(folder.name) / 'run'
    self.path = self.workdir / 'metrics.jsonl'

  def test_one_line_per_write_and_the_same_in_tensorboard(self):
    with mock.patch.object(metrics.time, 'time', lambda: 1700000000.5):
      with metrics.MetricsWriter(self.workdir) as writer:
        writer.write(0, {'train/lr': np.float32(0.5), 'loss/policy': -0.25})
        writer.write(1, {'loss/policy': 2})
    self.assertEqual(
      self.path.read_text(),
      '{"step": 0, "time": 1700000000.5, "loss/policy": -0.25, '
      '"train/lr": 0.5}\n'
      '{"step": 1, "time": 1700000000.5, "loss/policy": 2.0}\n',
    )
    self.assertEqual(
      _points(self.workdir, 'loss/policy'), [(0, -0.25), (1, 2.0)]
    )
    self.assertEqual(_points(self.workdir, 'train/lr'), [(0, 0.5)])

  def test_a_line_is_on_disk_when_write_returns(self):
    writer = metrics.MetricsWriter(self.workdir)
    self.addCleanup(writer.close)
    writer.write(7, {'loss/policy': 1.0})
    self.assertEqual(_steps(self.path), [7])

  @parameterized.parameters(math.nan, math.inf, -math.inf)
  def test_what_json_cannot_spell_is_null(self, value):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(0, {'loss/policy': value})
    (record,) = metrics.read(self.path)
    self.assertIsNone(record['loss/policy'])
    ((_, shown),) = _points(self.workdir, 'loss/policy')
    self.assertTrue(math.isnan(shown))

  @parameterized.parameters('loss', 'Loss/x', 'a/b/c', '/x', 'a/', 'a b/c', '')
  def test_a_misnamed_metric_writes_nothing(self, name):
    with metrics.MetricsWriter(self.workdir) as writer:
      with self.assertRaisesRegex(ValueError, 'must be area/name'):
        writer.write(0, {'loss/policy': 1.0, name: 1.0})
    self.assertEqual(metrics.read(self.path), [])

  def test_resume_leaves_no_gap_and_no_point_twice(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      for step in range(5):
        writer.write(step, {'loss/policy': step})
    # Killed at step 5; its checkpoint is of step 3. TensorBoard's copy is lost.
    for events in (self.workdir / 'tensorboard').iterdir():
      events.unlink()
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.truncate(3)
      for step in range(3, 6):
        writer.write(step, {'loss/policy': step + 10})
    wanted = [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
    self.assertEqual(_points(self.workdir, 'loss/policy'), wanted)
    self.assertEqual(
      [(r['step'], r['loss/policy']) for r in metrics.read(self.path)], wanted
    )

  def test_a_watching_tensorboard_forgets_the_dropped_steps(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      for step in range(5):
        writer.write(step, {'loss/policy': step})
      writer._events.flush()
      watching = event_accumulator.EventAccumulator(
        str(self.workdir / 'tensorboard')
      )
      watching.Reload()
      writer.truncate(2)
      writer.write(2, {'loss/policy': 12})
      writer._events.flush()
      watching.Reload()
    self.assertEqual(
      [(e.step, e.value) for e in watching.Scalars('loss/policy')],
      [(0, 0.0), (1, 1.0), (2, 12.0)],
    )

  def test_truncate_to_zero_starts_anew(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(0, {'loss/policy': 1.0})
      writer.truncate(0)
    self.assertEqual(self.path.read_bytes(), b'')
    self.assertEqual(_points(self.workdir, 'loss/policy'), [])

  def test_a_kill_before_the_rename_keeps_the_old_records(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      for step in range(3):
        writer.write(step, {'loss/policy': step})
    before = self.path.read_bytes()
    writer = metrics.MetricsWriter(self.workdir)
    with mock.patch.object(
      metrics.os, 'replace', side_effect=KeyboardInterrupt
    ):
      with self.assertRaises(KeyboardInterrupt):
        writer.truncate(1)
    self.assertEqual(self.path.read_bytes(), before)
    with metrics.MetricsWriter(self.workdir) as writer:  # and it goes on
      writer.truncate(1)
    self.assertEqual(_steps(self.path), [0])

  def test_a_damaged_line_in_the_middle_is_named(self):
    self.workdir.mkdir()
    self.path.write_text(
      '{"step": 0, "time": 1}\n{"st\n{"step": 2, "time": 1}\n'
    )
    with self.assertRaisesRegex(metrics.MetricsError, r'jsonl:2 is not'):
      metrics.read(self.path)
    with self.assertRaises(metrics.MetricsError):
      metrics.MetricsWriter(self.workdir)

  @parameterized.parameters('[]', '3', 'null', '{"step": 1}', '{"time": 1}')
  def test_json_that_is_no_record_is_refused(self, line):
    self.workdir.mkdir()
    self.path.write_text(line + '\n')
    with self.assertRaises(metrics.MetricsError):
      metrics.read(self.path)

  def test_a_file_that_is_not_there_has_no_records(self):
    self.assertEqual(metrics.read(self.path), [])

  def test_a_missing_tensorboard_is_named_with_its_remedy(self):
    with mock.patch.dict('sys.modules', {'tensorboard.compat.proto': None}):
      with self.assertRaisesRegex(ModuleNotFoundError, r'swe17_jax\[trainer\]'):
        metrics.MetricsWriter(self.workdir)


@hypothesis.given(data=strategies.data())
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_file_cut_anywhere_reads_as_its_whole_lines(data):
  lines = [
    json.dumps({'step': step, 'time': 1.0, 'loss/policy': value})
    for step, value in enumerate(data.draw(_VALUES))
  ]
  whole = ''.join(line + '\n' for line in lines)
  cut = data.draw(strategies.integers(0, len(whole)))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'metrics.jsonl'
    path.write_text(whole[:cut])
    kept = whole[:cut].count('\n')
    assert _steps(path) == list(range(kept))
    with metrics.MetricsWriter(folder) as writer:
      writer.write(kept, {'loss/policy': 0.0})
    assert _steps(path) == list(range(kept + 1))


_VALUES = strategies.lists(
  strategies.none() | strategies.floats(-1e9, 1e9), max_size=5
)
