"""Checkpoint -> Hugging Face model folder.

  python experiments/export_hf.py --checkpoint=runs/base --out=base_hf

Reads CHECKPOINT/config.json and the parameters in CHECKPOINT/state, array by
array, and writes safetensors with their index. At most one array and one
file's tensors are in memory. Tensors keep their dtype. OUT appears at the
end; an interrupted export is started again from the top.
Wall time: the time to read and write the model's bytes once.
"""

import pathlib
import sys
from collections.abc import Iterator

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

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'Folder with config.json and state.', required=True
)
_OUT = flags.DEFINE_string(
  'out', None, 'Model folder to make; must not exist.', required=True
)
_MAX_SHARD_GB = flags.DEFINE_float(
  'max_shard_gb', 5.0, 'Size of one safetensors file, 1e9 bytes.', lower_bound=0
)


def export_checkpoint(
  checkpoint: pathlib.Path, out: pathlib.Path, *, max_shard_bytes: int
) -> None:
  """Converts the checkpoint folder into the model folder `out`."""
  hf_config = safetensors_folder.read_config(checkpoint)
  config = model_config.from_hf(hf_config)
  stored = tree_store.read_shapes(checkpoint / 'state')
  for leaf in hf.leaves(config):
    if ('params', *leaf.path) not in stored:
      raise tree_store.TreeError(
        f'{checkpoint}/state has no params.{".".join(leaf.path)}, which '
        'config.json asks for'
      )
  dtype = str(stored['params', 'embed_tokens'].dtype)
  # Readers compute in this dtype; draft layers were left out at the import.
  hf_config |= {'dtype': dtype, 'torch_dtype': dtype}
  if 'num_nextn_predict_layers' in hf_config:
    hf_config['num_nextn_predict_layers'] = 0
  safetensors_folder.write_folder(
    out,
    hf_config,
    _tensors(checkpoint / 'state', hf.leaves(config), stored),
    max_shard_bytes=max_shard_bytes,
  )


def _tensors(
  state: pathlib.Path,
  leaves: tuple[hf.Leaf, ...],
  stored: dict[tuple[str, ...], jax.ShapeDtypeStruct],
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (tensor name, array), reading one of our arrays at a time."""
  mesh = device_mesh.make_mesh({'fsdp': jax.device_count()})
  for leaf in progress.track(leaves, description='export'):
    keys = ('params', *leaf.path)
    wanted = jax.ShapeDtypeStruct(
      leaf.shape,
      stored[keys].dtype,
      sharding=sharding.named(mesh, leaf.logical_axes, leaf.shape),
    )
    for key in reversed(keys):
      wanted = {key: wanted}
    (array,) = jax.tree.leaves(tree_store.restore_tree(state, wanted))
    for name, slot in leaf.slots():
      yield name, np.asarray(array[slot.index])


def main(argv: list[str]) -> None:
  """Exports, or says in one sentence why not."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}; see --help')
  logging.set_verbosity(logging.WARNING)  # orbax tells every step
  try:
    export_checkpoint(
      pathlib.Path(_CHECKPOINT.value),
      pathlib.Path(_OUT.value),
      max_shard_bytes=int(_MAX_SHARD_GB.value * 1e9),
    )
  except (
    safetensors_folder.FolderError,
    model_config.ConfigError,
    hf.HfError,
    tree_store.TreeError,
    OSError,
  ) as error:
    sys.exit(f'export_hf: {error}')
  print(f'wrote {_OUT.value}')


if __name__ == '__main__':
  app.run(main)
