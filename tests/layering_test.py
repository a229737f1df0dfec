"""Who may import whom: the floors of swe17_jax and the doors of its libraries.

Nothing is imported here. Every file is parsed, so that an import inside a
function or under a condition counts as well.
"""

import ast
import pathlib
from collections.abc import Iterator, Mapping

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[1]

FLOORS = {
  'core': 0,
  'parallel': 1,
  'tasks': 1,
  'weights': 1,
  'model': 2,
  'rl': 2,
  'optim': 2,
  'train': 3,
  'engine': 3,
  'rollout': 3,
  'analysis': 4,
}

# Who uses whom. The longest entry that fits a file is the one that counts; a
# package may always use itself, unless the entry names a single file.
ALLOWED = {
  'core': '',
  'parallel': 'core',
  'tasks': 'core',
  'weights': 'core',
  'model': 'parallel core',
  'rl': 'parallel core',
  'optim': 'parallel core',
  'train': 'model rl optim parallel weights core',
  'engine': 'weights core',
  'engine/interface': 'core',
  'engine/jax_engine': 'engine model parallel weights core',
  'engine/programs': 'engine model parallel core',
  'rollout': 'tasks weights core engine/interface',
  'analysis': 'rollout tasks weights core',
}

# These start in a second on hosts without JAX; it must not be reached from
# them through any chain of imports.
JAX_FREE = (
  'core',
  'tasks',
  'weights',
  'rollout',
  'analysis',
  'engine/interface',
  'engine/fake_engine',
  'engine/sglang_',
  'model/config',
)
JAX = ('jax', 'jaxlib', 'flax', 'optax', 'orbax')

# One door per dependency: the only files that may import it.
DOORS = {
  'flax': ('model/',),
  'optax': ('optim/', 'train/step'),
  'orbax': ('train/tree_store',),
  'sglang': ('engine/sglang_',),
  'google': ('core/storage',),
  'numba': ('weights/coder',),
  'tensorboard': ('core/metrics',),
  'matplotlib': ('analysis/curves',),
  'jinja2': ('analysis/page',),
  'tokenizers': ('rollout/chat',),
  'absl.app': (),  # experiments/ only
  'absl.flags': (),  # experiments/ only
  'torch': (),  # tests only
  'transformers': (),  # tests only
  'importlib': (),  # an import that this test would not see
}

# Same inputs, same bits: no clock, network, file system or hidden randomness.
PURE = ('parallel', 'model', 'rl', 'optim')
IMPURE = frozenset(
  'asyncio datetime http io os pathlib random requests secrets shutil socket '
  'subprocess tempfile threading time urllib'.split()
)


def _sources() -> dict[str, str]:
  package = ROOT / 'swe17_jax'
  return {
    path.relative_to(package).as_posix(): path.read_text()
    for path in sorted(package.rglob('*.py'))
  }


def _imports(source: str) -> Iterator[str]:
  """Yields dotted names; '.' stands before those of a relative import."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      start = '.' * node.level + (node.module or '')
      yield from (f'{start}.{alias.name}' for alias in node.names)


def _ours(name: str, sources: Mapping[str, str]) -> str | None:
  """'swe17_jax.core.records.Task' -> 'core/records'; None if not ours."""
  head, *parts = name.split('.')
  if head != 'swe17_jax':
    return None
  while parts:
    path = '/'.join(parts)
    if f'{path}.py' in sources or f'{path}/__init__.py' in sources:
      return path
    parts.pop()
  return ''


def _within(name: str, parent: str, separator: str) -> bool:
  return name == parent or name.startswith(parent + separator)


def _allowed(stem: str) -> list[str]:
  key = max((k for k in ALLOWED if _within(stem, k, '/')), key=len, default='')
  itself = [] if '/' in key or not key else [key]
  return ALLOWED.get(key, '').split() + itself


def _floor_problems(sources: Mapping[str, str]) -> Iterator[str]:
  for path, source in sources.items():
    stem = path.removesuffix('.py')
    floor = FLOORS.get(stem.split('/')[0])
    if floor is None and path != '__init__.py':
      yield f'{path} stands on no floor; add its folder to FLOORS and ALLOWED'
      continue
    for name in _imports(source):
      target = _ours(name, sources)
      if name.startswith('.'):
        yield f'{path} has a relative import of {name}; write swe17_jax....'
      if target is None:
        continue
      allowed = _allowed(stem)
      if not any(_within(target, entry, '/') for entry in allowed):
        yield (
          f'floor {floor} file {path} imports floor '
          f'{FLOORS.get(target.split("/")[0])} '
          f'swe17_jax.{target.replace("/", ".")}; allowed: '
          f'{" ".join(allowed)}'
        )


def _door_problems(sources: Mapping[str, str]) -> Iterator[str]:
  for path, source in sources.items():
    for name in _imports(source):
      for library, doors in DOORS.items():
        if _within(name, library, '.') and not path.startswith(doors):
          yield f'{path} imports {name}; its doors are: {doors or "none"}'
      if path.startswith(PURE) and name.split('.')[0] in IMPURE:
        yield f'{path} imports {name}; {", ".join(PURE)} are pure functions'


def _jax_problems(sources: Mapping[str, str]) -> Iterator[str]:
  graph = {
    path.removesuffix('.py'): set(_imports(source))
    for path, source in sources.items()
  }

  def chain(stem: str, seen: set[str]) -> list[str] | None:
    seen.add(stem)
    for name in sorted(graph.get(stem, ())):
      if name.split('.')[0] in JAX:
        return [stem, name]
      target = _ours(name, sources)
      if target in graph and target not in seen:
        if rest := chain(target, seen):
          return [stem, *rest]
    return None

  for stem in graph:
    if stem.startswith(JAX_FREE):
      if found := chain(stem, set()):
        yield f'{stem}.py must not reach JAX: {" -> ".join(found)}'


def _problems(sources: Mapping[str, str]) -> list[str]:
  checks = (_floor_problems, _door_problems, _jax_problems)
  return [problem for check in checks for problem in check(sources)]


class LayeringTest(parameterized.TestCase):
  def test_the_package_keeps_its_floors_and_doors(self):
    self.assertEqual(_problems(_sources()), [])

  def test_every_import_goes_down_or_sideways(self):
    for key, allowed in ALLOWED.items():
      for entry in allowed.split():
        self.assertLessEqual(
          FLOORS[entry.split('/')[0]], FLOORS[key.split('/')[0]], key
        )

  @parameterized.named_parameters(
    (
      'upward',
      {'weights/delta.py': 'from swe17_jax import train'},
      'floor 1 file weights/delta.py imports floor 3 swe17_jax.train; '
      'allowed: core weights',
    ),
    (
      'upward_inside_a_function',
      {'core/config.py': 'def f():\n  import swe17_jax.rl.loss as loss'},
      'floor 0 file core/config.py imports floor 2 swe17_jax.rl.loss',
    ),
    (
      'sideways',
      {'train/loop.py': 'from swe17_jax.rollout.worker import run'},
      'floor 3 file train/loop.py imports floor 3 swe17_jax.rollout.worker',
    ),
    (
      'past_the_interface',
      {'rollout/worker.py': 'from swe17_jax.engine import fake_engine'},
      'swe17_jax.engine.fake_engine; allowed: tasks weights core '
      'engine/interface rollout',
    ),
    (
      'model_from_another_engine',
      {'engine/fake_engine.py': 'from swe17_jax.model import config'},
      'imports floor 2 swe17_jax.model.config; allowed: weights core engine',
    ),
    ('relative', {'rl/loss.py': 'from . import x'}, 'relative import of ..x'),
    ('new_folder', {'misc/x.py': ''}, 'misc/x.py stands on no floor'),
    (
      'door',
      {'rl/loss.py': 'from flax import nnx'},
      "rl/loss.py imports flax.nnx; its doors are: ('model/',)",
    ),
    (
      'flags',
      {'train/loop.py': 'from absl import flags, logging'},
      'train/loop.py imports absl.flags; its doors are: none',
    ),
    ('torch', {'model/hf.py': 'import torch.nn'}, 'imports torch.nn; its doo'),
    ('clock', {'rl/buffer.py': 'import time'}, 'rl/buffer.py imports time'),
    (
      'jax_directly',
      {'tasks/dataset.py': 'import jax.numpy as jnp'},
      'tasks/dataset.py must not reach JAX: tasks/dataset -> jax.numpy',
    ),
    (
      'jax_through_others',
      {
        'rollout/worker.py': 'from swe17_jax.tasks import dataset',
        'tasks/dataset.py': 'from swe17_jax.core.records import Task',
        'core/records.py': 'if True:\n  import jaxlib',
      },
      'rollout/worker.py must not reach JAX: rollout/worker -> tasks/dataset '
      '-> core/records -> jaxlib',
    ),
  )
  def test_a_planted_violation_is_found(self, planted, message):
    found = _problems(_EXAMPLE | planted)
    self.assertTrue(any(message in problem for problem in found), found)

  def test_what_is_drawn_passes(self):
    self.assertEqual(_problems(_EXAMPLE), [])


# A small house that keeps the rules; the tests above plant into it.
_EXAMPLE = {
  '__init__.py': '"""Ring."""',
  'core/__init__.py': '',
  'core/records.py': 'import numpy as np\nfrom absl import logging',
  'tasks/dataset.py': 'from swe17_jax.core import records',
  'weights/delta.py': 'from swe17_jax.core.records import Task',
  'model/config.py': 'import dataclasses',
  'model/moe.py': 'from flax import nnx\nfrom swe17_jax.model import config',
  'rl/loss.py': 'import jax',
  'optim/muon.py': 'import optax',
  'train/__init__.py': '',
  'train/loop.py': 'from swe17_jax.model import moe\nimport time',
  'train/tree_store.py': 'import orbax.checkpoint as ocp',
  'engine/interface.py': 'from swe17_jax.core import records',
  'engine/fake_engine.py': 'from swe17_jax.engine import interface',
  'engine/jax_engine.py': 'from swe17_jax.model import moe',
  'rollout/worker.py': 'from swe17_jax.engine import interface',
}


if __name__ == '__main__':
  absltest.main()
