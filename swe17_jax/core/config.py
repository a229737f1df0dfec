"""`--set a.b=c` onto frozen dataclasses, type checked; a stable text dump.

A run's configuration is a tree of frozen dataclasses, each defined beside the
code that reads it. This module knows none of them: it changes leaves by their
dotted path and prints the tree. Text becomes the type that the field is
annotated with:

    int            10, -3, 1_000
    float          3e-5, 1, inf
    bool           true, false
    str            as it stands
    tuple[T, ...]  1,2,3 or (1, 2, 3); empty text is the empty tuple
    T | None       none, or a T

Example:
  >>> @dataclasses.dataclass(frozen=True)
  ... class Optimizer:
  ...   lr: float = 1e-3
  >>> apply_overrides(Optimizer(), ['lr=3e-5'])
  Optimizer(lr=3e-05)
  >>> render(Optimizer())
  'lr = 0.001'
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

_Config = TypeVar('_Config')

_NONE = type(None)


class ConfigError(ValueError):
  """An override names no field, or its value has the wrong type."""


def apply_overrides(config: _Config, overrides: Sequence[str]) -> _Config:
  """Returns a copy of `config` with some leaves changed.

  All overrides are applied at once, so that `__post_init__` judges the final
  combination only. Of two overrides of one path the later wins.

  Args:
    config: an instance of a frozen dataclass, possibly nested.
    overrides: texts of the form 'path=value', where path is dotted.

  Raises:
    ConfigError: an override is malformed, names no field (the message lists
      near names), or its value does not parse as the field's type.
    ValueError: whatever a `__post_init__` raises about the new values.
  """
  tree: dict[str, Any] = {}
  for override in overrides:
    path, separator, text = override.partition('=')
    if not separator or not path.strip():
      raise ConfigError(
        f'{override!r} is not an override; write path=value, for example '
        f'{next(_leaves(config))[0]}=...'
      )
    _plant(tree, config, path=path.strip(), text=text.strip())
  return _replace(config, tree)


def render(config: Any) -> str:
  """Returns all leaves as sorted `path = value` lines, the same each time."""
  return '\n'.join(
    f'{path} = {value!r}' for path, value in sorted(_leaves(config))
  )


def _leaves(node: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  for field in dataclasses.fields(node):
    value = getattr(node, field.name)
    if dataclasses.is_dataclass(value):
      yield from _leaves(value, f'{prefix}{field.name}.')
    elif field.init:
      yield prefix + field.name, value


def _plant(tree: dict[str, Any], config: Any, *, path: str, text: str) -> None:
  """Parses one override and puts its value into the tree of changes."""
  *parents, leaf = path.split('.')
  owner = config
  for name in parents:
    owner = _child(owner, name, root=config)
    if not dataclasses.is_dataclass(owner):
      raise ConfigError(
        f'{path}: {name!r} is {owner!r}, which has no fields to set'
      )
    tree = tree.setdefault(name, {})
  tree[leaf] = _leaf(owner, leaf, text, path=path, root=config)


def _child(owner: Any, name: str, *, root: Any) -> Any:
  names = [field.name for field in dataclasses.fields(owner) if field.init]
  if name in names:
    return getattr(owner, name)
  near = difflib.get_close_matches(name, names, n=3)
  # The right name in the wrong place: 'lr' where 'optimizer.lr' is meant.
  near += [p for p, _ in _leaves(root) if p.endswith('.' + name)][:3]
  if near:
    hint = 'did you mean ' + ' or '.join(repr(n) for n in near) + '?'
  else:
    hint = 'fields: ' + ', '.join(sorted(names))
  raise ConfigError(f'no field {name!r} in {type(owner).__name__}; {hint}')


def _leaf(owner: Any, name: str, text: str, *, path: str, root: Any) -> Any:
  value = _child(owner, name, root=root)
  if dataclasses.is_dataclass(value):
    inner = ', '.join(f'{path}.{p}' for p, _ in _leaves(value))
    raise ConfigError(f'{path!r} is a group of fields; set one of: {inner}')
  kind = typing.get_type_hints(type(owner))[name]
  try:
    return _parse(text, kind)
  except ValueError as error:
    raise ConfigError(f'{path} must be {_spell(kind)}, got {text!r}') from error


def _parse(text: str, kind: Any) -> Any:
  """Reads `text` as `kind`; ValueError where it is not one."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType) and _NONE in arguments:
    if text.lower() == 'none':
      return None
    (inner,) = (argument for argument in arguments if argument is not _NONE)
    return _parse(text, inner)
  if origin is tuple:
    return _parse_tuple(text, arguments)
  if kind is bool:
    if text.lower() not in ('true', 'false'):
      raise ValueError('neither true nor false')
    return text.lower() == 'true'
  if kind is float:
    number = float(text)
    if math.isnan(number):
      raise ValueError('nan is not a setting')
    return number
  if kind in (int, str):
    return kind(text)
  raise ValueError(f'fields of type {kind} cannot be set from text')


def _parse_tuple(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
  if text.startswith('(') and text.endswith(')'):
    text = text[1:-1]
  items = [item.strip() for item in text.split(',')]
  if items[-1] == '':  # '' and '1,' as Python writes them
    items.pop()
  if len(kinds) == 2 and kinds[1] is Ellipsis:
    kinds = (kinds[0],) * len(items)
  if len(kinds) != len(items):
    raise ValueError(f'needs {len(kinds)} items')
  return tuple(_parse(*pair) for pair in zip(items, kinds, strict=True))


def _spell(kind: Any) -> str:
  if kind is bool:
    return 'true or false'
  return kind.__name__ if isinstance(kind, type) else str(kind)


def _replace(node: Any, tree: dict[str, Any]) -> Any:
  changes = {}
  for name, value in tree.items():
    current = getattr(node, name)
    nested = dataclasses.is_dataclass(current)
    changes[name] = _replace(current, value) if nested else value
  return dataclasses.replace(node, **changes)
