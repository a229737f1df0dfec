"""The quickstart's resolved configuration as golden text.

A change of any default shows up here as a line of a diff. Where the change is
meant: UPDATE_GOLDEN=1 pytest tests/experiments/tiny_test.py
"""

import dataclasses
import os
import pathlib

from absl.testing import absltest, parameterized

from experiments.configs import tiny
from swe17_jax.core import config

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'tiny_config.txt'


class TinyTest(parameterized.TestCase):
  def test_resolved_configuration(self):
    found = config.render(tiny.CONFIG) + '\n'
    if os.environ.get('UPDATE_GOLDEN'):
      GOLDEN.write_text(found)
    self.assertEqual(
      found.splitlines(),
      GOLDEN.read_text().splitlines(),
      'the defaults have changed; if they should, UPDATE_GOLDEN=1',
    )

  def test_the_golden_text_is_a_list_of_overrides(self):
    """Each of its lines can be given back to --set."""
    lines = [line.split(' = ') for line in GOLDEN.read_text().splitlines()]
    overrides = [f'{path}={value.strip(chr(39))}' for path, value in lines]
    self.assertEqual(
      config.apply_overrides(tiny.CONFIG, overrides), tiny.CONFIG
    )

  @parameterized.named_parameters(
    ('never_starts', ['train.publish_every=9'], 'dispatch.max_staleness='),
    ('engine', ['engine.max_tokens=100'], 'is above engine.max_tokens=100'),
    ('rows', ['train.batch.row_tokens=90'], 'train.batch.row_tokens=90'),
    (
      'positions',
      ['model.max_position_embeddings=90'],
      'model.max_position_embeddings=90',
    ),
    ('temperature', ['worker.temperature=0.5'], 'train.temperature=1.0'),
  )
  def test_parts_that_do_not_fit_are_refused(self, overrides, message):
    with self.assertRaisesRegex(ValueError, message):
      config.apply_overrides(tiny.CONFIG, overrides)

  def test_every_part_can_be_replaced(self):
    for field in dataclasses.fields(tiny.CONFIG):
      self.assertTrue(
        dataclasses.is_dataclass(getattr(tiny.CONFIG, field.name)), field.name
      )


if __name__ == '__main__':
  absltest.main()
