"""Hugging Face model folders: config.json and safetensors, without JAX.

Reading maps files into memory: only the bytes of the slices that are asked
for are touched. Writing goes through a neighbour folder `NAME.partial` that
is renamed at the end, so that a folder under its own name is whole.

Format (that of `transformers`): `config.json`; then either one file
`model.safetensors`, or `model-00001-of-0000N.safetensors` and the index
`model.safetensors.index.json`, {"metadata": {"total_size": bytes},
"weight_map": {tensor name: file name}}.

Example:
  write_folder(path, hf_config, [('lm_head.weight', array)])
  rows = open_folder(path).read_slice('lm_head.weight', (slice(0, 8),))
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
import safetensors
import safetensors.numpy

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
# `transformers` refuses files that do not say which framework wrote them.
_WRITER = {'format': 'pt'}


class FolderError(ValueError):
  """A model folder that cannot be read or must not be written."""


@dataclasses.dataclass(frozen=True)
class Folder:
  """An opened model folder. Tensors are read when they are asked for."""

  path: pathlib.Path
  config: dict[str, Any]  # config.json
  shapes: Mapping[str, tuple[int, ...]]  # tensor name -> shape
  _files: Mapping[str, Any]  # tensor name -> opened safetensors file

  @property
  def names(self) -> tuple[str, ...]:
    """Names of all tensors, in the order of the files."""
    return tuple(self.shapes)

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor in its stored dtype.

    Raises:
      FolderError: no tensor has this name.
    """
    return self.read_slice(name, ())

  def read_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns `tensor[index]`, reading no more than that.

    Args:
      name: a tensor.
      index: slices of step 1, one for each leading axis.

    Raises:
      FolderError: no tensor has this name.
    """
    if name not in self._files:
      raise FolderError(f'{self.path} has no tensor {name!r}')
    return self._files[name].get_slice(name)[index]


def open_folder(path: pathlib.Path) -> Folder:
  """Opens a model folder and reads its headers, not its weights.

  Raises:
    FolderError: a file that is missing, cut off or damaged; the message
      names it.
  """
  path = pathlib.Path(path)
  config = read_config(path)
  if (path / _INDEX).exists():
    weight_map = _read_json(path / _INDEX).get('weight_map')
    if not isinstance(weight_map, dict):
      raise FolderError(f'{path / _INDEX} has no weight_map; fetch it again')
    shards = sorted(set(weight_map.values()))
  else:
    weight_map, shards = {}, [_SINGLE]
  shapes: dict[str, tuple[int, ...]] = {}
  files: dict[str, Any] = {}
  for shard in shards:
    opened = _open_shard(path / shard)
    for name in opened.keys():  # noqa: SIM118  not a mapping
      shapes[name] = tuple(opened.get_slice(name).get_shape())
      files[name] = opened
  lost = sorted(set(weight_map) - set(files))
  if lost:
    raise FolderError(
      f'{path / _INDEX} lists {len(lost)} tensors that no file holds, first '
      f'{lost[0]!r} in {weight_map[lost[0]]}; fetch the folder again'
    )
  return Folder(path, config, shapes, files)


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """Returns the config.json of a folder.

  Raises:
    FolderError: it is missing or is not a JSON object.
  """
  return _read_json(pathlib.Path(path) / 'config.json')


def _open_shard(path: pathlib.Path):
  if not path.is_file():
    raise FolderError(
      f'{path} is missing; a model folder holds {_SINGLE}, or {_INDEX} and '
      'every file that it lists'
    )
  try:
    return safetensors.safe_open(path, framework='np')
  except (safetensors.SafetensorError, OSError) as error:
    raise FolderError(
      f'{path} ({path.stat().st_size} bytes) is cut off or damaged: {error}; '
      'fetch it again'
    ) from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_bytes())
  except FileNotFoundError as error:
    raise FolderError(
      f'{path} is missing; give the folder that holds it'
    ) from error
  except (OSError, ValueError) as error:
    raise FolderError(f'{path} is not readable JSON: {error}') from error
  if not isinstance(value, dict):
    raise FolderError(f'{path} must hold a JSON object')
  return value


def write_folder(
  path: pathlib.Path,
  config: Mapping[str, Any],
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a model folder; it appears under `path` when it is whole.

  At most `max_shard_bytes` of tensors, or one tensor, are held at a time.

  Args:
    path: a folder that does not exist yet, or is empty.
    config: the dictionary of config.json.
    tensors: (name, array) pairs; names are unique.
    max_shard_bytes: size of one file.

  Raises:
    FolderError: `path` holds files, or a name comes twice.
  """
  path = pathlib.Path(path).absolute()
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise FolderError(f'{path} exists and is not empty; choose another')
  partial = path.with_name(path.name + '.partial')
  if partial.exists():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  sizes = _write_shards(partial, tensors, max_shard_bytes)
  weight_map = {}
  for number, names in enumerate(sizes):
    final = f'model-{number + 1:05}-of-{len(sizes):05}.safetensors'
    if len(sizes) == 1:
      final = _SINGLE
    (partial / f'{number}.safetensors').rename(partial / final)
    weight_map.update(dict.fromkeys(names, final))
  if len(sizes) > 1:
    total = sum(sum(names.values()) for names in sizes)
    _write_json(
      partial / _INDEX,
      {'metadata': {'total_size': total}, 'weight_map': weight_map},
    )
  _write_json(partial / 'config.json', config)
  partial.rename(path)


def _write_shards(partial, tensors, max_shard_bytes) -> list[dict[str, int]]:
  """Writes numbered files; returns the bytes of each tensor of each file."""
  sizes: list[dict[str, int]] = []
  shard: dict[str, np.ndarray] = {}
  seen: set[str] = set()

  def flush():
    # The format stores bytes in C order; views of other layouts are copied.
    whole = {name: np.ascontiguousarray(array) for name, array in shard.items()}
    file = partial / f'{len(sizes)}.safetensors'
    safetensors.numpy.save_file(whole, file, metadata=_WRITER)
    sizes.append({name: array.nbytes for name, array in whole.items()})
    shard.clear()

  filled = 0
  for name, array in tensors:
    if name in seen:
      raise FolderError(f'tensor {name!r} comes twice; names must be unique')
    seen.add(name)
    array = np.asarray(array)
    if shard and filled + array.nbytes > max_shard_bytes:
      flush()
      filled = 0
    shard[name] = array
    filled += array.nbytes
  flush()
  return sizes


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2, sort_keys=True) + '\n')
