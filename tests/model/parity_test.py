"""The decoder against `transformers`, layer by layer, on random checkpoints.

Every weight is drawn so that it matters: norms differ from one, the correction
bias from zero, and attention scores are of order one. Sequences are longer
than `original_max_position_embeddings`.
"""

import functools
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from swe17_jax.core import safetensors_folder
from swe17_jax.model import config as model_config
from swe17_jax.model import hf, transformer

torch = pytest.importorskip('torch', reason='torch is not installed')
transformers = pytest.importorskip(
  'transformers', reason='transformers is not installed'
)

LENGTH = 48  # tokens; three times original_max_position_embeddings
TOLERANCE = 1e-4  # f32; activations and logits are of order one
_SIZES = dict(
  vocab_size=61,
  hidden_size=32,
  intermediate_size=40,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_experts_per_tok=2,
  moe_intermediate_size=24,
  max_position_embeddings=64,
)
_YARN = dict(
  rope_type='yarn',
  rope_theta=1000.0,
  factor=4.0,
  original_max_position_embeddings=16,
)
_DEEPSEEK = dict(
  num_key_value_heads=4,
  n_routed_experts=8,
  n_shared_experts=1,
  n_group=4,
  topk_group=2,
  routed_scaling_factor=2.5,
  norm_topk_prob=True,
  first_k_dense_replace=1,
  kv_lora_rank=16,
  qk_nope_head_dim=8,
  qk_rope_head_dim=8,
  v_head_dim=12,
)
_QWEN = dict(num_key_value_heads=2, head_dim=16, num_experts=8)
_CASES = {
  'qwen3': ('Qwen3Moe', dict(_QWEN, norm_topk_prob=True)),
  'qwen3_yarn': (
    'Qwen3Moe',
    dict(_QWEN, norm_topk_prob=False, rope_parameters=_YARN),
  ),
  'deepseek': ('DeepseekV3', dict(_DEEPSEEK, q_lora_rank=None)),
  'deepseek_yarn': (
    'DeepseekV3',
    dict(
      _DEEPSEEK,
      q_lora_rank=24,
      rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=0.8),
    ),
  ),
}


class Reference(NamedTuple):
  """What `transformers` computes, and the folder that it wrote."""

  folder: pathlib.Path
  tokens: np.ndarray  # int [2, T]
  hidden: list[np.ndarray]  # after k layers and the last norm, [2, T, D]
  logits: np.ndarray  # [2, T, V]


def _logits(model, tokens):
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.numpy()


@functools.cache
def _reference(case: str) -> Reference:
  family, fields = _CASES[case]
  config = getattr(transformers, f'{family}Config')(**_SIZES, **fields)
  model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
  torch.manual_seed(1)
  with torch.no_grad():
    for array in [*model.parameters(), *model.buffers()]:
      if array.ndim >= 2:
        array.normal_(0, array.shape[-1] ** -0.5)
    model.get_input_embeddings().weight.normal_()
    for name, array in model.state_dict().items():
      if name.endswith('norm.weight'):
        array.normal_(1, 0.2)
      elif name.endswith('e_score_correction_bias'):
        # Above 0: transformers masks the groups that are left out with 0.
        array.uniform_(0.05, 0.4)
  folder = pathlib.Path(tempfile.mkdtemp()) / case
  model.save_pretrained(folder)
  tokens = np.random.default_rng(0).integers(0, 61, (2, LENGTH))
  with torch.no_grad():
    out = model.model(torch.tensor(tokens), output_hidden_states=True)
    hidden = [model.model.norm(h).numpy() for h in out.hidden_states[:-1]]
  hidden.append(out.last_hidden_state.numpy())
  return Reference(folder, tokens, hidden, _logits(model, tokens))


def _ours(case: str):
  folder = safetensors_folder.open_folder(_reference(case).folder)
  config = model_config.from_hf(folder.config)
  return config, hf.from_hf(folder.read, config, shapes=folder.shapes)


def _silenced(params, config, count):
  """Zeroes what layers after the first `count` add to the residual stream."""
  number = jnp.arange(config.num_hidden_layers)
  active = jnp.where(number < count, 1.0, 0.0)

  def scale(path, array):
    keys = [k.key for k in path]
    if not {'o_proj', 'down_proj'} & set(keys):
      return array
    dense = config.first_k_dense_replace
    part = active[:dense] if keys[0] == 'dense_layers' else active[dense:]
    return array * part.reshape(-1, *[1] * (array.ndim - 1))

  return jax.tree_util.tree_map_with_path(scale, params)


class ParityTest(parameterized.TestCase):
  @parameterized.named_parameters(*((case, case) for case in _CASES))
  def test_hidden_states_after_each_layer_and_logits(self, case):
    reference = _reference(case)
    config, params = _ours(case)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))

    @jax.jit
    def run(params, count):
      params = _silenced(params, config, count)
      out = transformer.apply(
        params,
        config,
        reference.tokens,
        positions=positions,
        segment_ids=jnp.ones_like(positions),
      )
      return out.hidden, transformer.logits(params, config, out.hidden)

    for count, wanted in enumerate(reference.hidden):
      hidden, logits = run(params, count)
      self.assertLess(np.abs(hidden - wanted).max(), TOLERANCE, f'{count=}')
    self.assertGreater(np.abs(reference.logits).max(), 1.0)
    self.assertLess(np.abs(logits - reference.logits).max(), TOLERANCE)

  @parameterized.named_parameters(*((case, case) for case in _CASES))
  def test_transformers_loads_our_export(self, case):
    reference = _reference(case)
    config, params = _ours(case)
    out = reference.folder.with_name(case + '_exported')
    safetensors_folder.write_folder(
      out,
      model_config.to_hf(config, dtype='float32'),
      hf.to_hf(params, config),
      max_shard_bytes=50_000,
    )
    model, loading = getattr(
      transformers, f'{_CASES[case][0]}ForCausalLM'
    ).from_pretrained(out, output_loading_info=True)
    self.assertEmpty(loading['missing_keys'])
    self.assertEmpty(loading['unexpected_keys'])
    np.testing.assert_array_equal(
      _logits(model.eval(), reference.tokens), reference.logits
    )


if __name__ == '__main__':
  absltest.main()
