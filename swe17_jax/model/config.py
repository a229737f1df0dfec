"""The shape of a decoder, in the words of a Hugging Face `config.json`.

Plain dataclasses without JAX: the planner, the engines' side and Colab read
them too. Two families are covered, and what tells them apart is data, never
a model's name: `kv_lora_rank` (set: MLA, unset: grouped-query attention) and
`scoring_func` ('softmax' or 'sigmoid').

* `qwen3_moe`: GQA with q/k norm, softmax router, `norm_topk_prob`.
* `deepseek_v3` and `kimi_k2`: MLA with YaRN, sigmoid router with a correction
  bias, group-limited top-k, shared experts, leading dense layers.

Example:
  >>> TINY.num_experts, TINY.moe_layers
  (8, 3)
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MODEL_TYPES = ('qwen3_moe', 'deepseek_v3', 'kimi_k2')


class ConfigError(ValueError):
  """A config.json that this decoder cannot represent."""


@dataclasses.dataclass(frozen=True)
class YarnConfig:
  """YaRN context extension (arXiv 2309.00071), Hugging Face field names."""

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 0.0
  mscale_all_dim: float = 0.0

  def attention_factor(self) -> float:
    """Returns what multiplies cos and sin."""
    if self.mscale and self.mscale_all_dim:
      return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
    return self._mscale(1.0)

  def softmax_factor(self) -> float:
    """Returns what multiplies the softmax scale of MLA."""
    return self._mscale(self.mscale_all_dim) ** 2

  def _mscale(self, mscale: float) -> float:
    if self.factor <= 1 or not mscale:
      return 1.0
    return 0.1 * mscale * math.log(self.factor) + 1.0  # YaRN, section 3.4


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """A mixture-of-experts decoder. Sizes count elements."""

  model_type: str = 'qwen3_moe'
  vocab_size: int = 512
  hidden_size: int = 128  # D
  num_hidden_layers: int = 3  # L, dense layers included
  num_attention_heads: int = 4  # N
  num_key_value_heads: int = 2  # K
  head_dim: int = 32  # H, grouped-query attention only
  rope_theta: float = 10000.0
  rope_scaling: YarnConfig | None = None
  max_position_embeddings: int = 512  # tokens
  rms_norm_eps: float = 1e-6
  tie_word_embeddings: bool = False
  # Mixture of experts.
  num_experts: int = 8  # E ('n_routed_experts' in deepseek_v3)
  num_experts_per_tok: int = 2  # A
  moe_intermediate_size: int = 64  # F
  norm_topk_prob: bool = True
  scoring_func: str = 'softmax'  # 'softmax' | 'sigmoid'
  n_group: int = 1  # expert groups of which topk_group may be chosen
  topk_group: int = 1
  routed_scaling_factor: float = 1.0
  n_shared_experts: int = 0
  first_k_dense_replace: int = 0  # leading layers with a dense MLP
  intermediate_size: int = 256  # F of those dense layers
  # Multi-head latent attention; unset for grouped-query attention.
  kv_lora_rank: int | None = None  # C
  q_lora_rank: int | None = None  # R
  qk_nope_head_dim: int = 0
  qk_rope_head_dim: int = 0
  v_head_dim: int = 0
  # 'dense' computes all experts for all tokens (small models on a CPU);
  # 'ragged' sorts tokens by expert and computes only what is routed.
  expert_dispatch: str = 'ragged'

  def __post_init__(self):
    def require(condition, message):
      if not condition:
        raise ConfigError(message)

    require(
      self.model_type in MODEL_TYPES,
      f'unknown architecture model_type={self.model_type!r}; known: '
      f'{", ".join(MODEL_TYPES)}',
    )
    require(
      self.scoring_func in ('softmax', 'sigmoid'),
      f"scoring_func={self.scoring_func!r} must be 'softmax' or 'sigmoid'",
    )
    require(
      self.expert_dispatch in ('dense', 'ragged'),
      f"expert_dispatch={self.expert_dispatch!r} must be 'dense' or 'ragged'",
    )
    require(
      1 <= self.num_experts_per_tok <= self.num_experts,
      f'num_experts_per_tok={self.num_experts_per_tok} must be in [1, '
      f'num_experts={self.num_experts}]',
    )
    require(
      self.num_experts % self.n_group == 0
      and 1 <= self.topk_group <= self.n_group,
      f'n_group={self.n_group} must divide num_experts={self.num_experts} '
      f'and topk_group={self.topk_group} must be in [1, n_group]',
    )
    require(
      0 <= self.first_k_dense_replace < self.num_hidden_layers,
      f'first_k_dense_replace={self.first_k_dense_replace} must leave at '
      f'least one MoE layer of num_hidden_layers={self.num_hidden_layers}',
    )
    if self.kv_lora_rank is None:
      require(
        self.num_attention_heads % self.num_key_value_heads == 0,
        f'num_key_value_heads={self.num_key_value_heads} must divide '
        f'num_attention_heads={self.num_attention_heads}',
      )

  @property
  def uses_mla(self) -> bool:
    """Whether attention is multi-head latent attention."""
    return self.kv_lora_rank is not None

  @property
  def moe_layers(self) -> int:
    """Number of layers with a router (L of `routed_experts`)."""
    return self.num_hidden_layers - self.first_k_dense_replace

  @property
  def rope_dim(self) -> int:
    """Number of rotated channels of a head."""
    return self.qk_rope_head_dim if self.uses_mla else self.head_dim

  @property
  def softmax_scale(self) -> float:
    """What multiplies q·k before the softmax."""
    if not self.uses_mla:
      return self.head_dim**-0.5
    scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
    if self.rope_scaling is not None:
      scale *= self.rope_scaling.softmax_factor()
    return scale


# Keys that change the function computed here. A config.json that sets one to
# another value than these is refused, because it would load and be wrong.
_FIXED = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'use_sliding_window': (False,),
  'decoder_sparse_step': (1,),
  'moe_layer_freq': (1,),
  'mlp_only_layers': ([], None),
  'rope_interleave': (True,),
  'num_nextn_predict_layers': (0, 1, None),  # the draft head is left out
  'topk_method': ('noaux_tc',),
}

# Their defaults here are those of a tiny model: a config.json without them
# would load and be wrong.
_REQUIRED = (
  *('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads'),
  *('num_experts', 'num_experts_per_tok', 'moe_intermediate_size'),
)


def from_hf(hf: Mapping[str, Any]) -> MoEConfig:
  """Reads the dictionary of a Hugging Face `config.json`.

  Raises:
    ConfigError: an unknown architecture, a missing field, or a setting that
      this decoder does not compute; the message names it.
  """
  model_type = hf.get('model_type')
  if model_type not in MODEL_TYPES:
    raise ConfigError(
      f'unknown architecture model_type={model_type!r}; known: '
      f'{", ".join(MODEL_TYPES)}'
    )
  for name, allowed in _FIXED.items():
    if name in hf and hf[name] not in allowed:
      raise ConfigError(
        f'config.json sets {name}={hf[name]!r}; this decoder computes only '
        f'{name} in {allowed}'
      )
  values: dict[str, Any] = {}
  for field in dataclasses.fields(MoEConfig):
    if field.name in hf and field.name != 'rope_scaling':
      values[field.name] = hf[field.name]
  if model_type == 'qwen3_moe':
    values.setdefault('scoring_func', 'softmax')
    values.setdefault('norm_topk_prob', False)
    values['first_k_dense_replace'] = 0
    family = ('head_dim', 'num_key_value_heads')
  else:
    values['scoring_func'] = hf.get('scoring_func', 'sigmoid')
    values.pop('head_dim', None)  # latent attention has three of its own
    family = (
      *('kv_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim'),
      *('n_group', 'topk_group', 'routed_scaling_factor', 'n_shared_experts'),
      'first_k_dense_replace',
    )
  for name in ('n_routed_experts', 'num_local_experts'):  # other spellings
    if name in hf:
      values.setdefault('num_experts', hf[name])
  for name in (*_REQUIRED, *family):
    if name not in values:
      raise ConfigError(f'config.json of a {model_type} model lacks {name!r}')
  rope = hf.get('rope_parameters') or hf.get('rope_scaling') or {}
  values['rope_theta'] = rope.get(
    'rope_theta', hf.get('rope_theta', MoEConfig.rope_theta)
  )
  values['rope_scaling'] = _yarn(rope)
  return MoEConfig(**values)


def _yarn(rope: Mapping[str, Any]) -> YarnConfig | None:
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return None
  if kind != 'yarn':
    raise ConfigError(f'rope type {kind!r} is unknown; known: default, yarn')
  fields = dataclasses.fields(YarnConfig)
  values = {k: v for k, v in rope.items() if v is not None}
  for name in ('rope_type', 'type', 'rope_theta'):  # read elsewhere
    values.pop(name, None)
  unknown = sorted(set(values) - {field.name for field in fields})
  missing = [
    field.name
    for field in fields
    if field.default is dataclasses.MISSING and field.name not in values
  ]
  if unknown or missing:
    raise ConfigError(
      f'YaRN settings {dict(rope)} have unknown fields {unknown} and lack '
      f'{missing}; known: {", ".join(field.name for field in fields)}'
    )
  return YarnConfig(**values)


def to_hf(config: MoEConfig, *, dtype: str = 'bfloat16') -> dict[str, Any]:
  """Returns the `config.json` dictionary that `from_hf` reads back.

  Args:
    config: the model.
    dtype: of the tensors beside it, which is what readers compute in.
  """
  hf = dataclasses.asdict(config)
  del hf['expert_dispatch'], hf['rope_scaling'], hf['rope_theta']
  hf.update(hidden_act='silu', attention_bias=False, torch_dtype=dtype)
  rope: dict[str, Any] = {'rope_type': 'default'}
  if config.rope_scaling is not None:
    rope = {'rope_type': 'yarn', **dataclasses.asdict(config.rope_scaling)}
  rope['rope_theta'] = hf['rope_theta'] = config.rope_theta
  hf['rope_parameters'] = rope
  if config.rope_scaling is not None:
    hf['rope_scaling'] = {**rope, 'type': 'yarn'}
  if config.uses_mla:
    hf['architectures'] = ['DeepseekV3ForCausalLM']
    hf['n_routed_experts'] = hf.pop('num_experts')
    hf.update(topk_method='noaux_tc', head_dim=config.qk_rope_head_dim)
    hf['num_nextn_predict_layers'] = 0
    return hf
  for name in (
    *('kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim'),
    *('v_head_dim', 'n_group', 'topk_group', 'n_shared_experts'),
    *('routed_scaling_factor', 'first_k_dense_replace', 'scoring_func'),
  ):
    del hf[name]
  hf['architectures'] = ['Qwen3MoeForCausalLM']
  hf.update(decoder_sparse_step=1, mlp_only_layers=[])
  return hf


# One key head: decoding on a CPU is bound by reading the cache.
TINY = MoEConfig(num_key_value_heads=1, expert_dispatch='dense')

TINY_MLA = MoEConfig(
  model_type='deepseek_v3',
  num_key_value_heads=4,
  scoring_func='sigmoid',
  n_group=4,
  topk_group=2,
  routed_scaling_factor=2.5,
  n_shared_experts=1,
  first_k_dense_replace=1,
  kv_lora_rank=32,
  q_lora_rank=48,
  qk_nope_head_dim=16,
  qk_rope_head_dim=16,
  v_head_dim=32,
  rope_scaling=YarnConfig(
    factor=4.0,
    original_max_position_embeddings=128,
    mscale=1.0,
    mscale_all_dim=1.0,
  ),
  expert_dispatch='dense',
)
