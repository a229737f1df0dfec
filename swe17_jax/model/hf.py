"""Hugging Face tensors and our parameters: one table, read both ways.

Our weights keep the orientation of Hugging Face, `[out, in]`. Equal layers
are stacked on axis 0 and experts on axis 1, so every tensor of a checkpoint
is one contiguous slice of one of our arrays: nothing is transposed, and a
weight delta in Hugging Face names can be applied in place through `views`.

A row of the table says the name of a tensor inside its layer, the path of
our array inside its stack, and the logical axes of the tensor; `{e}` stands
for the number of an expert. Names on disk are per expert:
`model.layers.3.mlp.experts.7.gate_proj.weight` is
`params['moe_layers']['mlp']['experts']['gate_proj'][3 - dense, 7]`.

Which rows a model has follows from its config: latent or grouped-query
attention, a correction bias, shared experts. There is no I/O here.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from swe17_jax.model.config import MoEConfig

Params = dict
Row = tuple[str, str, str]  # tensor name, our path, logical axes

_EMBEDDING: Row = ('model.embed_tokens.weight', 'embed_tokens', 'vocab hidden')
_NORM: Row = ('model.norm.weight', 'norm.weight', 'norm')
_HEAD: Row = ('lm_head.weight', 'lm_head', 'vocab hidden')

_BLOCK: tuple[Row, ...] = (
  ('input_layernorm.weight', 'input_layernorm.weight', 'norm'),
  (
    'post_attention_layernorm.weight',
    'post_attention_layernorm.weight',
    'norm',
  ),
)
_GQA: tuple[Row, ...] = (
  ('self_attn.q_proj.weight', 'self_attn.q_proj', 'heads:q hidden'),
  ('self_attn.k_proj.weight', 'self_attn.k_proj', 'heads:kv hidden'),
  ('self_attn.v_proj.weight', 'self_attn.v_proj', 'heads:kv hidden'),
  ('self_attn.o_proj.weight', 'self_attn.o_proj', 'hidden heads:q'),
  ('self_attn.q_norm.weight', 'self_attn.q_norm.weight', 'norm:head'),
  ('self_attn.k_norm.weight', 'self_attn.k_norm.weight', 'norm:head'),
)
_MLA: tuple[Row, ...] = (
  (
    'self_attn.kv_a_proj_with_mqa.weight',
    'self_attn.kv_a_proj_with_mqa',
    'rank:latent hidden',
  ),
  (
    'self_attn.kv_a_layernorm.weight',
    'self_attn.kv_a_layernorm.weight',
    'norm:kv_rank',
  ),
  ('self_attn.kv_b_proj.weight', 'self_attn.kv_b_proj', 'heads:kv rank:kv'),
  ('self_attn.o_proj.weight', 'self_attn.o_proj', 'hidden heads:v'),
)
_MLA_QUERY: tuple[Row, ...] = (
  ('self_attn.q_proj.weight', 'self_attn.q_proj', 'heads:q hidden'),
)
_MLA_LOW_RANK_QUERY: tuple[Row, ...] = (
  ('self_attn.q_a_proj.weight', 'self_attn.q_a_proj', 'rank:q hidden'),
  (
    'self_attn.q_a_layernorm.weight',
    'self_attn.q_a_layernorm.weight',
    'norm:q_rank',
  ),
  ('self_attn.q_b_proj.weight', 'self_attn.q_b_proj', 'heads:q rank:q'),
)
_DENSE: tuple[Row, ...] = (
  ('mlp.gate_proj.weight', 'mlp.gate_proj', 'ffn:dense hidden'),
  ('mlp.up_proj.weight', 'mlp.up_proj', 'ffn:dense hidden'),
  ('mlp.down_proj.weight', 'mlp.down_proj', 'hidden ffn:dense'),
)
_MOE: tuple[Row, ...] = (
  ('mlp.gate.weight', 'mlp.gate.weight', 'router hidden'),
  (
    'mlp.experts.{e}.gate_proj.weight',
    'mlp.experts.gate_proj',
    'expert ffn hidden',
  ),
  (
    'mlp.experts.{e}.up_proj.weight',
    'mlp.experts.up_proj',
    'expert ffn hidden',
  ),
  (
    'mlp.experts.{e}.down_proj.weight',
    'mlp.experts.down_proj',
    'expert hidden ffn',
  ),
)
_CORRECTION_BIAS: tuple[Row, ...] = (
  (
    'mlp.gate.e_score_correction_bias',
    'mlp.gate.e_score_correction_bias',
    'router',
  ),
)
# A wrong config.json makes all tensors wrong; nobody reads 70,000 names.
_NAMED = 100

_SHARED: tuple[Row, ...] = tuple(
  (
    f'mlp.shared_experts.{name}.weight',
    f'mlp.shared_experts.{name}',
    axes,
  )
  for name, axes in (
    ('gate_proj', 'ffn:shared hidden'),
    ('up_proj', 'ffn:shared hidden'),
    ('down_proj', 'hidden ffn:shared'),
  )
)


class HfError(ValueError):
  """Tensors that do not fit the config; the message names them."""


@dataclasses.dataclass(frozen=True)
class Slot:
  """Where a Hugging Face tensor lies in our parameters."""

  path: tuple[str, ...]  # keys of the nested dict
  index: tuple[int, ...]  # layer and expert in the stacked array
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One of our arrays, and the Hugging Face tensors that it is made of."""

  path: tuple[str, ...]
  logical_axes: tuple[str, ...]  # one per axis, for `parallel.sharding`
  shape: tuple[int, ...]
  stacked: int  # leading axes over tensors: 0, 1 (layer) or 2 (and expert)
  template: str  # tensor name with {layer} and {e}
  first_layer: int  # the layer that index 0 holds

  def slots(self) -> Iterator[tuple[str, Slot]]:
    """Yields (tensor name, slot) in the order of the index."""
    shape = self.shape[self.stacked :]
    for index in itertools.product(*map(range, self.shape[: self.stacked])):
      yield self.name(index), Slot(self.path, index, shape)

  def name(self, index: tuple[int, ...]) -> str:
    """Returns the name of the tensor at an index of the stacked axes."""
    layer, expert = (*index, 0, 0)[:2]
    return self.template.format(layer=self.first_layer + layer, e=expert)


def leaves(config: MoEConfig) -> tuple[Leaf, ...]:
  """Returns all arrays of the model's parameters."""
  sizes = _sizes(config)
  dense = config.first_k_dense_replace
  found = [_leaf('', 0, 0, _EMBEDDING, sizes)]
  for stack, first, layers, rows in (
    ('dense_layers', 0, dense, _attention(config) + _DENSE),
    ('moe_layers', dense, config.moe_layers, _attention(config) + _moe(config)),
  ):
    if layers:
      found += [_leaf(stack, first, layers, row, sizes) for row in rows]
  found.append(_leaf('', 0, 0, _NORM, sizes))
  if not config.tie_word_embeddings:
    found.append(_leaf('', 0, 0, _HEAD, sizes))
  return tuple(found)


def _attention(config: MoEConfig) -> tuple[Row, ...]:
  if not config.uses_mla:
    return _BLOCK + _GQA
  low_rank = config.q_lora_rank is not None
  return _BLOCK + (_MLA_LOW_RANK_QUERY if low_rank else _MLA_QUERY) + _MLA


def _moe(config: MoEConfig) -> tuple[Row, ...]:
  rows = _MOE
  if config.scoring_func == 'sigmoid':
    rows += _CORRECTION_BIAS
  return rows + (_SHARED if config.n_shared_experts else ())


def _sizes(config: MoEConfig) -> dict[str, int]:
  """Returns the length of every axis in the table ('axis' or 'axis:which')."""
  heads = config.num_attention_heads
  width = config.moe_intermediate_size
  sizes = {
    'vocab': config.vocab_size,
    'hidden': config.hidden_size,
    'norm': config.hidden_size,
    'router': config.num_experts,
    'expert': config.num_experts,
    'ffn': width,
    'ffn:dense': config.intermediate_size,
    'ffn:shared': width * config.n_shared_experts,
  }
  if not config.uses_mla:
    return sizes | {
      'heads:q': heads * config.head_dim,
      'heads:kv': config.num_key_value_heads * config.head_dim,
      'norm:head': config.head_dim,
    }
  nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
  return sizes | {
    'heads:q': heads * (nope + rope),
    'heads:kv': heads * (nope + config.v_head_dim),
    'heads:v': heads * config.v_head_dim,
    'rank:q': config.q_lora_rank or 0,
    'rank:kv': config.kv_lora_rank or 0,
    'rank:latent': (config.kv_lora_rank or 0) + rope,
    'norm:q_rank': config.q_lora_rank or 0,
    'norm:kv_rank': config.kv_lora_rank or 0,
  }


def _leaf(stack: str, first: int, layers: int, row: Row, sizes) -> Leaf:
  name, path, axes_text = row
  axes = axes_text.split()
  shape = tuple(sizes[axis] for axis in axes)
  logical_axes = tuple(axis.partition(':')[0] for axis in axes)
  if not stack:
    return Leaf(tuple(path.split('.')), logical_axes, shape, 0, name, 0)
  return Leaf(
    path=(stack, *path.split('.')),
    logical_axes=('layers', *logical_axes),
    shape=(layers, *shape),
    stacked=2 if '{e}' in name else 1,
    template='model.layers.{layer}.' + name,
    first_layer=first,
  )


def tensor_specs(config: MoEConfig) -> dict[str, Slot]:
  """Returns every Hugging Face tensor of a model, layer by layer."""
  ordered = []
  for leaf in leaves(config):
    for name, slot in leaf.slots():
      if leaf.stacked:
        layer = leaf.first_layer + slot.index[0]
      else:
        layer = (
          -1 if leaf.path == ('embed_tokens',) else config.num_hidden_layers
        )
      ordered.append((layer, name, slot))
  ordered.sort(key=lambda entry: entry[0])  # stable: rows keep their order
  return {name: slot for _, name, slot in ordered}


def _get(params: Params, path: tuple[str, ...]) -> Any:
  for key in path:
    if key not in params:
      raise HfError(f'the parameters have no {".".join(path)}')
    params = params[key]
  return params


def to_hf(params: Params, config: MoEConfig) -> Iterator[tuple[str, Any]]:
  """Yields (tensor name, array), one at a time; NumPy arrays give views.

  Raises:
    HfError: parameters of another shape than `config` says, before the first
      tensor is yielded.
  """
  for leaf in leaves(config):
    found = _get(params, leaf.path).shape
    if tuple(found) != leaf.shape:
      raise HfError(
        f'{".".join(leaf.path)} has shape {tuple(found)}, but the config '
        f'gives {leaf.shape}'
      )
  return (
    (name, _get(params, slot.path)[slot.index])
    for name, slot in tensor_specs(config).items()
  )


def views(host_params: Params, config: MoEConfig) -> dict[str, np.ndarray]:
  """Returns name -> writable view of stacked host arrays.

  Raises:
    HfError: as `to_hf`.
  """
  return dict(to_hf(host_params, config))


def check_shapes(
  shapes: Mapping[str, tuple[int, ...]], config: MoEConfig
) -> None:
  """Compares the tensors of a checkpoint with the config.

  Tensors that the decoder does not use are logged and passed over: those of
  layers past the last (the draft layers of multi-token prediction), rotary
  frequencies, which follow from the config, and the head of a tied model.

  Raises:
    HfError: names the missing, misshapen and unexpected tensors.
  """
  specs = tensor_specs(config)
  extra = [name for name in shapes if name not in specs]
  unused = [name for name in extra if _unused(name, config)]
  if unused:
    logging.info(
      'left out %d tensors that the decoder does not use, first %s',
      len(unused),
      unused[0],
    )
  problems = [
    *(
      f'missing {name} {slot.shape}'
      for name, slot in specs.items()
      if name not in shapes
    ),
    *(
      f'{name} has shape {tuple(shapes[name])}, but the config gives '
      f'{slot.shape}'
      for name, slot in specs.items()
      if name in shapes and tuple(shapes[name]) != slot.shape
    ),
    *(
      f'unexpected {name} {tuple(shapes[name])}'
      for name in extra
      if not _unused(name, config)
    ),
  ]
  if problems:
    raise HfError(
      f'{len(problems)} tensors do not fit config.json '
      f'(model_type={config.model_type!r}): '
      + '; '.join(problems[:_NAMED])
      + ('; ...' if len(problems) > _NAMED else '')
    )


def _unused(name: str, config: MoEConfig) -> bool:
  parts = name.split('.')
  if parts[:2] == ['model', 'layers'] and parts[2].isdecimal():
    if int(parts[2]) >= config.num_hidden_layers:
      return True
  if name.endswith('.rotary_emb.inv_freq'):
    return True
  return config.tie_word_embeddings and name == _HEAD[0]


def read_leaf(
  read_slice: Callable[[str, tuple[slice, ...]], np.ndarray],
  leaf: Leaf,
  index: tuple[slice, ...],
) -> np.ndarray:
  """Returns `array[index]` of one of our arrays, reading no more than that.

  Args:
    read_slice: (tensor name, slices) -> that part of the tensor.
    leaf: the array.
    index: a slice per axis, as `jax.make_array_from_callback` gives them.

  Raises:
    HfError: the tensors of this array do not have one dtype.
  """
  stack, inner = index[: leaf.stacked], index[leaf.stacked :]
  ranges = [range(*s.indices(n)) for s, n in zip(stack, leaf.shape)]
  out = None
  for place, where in zip(
    itertools.product(*(range(len(r)) for r in ranges)),
    itertools.product(*ranges),
  ):
    part = read_slice(leaf.name(where), inner)
    if out is None:
      out = np.empty((*map(len, ranges), *part.shape), part.dtype)
    if part.dtype != out.dtype:
      raise HfError(
        f'{leaf.name(where)} is {part.dtype}, but tensors before it in '
        f'{".".join(leaf.path)} are {out.dtype}; store them in one dtype'
      )
    out[place] = part
  return out


def from_hf(
  read: Callable[[str], np.ndarray],
  config: MoEConfig,
  *,
  shapes: Mapping[str, tuple[int, ...]],
) -> Params:
  """Builds parameters on the host, in the dtypes of the checkpoint.

  Args:
    read: tensor name -> array.
    config: the model.
    shapes: every tensor that there is, with its shape.

  Returns:
    Nested dict of NumPy arrays, as from `transformer.init`.

  Raises:
    HfError: see `check_shapes` and `read_leaf`.
  """
  check_shapes(shapes, config)
  params: Params = {}
  for leaf in leaves(config):
    parent = params
    for key in leaf.path[:-1]:
      parent = parent.setdefault(key, {})
    whole = (slice(None),) * len(leaf.shape)
    parent[leaf.path[-1]] = read_leaf(
      lambda name, index: read(name)[index], leaf, whole
    )
  return params
