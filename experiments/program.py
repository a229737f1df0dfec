"""What the programs of a run share: configuration flags, and clear errors.

A program defines its own flags, adopts these with
`flags.adopt_module_key_flags(program)`, and ends with `program.run(...)`.
"""

import pathlib
import sys
from collections.abc import Callable

from absl import app, flags
from configs import tiny

from swe17_jax.core import config as core_config

SEED = flags.DEFINE_integer('seed', 0, 'Of every random choice of the run.')
_SET = flags.DEFINE_multi_string(
  'set',
  [],
  'path=value on the configuration, e.g. train.steps=50; see --dry_run.',
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Print the resolved configuration and stop.'
)


def run(
  body: Callable[[tiny.RunConfig], None],
  *,
  errors: tuple[type[Exception], ...],
) -> None:
  """Runs a program on the resolved configuration, then exits.

  Args:
    body: the program.
    errors: what it raises with a message for people; it becomes one sentence
      and exit status 1 instead of a traceback. OSError always is.
  """
  name = pathlib.Path(sys.argv[0]).stem

  def main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'unknown arguments {argv[1:]}; see --help')
    try:
      config = core_config.apply_overrides(tiny.CONFIG, _SET.value)
    except ValueError as error:
      sys.exit(f'{name}: {error}')
    if _DRY_RUN.value:
      print(core_config.render(config))
      return
    try:
      body(config)
    except (*errors, OSError) as error:
      sys.exit(f'{name}: {error}')

  app.run(main)


def overrides() -> list[str]:
  """Returns the flags that give another program this configuration."""
  return [
    f'--seed={SEED.value}',
    *(f'--set={override}' for override in _SET.value),
  ]
