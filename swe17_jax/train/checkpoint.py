"""The trainer's state on disk, one checkpoint per step.

A checkpoint is a folder named after its step that appears whole (see
`train/tree_store`). The newest ones are kept; a restore takes the newest that
can be read, so a damaged one costs a step, not the run.

    checkpoints/00000012/    arrays of TrainState, named by their tree path
"""

import pathlib
import shutil

import jax
from absl import logging

from swe17_jax.train import tree_store
from swe17_jax.train.step import TrainState

KEEP = 2  # newest checkpoints kept on disk


def save(folder: pathlib.Path, state: TrainState, *, wall_s: float) -> None:
  """Writes the state of a step and removes all but the newest.

  Args:
    folder: holds all checkpoints of a run.
    state: on device or host.
    wall_s: seconds of training so far, over all restarts.

  Raises:
    tree_store.TreeError: the checkpoint exists already.
  """
  path = folder / f'{int(state.step):08d}'
  tree_store.save_tree(path, _flat(state), metadata={'wall_s': wall_s})
  for old in _paths(folder)[:-KEEP]:
    shutil.rmtree(old)


def restore(
  folder: pathlib.Path, like: TrainState
) -> tuple[TrainState, float] | None:
  """Reads the newest readable checkpoint.

  Args:
    folder: as given to `save`.
    like: abstract state (`jax.eval_shape`) of the structure to restore.

  Returns:
    The state and its `wall_s`, or None if there is no checkpoint.

  Raises:
    tree_store.TreeError: there are checkpoints, and none can be read.
  """
  failure = None
  for path in reversed(_paths(folder)):
    try:
      arrays = tree_store.restore_tree(path, _flat(like))
      wall_s = tree_store.read_metadata(path)['wall_s']
    except tree_store.TreeError as error:
      logging.warning('passing over checkpoint %s: %s', path, error)
      failure = error
      continue
    structure = jax.tree.structure(like)
    leaves = [arrays[name] for name in _flat(like)]
    return jax.tree.unflatten(structure, leaves), wall_s
  if failure is not None:
    raise failure
  return None


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
  if not folder.is_dir():
    return []
  return sorted(path for path in folder.iterdir() if path.name.isdecimal())


def _flat(state: TrainState) -> dict[str, jax.Array]:
  leaves = jax.tree_util.tree_flatten_with_path(state)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
