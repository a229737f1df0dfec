"""Tests of swe17_jax/core/config.py."""

import dataclasses

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies

from swe17_jax.core import config


@dataclasses.dataclass(frozen=True)
class Optimizer:
  lr: float = 1e-3
  betas: tuple[float, float] = (0.9, 0.95)
  warmup_steps: int = 10
  decay_steps: int = 100
  clip: float | None = 1.0

  def __post_init__(self):
    if self.warmup_steps > self.decay_steps:
      raise ValueError(f'{self.warmup_steps=} is above {self.decay_steps=}')


@dataclasses.dataclass(frozen=True)
class Yarn:
  factor: float = 40.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  name: str = 'tiny'
  steps: int = 3
  replay: bool = True
  eval_steps: tuple[int, ...] = (0, 2)
  tags: tuple[str, ...] = ()
  optimizer: Optimizer = Optimizer()
  yarn: Yarn | None = None
  rows: int = dataclasses.field(init=False, default=7)


class OverrideTest(parameterized.TestCase):
  @parameterized.parameters(
    ('steps=1_000', ('steps', 1000)),
    ('steps=-2', ('steps', -2)),
    ('name=a=b c', ('name', 'a=b c')),
    ('name=', ('name', '')),
    ('replay=False', ('replay', False)),
    ('replay=true', ('replay', True)),
    ('eval_steps=5', ('eval_steps', (5,))),
    ('eval_steps=(1, 2, 3)', ('eval_steps', (1, 2, 3))),
    ('eval_steps=(1,)', ('eval_steps', (1,))),
    ('eval_steps=', ('eval_steps', ())),
    ('tags=x, y', ('tags', ('x', 'y'))),
  )
  def test_leaf(self, override, expected):
    changed = config.apply_overrides(TrainConfig(), [override])
    name, value = expected
    self.assertEqual(
      changed, dataclasses.replace(TrainConfig(), **{name: value})
    )
    self.assertIs(type(getattr(changed, name)), type(value))

  def test_nested_leaves_change_together_and_the_rest_stays(self):
    changed = config.apply_overrides(
      TrainConfig(),
      ['optimizer.lr=1', 'optimizer.clip=none', 'steps=4', 'optimizer.lr=3e-5'],
    )
    self.assertEqual(
      changed,
      TrainConfig(steps=4, optimizer=Optimizer(lr=3e-5, clip=None)),
    )
    self.assertEqual(TrainConfig().optimizer.lr, 1e-3)

  def test_post_init_judges_the_final_combination_only(self):
    both = ['optimizer.warmup_steps=200', 'optimizer.decay_steps=300']
    changed = config.apply_overrides(TrainConfig(), both)
    self.assertEqual(changed.optimizer.warmup_steps, 200)
    with self.assertRaisesRegex(ValueError, 'is above'):
      config.apply_overrides(TrainConfig(), both[:1])

  def test_fields_inside_an_optional_group(self):
    changed = config.apply_overrides(
      TrainConfig(yarn=Yarn()), ['yarn.factor=64']
    )
    self.assertEqual(changed.yarn, Yarn(64.0))
    with self.assertRaisesRegex(config.ConfigError, "'yarn' is None"):
      config.apply_overrides(TrainConfig(), ['yarn.factor=64'])

  @parameterized.parameters(
    (
      'optimiser.lr=1',
      "no field 'optimiser' in TrainConfig; did you mean 'optimizer'",
    ),
    ('lr=1', "no field 'lr' in TrainConfig; did you mean 'optimizer.lr'"),
    (
      'optimizer.zzz=1',
      "no field 'zzz' in Optimizer; fields: betas, clip, decay_steps, lr,",
    ),
    ('rows=1', "no field 'rows' in TrainConfig"),  # derived, not a setting
    ('optimizer=1', "'optimizer' is a group of fields; set one of: opt"),
    ('steps.x=1', "steps.x: 'steps' is 3, which has no fields"),
    ('steps', "'steps' is not an override; write path=value"),
    ('=3', "'=3' is not an override"),
    ('steps=1e3', "steps must be int, got '1e3'"),
    ('steps=', "steps must be int, got ''"),
    ('replay=1', "replay must be true or false, got '1'"),
    ('optimizer.lr=fast', "optimizer.lr must be float, got 'fast'"),
    ('optimizer.lr=nan', "optimizer.lr must be float, got 'nan'"),
    ('optimizer.clip=x', r"optimizer.clip must be float \| None, got 'x'"),
    ('optimizer.betas=0.9', r'optimizer.betas must be tuple\[float, float\]'),
    ('eval_steps=1,,2', r'eval_steps must be tuple\[int, ...\]'),
  )
  def test_error(self, override, message):
    with self.assertRaisesRegex(config.ConfigError, '^' + message):
      config.apply_overrides(TrainConfig(), [override])


class RenderTest(absltest.TestCase):
  def test_sorted_lines_of_all_settings(self):
    self.assertEqual(
      config.render(TrainConfig(yarn=Yarn())),
      'eval_steps = (0, 2)\n'
      "name = 'tiny'\n"
      'optimizer.betas = (0.9, 0.95)\n'
      'optimizer.clip = 1.0\n'
      'optimizer.decay_steps = 100\n'
      'optimizer.lr = 0.001\n'
      'optimizer.warmup_steps = 10\n'
      'replay = True\n'
      'steps = 3\n'
      'tags = ()\n'
      'yarn.factor = 40.0',
    )


@hypothesis.given(
  lr=strategies.floats(allow_nan=False),
  clip=strategies.none() | strategies.floats(allow_nan=False),
  steps=strategies.integers(),
  replay=strategies.booleans(),
  eval_steps=strategies.lists(strategies.integers(), max_size=4).map(tuple),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_rendered_numbers_are_overrides(lr, clip, steps, replay, eval_steps):
  wanted = TrainConfig(
    steps=steps,
    replay=replay,
    eval_steps=eval_steps,
    optimizer=Optimizer(lr=lr, clip=clip),
  )
  lines = [
    line.replace(' = ', '=', 1)
    for line in config.render(wanted).splitlines()
    if not line.startswith(('name', 'yarn'))
  ]
  assert config.apply_overrides(TrainConfig(), lines) == wanted


@hypothesis.given(strategies.text())
def test_any_text_is_applied_or_named_in_a_config_error(text):
  try:
    config.apply_overrides(TrainConfig(), [text])
  except config.ConfigError:
    pass


def test_random_text_as_a_value_raises_only_config_errors():
  for value in ('(', '((1))', '1,2,(3', '\x00', '١', '1e999', '--1'):
    for path in ('steps', 'eval_steps', 'replay', 'optimizer.clip'):
      try:
        config.apply_overrides(TrainConfig(), [f'{path}={value}'])
      except config.ConfigError as error:
        assert path in str(error), error
