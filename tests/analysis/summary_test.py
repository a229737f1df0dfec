"""The numbers of the last line, by hand."""

import json
import pathlib

from absl.testing import parameterized

from swe17_jax.analysis import summary


class SummaryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def write(self, *rows):
    lines = [json.dumps({'time': 0.0, **row}) + '\n' for row in rows]
    (self.workdir / 'metrics.jsonl').write_text(''.join(lines))

  def row(self, step, **changes):
    row = {
      'step': step,
      'train/entropy': 8.0 - step,
      'train/mismatch_kl': 1e-5 * step,
      'train/step_s': 2.0,
      'train/wall_s': 2.0 * step + 2.0,
      'rollout/tokens': 100.0,
      'rollout/newest_version': float(max(0, step - 1)),
    }
    return {**row, **{f'train/{name}': x for name, x in changes.items()}}

  def test_by_hand(self):
    self.write(
      self.row(0),
      {'step': 0, 'heldout/reward': 0.25},
      *(self.row(step) for step in range(1, 6)),
      # An evaluation is recorded at its version, after later steps.
      {'step': 4, 'heldout/reward': 0.875},
      {'step': 6, 'heldout/reward': 0.75},
    )
    self.assertEqual(
      summary.summarize(self.workdir, wall_s=99.0),
      {
        'heldout_before': 0.25,
        'heldout_after': 0.75,  # of the last version, not the best
        'entropy_first': 7.0,  # mean of 8, 7, 6
        'entropy_last': 4.0,  # mean of 5, 4, 3
        'mismatch_kl_max': 5e-5,
        'versions_applied': 4,  # 1, 2, 3, 4; version 0 was there before
        'tokens_per_s': 50.0,
        'wall_s': 99.0,
      },
    )
    self.assertEqual(summary.wall_s(self.workdir), 12.0)

  def test_steps_without_a_probe_are_left_out(self):
    """After a restart the first steps have no version in memory."""
    rows = [self.row(step) for step in range(6)]
    del rows[0]['train/entropy'], rows[5]['train/mismatch_kl']
    rows[5]['train/entropy'] = None  # how metrics.jsonl spells NaN
    self.write(*rows, {'step': 0, 'heldout/reward': 0.0})
    found = summary.summarize(self.workdir, wall_s=1.0)
    self.assertEqual(found['entropy_first'], 6.0)  # 7, 6, 5
    self.assertEqual(found['entropy_last'], 5.0)  # 6, 5, 4
    self.assertEqual(found['mismatch_kl_max'], 4e-5)
    self.assertEqual(found['heldout_before'], found['heldout_after'])

  def test_a_record_cut_off_by_a_kill_does_not_count(self):
    self.write(self.row(0), self.row(1))
    with (self.workdir / 'metrics.jsonl').open('a') as file:
      file.write('{"step": 2, "train/wall_s": 7')
    self.assertEqual(summary.wall_s(self.workdir), 4.0)

  def test_a_run_that_has_not_begun_took_no_time(self):
    self.assertEqual(summary.wall_s(self.workdir), 0)
