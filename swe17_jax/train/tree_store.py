"""Nested dicts of sharded arrays on disk: orbax behind four functions.

A tree is a folder that appears whole, by a rename at the end, or not at all.
It can be written at once (`save_tree`) or array by array, so that no host
ever holds more than one of them (`save_leaves`), and read in part and onto
any mesh (`restore_tree`). A small JSON dictionary commits together with it.

Example:
  save_tree(path, {'params': params}, metadata={'step': 3})
  wanted = {'params': {'lm_head': jax.ShapeDtypeStruct(..., sharding=s)}}
  lm_head = restore_tree(path, wanted)['params']['lm_head']
"""

import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

Tree = dict[str, Any]

# Where `ocp.partial` gathers arrays until it is told to finish.
_UNFINISHED = '.partial_save'


class TreeError(RuntimeError):
  """A stored tree is absent, damaged, or not the one that is asked for."""


def save_tree(
  path: pathlib.Path, tree: Tree, *, metadata: Mapping[str, Any] | None = None
) -> None:
  """Writes a tree; returns when it is readable under `path`.

  Args:
    path: a folder that does not exist yet.
    tree: nested dict of jax or numpy arrays.
    metadata: small JSON dictionary, read back by `read_metadata`.

  Raises:
    TreeError: `path` exists.
  """
  path = _absent(path)
  with _saving():
    ocp.save(path, tree, custom_metadata=dict(metadata or {}))


def save_leaves(
  path: pathlib.Path,
  leaves: Iterable[tuple[tuple[str, ...], jax.Array]],
  *,
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Writes a tree array by array; `leaves` yields (path in the tree, array).

  What an interrupted call left behind is discarded by the next.

  Raises:
    TreeError: `path` exists.
  """
  path = _absent(path)
  unfinished = path.with_name(path.name + _UNFINISHED)
  if unfinished.exists():
    shutil.rmtree(unfinished)
  for keys, array in leaves:
    for key in reversed(keys):
      array = {key: array}
    with _saving():
      ocp.partial.save(path, array, custom_metadata=dict(metadata or {}))
    del array  # the next one is made before this name is bound again
  ocp.partial.finalize(path)


def restore_tree(path: pathlib.Path, abstract: Tree) -> Tree:
  """Reads the arrays that `abstract` names, and nothing else.

  Args:
    path: a folder that `save_tree` or `save_leaves` wrote.
    abstract: nested dict of `jax.ShapeDtypeStruct`. Arrays come in its dtype
      and on its sharding; without one, on the first device.

  Raises:
    TreeError: no tree at `path`, a damaged one, an array that it lacks, or
      another shape.
  """
  path = pathlib.Path(path).absolute()
  stored = read_shapes(path)
  for keys, leaf in _flat(abstract):
    if keys not in stored:
      raise TreeError(f'{path} has no array {".".join(keys)}')
    if stored[keys].shape != leaf.shape:
      raise TreeError(
        f'{".".join(keys)} has shape {stored[keys].shape} in {path}, but '
        f'{leaf.shape} is asked for: is it a checkpoint of this config?'
      )
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  try:
    with context:
      return ocp.load(path, jax.tree.map(_placed, abstract))
  except Exception as error:  # all that orbax says of cut off data
    raise TreeError(f'{path} is damaged ({error}); use another') from error


def read_shapes(
  path: pathlib.Path,
) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
  """Returns path in the tree -> shape and dtype of every stored array.

  Raises:
    TreeError: no finished tree at `path`.
  """
  return {
    keys: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for keys, leaf in _flat(_metadata(path).metadata)
  }


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON dictionary that was saved with the tree.

  Raises:
    TreeError: no finished tree at `path`.
  """
  return dict(_metadata(path).custom_metadata or {})


def _saving() -> ocp.Context:
  # Weights hardly compress, and compressing takes most of the time.
  context = ocp.Context()
  context.array.saving.use_compression = False
  return context


def _metadata(path: pathlib.Path) -> ocp.CheckpointMetadata:
  # From a relative path orbax reads nothing, and only logs why.
  path = pathlib.Path(path).absolute()
  if not ocp.is_orbax_checkpoint(path):
    raise TreeError(
      f'{path} holds no finished tree; give the folder of a checkpoint that '
      'was saved to its end'
    )
  try:
    return ocp.metadata(path)
  except (OSError, ValueError, KeyError) as error:
    raise TreeError(f'{path} is damaged ({error}); use another') from error


def _absent(path: pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(path).absolute()
  if path.exists():
    raise TreeError(f'{path} exists; trees are written once: choose another')
  return path


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  if leaf.sharding is not None:
    return leaf
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)


def _flat(tree: Tree) -> list[tuple[tuple[str, ...], Any]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(tuple(str(k.key) for k in keys), leaf) for keys, leaf in leaves]
