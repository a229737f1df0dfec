"""Tests of swe17_jax/analysis: report.py with its curves and its page."""

import json
import pathlib
import re
import tempfile
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.analysis import curves, heldout, report
from swe17_jax.core import dispatch, records, storage
from tests.analysis.heldout_test import trajectory

pytest.importorskip('matplotlib', reason='needs matplotlib (extra trainer)')
pytest.importorskip('jinja2', reason='needs jinja2 (extra trainer)')

METRICS = """
train/reward train/informative_groups train/entropy train/mismatch_kl
train/mismatch_max train/offpolicy_kl train/staleness train/staleness_max
train/truncated_fraction train/singleton_fraction train/grad_norm
rollout/sampled_tokens rollout/turns weights/delta_bytes
weights/changed_fraction train/tokens_per_s train/wait_s train/step_s
""".split()
SUMMARY = {
  'heldout_before': 0.25,
  'heldout_after': 0.5,
  'entropy_first': 1.0,
  'entropy_last': 0.2,
  'mismatch_kl_max': 1e-3,
  'versions_applied': 6,
  'tokens_per_s': 1234.5,
  'wall_s': 601.0,
}
EVIL = (
  'Fix the bug.\n1|def f(x):\n2|  return x\n\n'
  '<agent> # <script>alert(1)</script>\ntest\n<tool> got 1 & not 2\n'
  '<agent> edit 2|  return x + 1\nsubmit'
)


def _rows(steps, names=METRICS):
  return [
    {'step': s, 'time': 0.0} | {name: 0.1 + s / 100 for name in names}
    for s in steps
  ]


def _store(passed_by_version):
  store = storage.MemoryStore()
  for version, passed in passed_by_version.items():
    group = [
      trajectory(f'f{i}/L2/arith/+ -> -', p, text=EVIL)
      for i, p in enumerate(passed)
    ]
    store.write_once(
      dispatch.heldout_name(version), records.group_to_bytes(group)
    )
  return store


class PageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.workdir = pathlib.Path(folder.name) / 'run'
    self.workdir.mkdir()

  def _write(self, rows, store=None, summary=SUMMARY):
    lines = ''.join(json.dumps(row) + '\n' for row in rows)
    (self.workdir / 'metrics.jsonl').write_text(lines)
    store = _store({}) if store is None else store
    path = report.write(self.workdir, store=store, summary=summary)
    self.assertEqual(path, self.workdir / 'report.html')
    return path.read_text()

  def test_transcripts_are_escaped(self):
    text = self._write(_rows(range(6)), _store({0: [False], 6: [True]}))
    self.assertNotIn('<script', text)
    self.assertIn('# &lt;script&gt;alert(1)&lt;/script&gt;', text)
    self.assertIn('got 1 &amp; not 2', text)

  def test_the_page_stands_alone(self):
    text = self._write(_rows(range(6)), _store({0: [False], 6: [True]}))
    # Names of XML languages are the only addresses.
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', '', text)
    self.assertNotRegex(text, r'https?:|<link|<img|@import|url\((?!#)')
    self.assertLess(len(text), 1_500_000)

  def test_the_numbers_are_those_of_the_records(self):
    store = _store(
      {
        0: [False, False, False, True],
        3: [False, False, True, True],
        6: [True, False, True, True],
      }
    )
    text = self._write(_rows(range(6)), store)
    # Wilson, 1 of 4: 4.6 to 69.9%; 3 of 4 is its mirror image.
    self.assertIn('version 0 solves 1 of 4 (25.0%, 95% interval 4.6', text)
    self.assertIn('version 6 solves 3 of 4 (75.0%, 95% interval 30.1', text)
    self.assertIn('2 learned, 1 still failing, 1 solved in both, 0 lost', text)
    cells = re.sub(r'\s+', ' ', re.sub(r'<[^>]*>', ' ', text))
    self.assertIn('f1 0 / 1 0% 0 / 1 0%', cells)
    self.assertIn('arith 1 / 4 25% 3 / 4 75%', cells)
    self.assertIn('all 1 / 4 25% 3 / 4 75%', cells)
    self.assertIn('version 0: failed, 2 of 7 calls', cells)
    self.assertIn('version 6: passed, 7 of 7 calls', cells)
    self.assertIn('3 tokens sampled, 1 turn, ended by submit', cells)
    self.assertEqual(cells.count('version 0: '), 4)
    self.assertEqual(text.count('the line with the bug">2|  return x<'), 8)

  def test_the_same_run_gives_the_same_bytes(self):
    store = _store({0: [False], 6: [True]})
    first = self._write(_rows(range(6)), store)
    self.assertEqual(first, self._write(_rows(range(6)), store))

  def test_gaps_are_listed(self):
    text = self._write(_rows([0, 1, 4, 5, 7]))
    self.assertIn('Steps 2-3 are missing.', text)
    self.assertIn('Step 6 is missing.', text)
    text = self._write(_rows(range(6)))
    self.assertIn('Steps 0 to 5; none is missing.', text)

  def test_missing_metrics_are_named(self):
    names = [n for n in METRICS if n not in ('train/entropy', 'train/wait_s')]
    text = self._write(_rows(range(6), names), _store({0: [True]}))
    self.assertIn('not recorded: train/entropy<', text)
    self.assertIn('not recorded: train/wait_s<', text)
    self.assertEqual(text.count('not recorded:'), 3)  # and one version only
    self.assertEqual(text.count('<svg'), 8)

  def test_an_empty_run_has_a_page(self):
    text = self._write([], summary={})
    self.assertIn('No training step is recorded.', text)
    self.assertIn('No version was evaluated', text)
    self.assertIn('not recorded: train/reward, held-out evaluations', text)
    self.assertNotIn('<svg', text)

  def test_values_that_are_null_zero_or_alone_are_drawn(self):
    [row] = _rows([3])
    lone = row | {'train/mismatch_kl': 0.0, 'train/grad_norm': None}
    text = self._write([lone])
    self.assertEqual(text.count('<svg'), 9)
    self.assertIn('not recorded: train/grad_norm<', text)

  def test_a_failed_write_keeps_the_old_page(self):
    old = self._write(_rows(range(6)))
    with mock.patch('os.replace', side_effect=OSError('killed')):
      with self.assertRaises(OSError):
        self._write(_rows(range(9)))
    self.assertEqual((self.workdir / 'report.html').read_text(), old)

  def test_a_damaged_record_is_an_error(self):
    store = _store({0: [True]})
    store.write_once(dispatch.heldout_name(6), b'cut off')
    with self.assertRaises(records.RecordError):
      self._write(_rows(range(6)), store)


class ChecksTest(parameterized.TestCase):
  def _passed(self, **changes):
    found = report.checks(SUMMARY | changes)
    return {c.name: c.passed for c in found if c.limit}

  def test_limits(self):
    # 0.5 = 2 x 0.25 = 0.25 + 0.25 and 1e-3 lie exactly on their limits.
    self.assertEqual(
      self._passed(),
      {
        'heldout_after': True,
        'entropy_last': False,
        'mismatch_kl_max': True,
        'wall_s': False,
      },
    )

  @parameterized.named_parameters(
    ('twice_is_not_enough', 'heldout_after', 0.1, 0.34, False),
    ('risen_enough', 'heldout_after', 0.1, 0.36, True),
    ('rise_is_not_twice', 'heldout_after', 0.4, 0.7, False),
    ('nan', 'heldout_after', 0.4, float('nan'), False),
    ('unknown', 'heldout_after', 0.4, None, None),
  )
  def test_heldout(self, name, before, after, expected):
    passed = self._passed(heldout_before=before, heldout_after=after)
    self.assertEqual(passed[name], expected)

  def test_an_absent_result_is_named(self):
    found = {c.name: c for c in report.checks({'wall_s': 3})}
    self.assertEqual(
      found['wall_s'], report.Check('wall_s', '3', '≤ 600', True)
    )
    absent = report.Check('mismatch_kl_max', 'not recorded', '≤ 0.001', None)
    self.assertEqual(found['mismatch_kl_max'], absent)


class PiecesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('none', [0, 1, 2], []),
    ('empty', [], []),
    ('one', [5], []),
    ('two_gaps', [2, 3, 6, 8], [4, 5, 7]),
    ('unordered_and_repeated', [4, 2, 2, 1], [3]),
  )
  def test_gaps(self, steps, expected):
    self.assertEqual(report.gaps(_rows(steps, ['train/reward'])), expected)

  def test_an_evaluation_is_not_a_step(self):
    rows = _rows([1, 3], ['train/reward']) + _rows([2, 9], ['heldout/reward'])
    self.assertEqual(report.gaps(rows), [2])

  def test_spans(self):
    self.assertEqual(curves.spans([3, 4, 5, 9]), [(3, 5), (9, 9)])

  def test_parts(self):
    found = report.parts(EVIL, task_id='f/L2/arith/+ -> -')
    self.assertEqual(
      found,
      [
        report.Part('task', ('Fix the bug.', '1|def f(x):', '2|  return x'), 2),
        report.Part('agent', ('# <script>alert(1)</script>', 'test')),
        report.Part('tool', ('got 1 & not 2',)),
        report.Part('agent', ('edit 2|  return x + 1', 'submit')),
      ],
    )

  def test_parts_without_a_known_bug(self):
    [part] = report.parts('1|x', task_id='other')
    self.assertIsNone(part.bug)

  def test_a_long_transcript_is_cut_and_says_so(self):
    long = 'x' * (report.TRANSCRIPT_CHARS + 5)
    [part] = report.parts(long, task_id='')
    self.assertEqual(part.lines[1], '... 5 more characters')

  def test_series_breaks_at_missing_steps_and_takes_the_last_row(self):
    rows = [
      {'step': 4, 'a/b': None},
      {'step': 1, 'a/b': 1.0},
      {'step': 2, 'a/c': 9.0},
      {'step': 1, 'a/b': 2.0},
    ]
    steps, values = curves.series(rows, 'a/b', missing=[3])
    np.testing.assert_array_equal(steps, [1, 3, 4])
    np.testing.assert_array_equal(values, [2.0, np.nan, np.nan])

  def test_moving_average(self):
    values = np.asarray([1.0, 3.0, np.nan, 5.0, 7.0])
    # Width 3: [1], [1 3], NaN stays, [3 5], [5 7].
    np.testing.assert_array_equal(
      curves.moving_average(values, 3), [1.0, 2.0, np.nan, 4.0, 6.0]
    )

  def test_the_svg_is_xml_and_takes_the_colour_of_the_page(self):
    drawn = curves.plots(
      _rows([0, 1, 4]),
      missing=[2, 3],
      solve_rates={0: heldout.SolveRate(0, 3), 4: heldout.SolveRate(3, 3)},
      entropy_floor=0.1,
      mismatch_limit=1e-3,
    )
    for plot in drawn:
      ElementTree.fromstring(plot.svg)
      self.assertIn('currentColor', plot.svg)
      self.assertNotIn(curves.INK, plot.svg)
