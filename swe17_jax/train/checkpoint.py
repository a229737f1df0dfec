"""The trainer's state on disk, one checkpoint per step.

A checkpoint is a folder named after its step that appears whole (see
`train/tree_store`). The newest ones are kept; a restore takes the newest that
can be read, so a damaged one costs a step, not the run.

    checkpoints/00000012/    arrays of TrainState, named by their tree path;
                             metadata: wall_s and the digest of the arrays
"""

import pathlib
import shutil

import jax
import numpy as np
from absl import logging

from swe17_jax.train import tree_store
from swe17_jax.train.step import TrainState
from swe17_jax.weights import delta

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
  arrays = _flat(state)
  metadata = {'wall_s': wall_s, 'digest': _digest(arrays)}
  tree_store.save_tree(path, arrays, metadata=metadata)
  for old in _paths(folder)[:-KEEP]:
    shutil.rmtree(old)


def restore(
  folder: pathlib.Path, like: TrainState
) -> tuple[TrainState, float] | None:
  """Reads the newest readable checkpoint.

  Damaged ones that are newer are removed: their steps will be made again.

  Args:
    folder: as given to `save`.
    like: abstract state (`jax.eval_shape`) of the structure to restore.

  Returns:
    The state and its `wall_s`, or None if there is no checkpoint.

  Raises:
    tree_store.TreeError: there are checkpoints, and none can be read.
  """
  damaged: list[pathlib.Path] = []
  failure = None
  for path in reversed(_paths(folder)):
    try:
      found = _read(path, like)
    except tree_store.TreeError as error:
      logging.warning('passing over checkpoint %s: %s', path, error)
      damaged.append(path)
      failure = error
      continue
    for newer in damaged:
      shutil.rmtree(newer)
    return found
  if failure is not None:
    raise failure
  return None


def _read(path: pathlib.Path, like: TrainState) -> tuple[TrainState, float]:
  wanted = _flat(like)
  arrays = tree_store.restore_tree(path, wanted)
  metadata = tree_store.read_metadata(path)
  if metadata.get('digest') != (found := _digest(arrays)):
    raise tree_store.TreeError(
      f'{path} is damaged: its arrays have digest {found}, its metadata says '
      f'{metadata.get("digest")}; use another'
    )
  leaves = [arrays[name] for name in wanted]
  state = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return state, metadata['wall_s']


def _digest(arrays) -> str:
  return delta.digest({name: np.asarray(x) for name, x in arrays.items()})


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
