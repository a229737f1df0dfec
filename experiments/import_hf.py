"""Hugging Face model folder -> sharded checkpoint.

  python experiments/import_hf.py --hf_dir=Qwen3-30B-A3B --out=runs/base \
      --mesh=fsdp=4,expert=2

Array by array: each device reads its own slices of the safetensors files, the
array is written, and dropped before the next one is read. So a host holds at
most its devices' part of one array. Tensors keep their dtype.

Writes OUT/state (the tree {'params': ...}) and OUT/config.json. Both appear
at the end, together; an interrupted import is started again from the top.
Wall time: the time to read and write the model's bytes once.
"""

import json
import pathlib
import shutil
import sys

import jax
import numpy as np
from absl import app, flags, logging
from rich import progress

from swe17_jax.core import safetensors_folder
from swe17_jax.model import config as model_config
from swe17_jax.model import hf
from swe17_jax.parallel import mesh as device_mesh
from swe17_jax.parallel import sharding
from swe17_jax.train import tree_store

_HF_DIR = flags.DEFINE_string(
  'hf_dir', None, 'Folder with config.json and safetensors.', required=True
)
_OUT = flags.DEFINE_string(
  'out', None, 'Checkpoint folder to make; must not exist.', required=True
)
_MESH = flags.DEFINE_string(
  'mesh',
  None,
  'How to split the arrays, such as fsdp=4,expert=2; axes are '
  f'{", ".join(device_mesh.AXES)}. Default: all devices on fsdp.',
)


def import_folder(
  hf_dir: pathlib.Path, out: pathlib.Path, *, mesh: jax.sharding.Mesh
) -> None:
  """Converts the model folder `hf_dir` into the checkpoint folder `out`."""
  if out.exists():
    raise tree_store.TreeError(f'--out={out} exists; choose another')
  folder = safetensors_folder.open_folder(hf_dir)
  if folder.config.get('quantization_config'):
    raise hf.HfError(
      f'{hf_dir} holds quantised weights (quantization_config in config.json); '
      'convert them to bfloat16 first'
    )
  config = model_config.from_hf(folder.config)
  hf.check_shapes(folder.shapes, config)
  partial = out.with_name(out.name + '.partial')
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  (partial / 'config.json').write_text(json.dumps(folder.config, indent=2))
  tree_store.save_leaves(
    partial / 'state', _arrays(folder, hf.leaves(config), mesh)
  )
  partial.rename(out)


def _arrays(folder, leaves, mesh):
  """Yields (path in the tree, array on its devices)."""
  parameters = sum(int(np.prod(leaf.shape)) for leaf in leaves)
  with progress.Progress(
    *progress.Progress.get_default_columns(), progress.TimeElapsedColumn()
  ) as bar:
    task = bar.add_task('import', total=parameters)
    for leaf in leaves:
      bar.update(task, description='.'.join(leaf.path))
      yield (
        ('params', *leaf.path),
        jax.make_array_from_callback(
          leaf.shape,
          sharding.named(mesh, leaf.logical_axes, leaf.shape),
          lambda index, leaf=leaf: hf.read_leaf(folder.read_slice, leaf, index),
        ),
      )
      bar.advance(task, int(np.prod(leaf.shape)))


def main(argv: list[str]) -> None:
  """Imports, or says in one sentence why not."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}; see --help')
  logging.set_verbosity(logging.WARNING)  # orbax tells every step
  try:
    if _MESH.value is None:
      shape = {'fsdp': jax.device_count()}
    else:
      shape = device_mesh.parse(_MESH.value)
    import_folder(
      pathlib.Path(_HF_DIR.value),
      pathlib.Path(_OUT.value),
      mesh=device_mesh.make_mesh(shape),
    )
  except (
    safetensors_folder.FolderError,
    model_config.ConfigError,
    hf.HfError,
    device_mesh.MeshError,
    tree_store.TreeError,
    OSError,
  ) as error:
    sys.exit(f'import_hf: {error}')
  print(f'wrote {_OUT.value}')


if __name__ == '__main__':
  app.run(main)
