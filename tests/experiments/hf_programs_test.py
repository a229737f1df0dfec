"""import_hf and export_hf as a person runs them, on eight devices."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from swe17_jax.core import safetensors_folder
from swe17_jax.model import config as model_config
from swe17_jax.model import hf

ROOT = pathlib.Path(__file__).resolve().parents[2]
_CONFIG = model_config.TINY_MLA


def _run(program, *arguments):
  return subprocess.run(
    [sys.executable, f'experiments/{program}.py', *arguments],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )


class ProgramsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    generator = np.random.default_rng(0)
    self.tensors = {
      name: generator.integers(0, 2**16, slot.shape, dtype=np.uint16).view(
        jnp.bfloat16
      )
      for name, slot in hf.tensor_specs(_CONFIG).items()
    }

  def _write(self, tensors):
    safetensors_folder.write_folder(
      self.folder / 'in',
      model_config.to_hf(_CONFIG) | {'eos_token_id': 5},
      tensors.items(),
      max_shard_bytes=400_000,
    )

  def test_there_and_back_is_bitwise(self):
    self._write(self.tensors)
    checkpoint = self.folder / 'checkpoint'
    done = _run(
      'import_hf',
      f'--hf_dir={self.folder / "in"}',
      f'--out={checkpoint}',
      '--mesh=fsdp=4,expert=2',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertCountEqual(os.listdir(checkpoint), ['config.json', 'state'])
    done = _run(
      'export_hf',
      f'--checkpoint={checkpoint}',
      f'--out={self.folder / "out"}',
      '--max_shard_gb=0.0005',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    folder = safetensors_folder.open_folder(self.folder / 'out')
    self.assertEqual(folder.config['eos_token_id'], 5)
    self.assertCountEqual(folder.names, self.tensors)
    for name, array in self.tensors.items():
      self.assertEqual(folder.read(name).dtype, array.dtype)
      self.assertEqual(folder.read(name).tobytes(), array.tobytes(), name)

  def test_a_missing_tensor_is_one_sentence_and_leaves_nothing(self):
    name = 'model.layers.2.mlp.experts.3.up_proj.weight'
    del self.tensors[name]
    self._write(self.tensors)
    done = _run(
      'import_hf', f'--hf_dir={self.folder / "in"}', f'--out={self.folder}/c'
    )
    self.assertEqual(done.returncode, 1)
    self.assertStartsWith(done.stderr, 'import_hf: 1 tensors do not fit')
    self.assertIn(name, done.stderr)
    self.assertNotIn('Traceback', done.stderr)
    self.assertEqual(os.listdir(self.folder), ['in'])


if __name__ == '__main__':
  absltest.main()
