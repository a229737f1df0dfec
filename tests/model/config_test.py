"""config.json in and out; what cannot be computed is refused by name."""

import dataclasses
import json

from absl.testing import absltest, parameterized

from swe17_jax.model import config as model_config

# Shape fields as published with Kimi-K2-Instruct.
KIMI_K2 = {
  'model_type': 'kimi_k2',
  'vocab_size': 163840,
  'hidden_size': 7168,
  'intermediate_size': 18432,
  'moe_intermediate_size': 2048,
  'num_hidden_layers': 61,
  'num_attention_heads': 64,
  'num_key_value_heads': 64,
  'n_routed_experts': 384,
  'n_shared_experts': 1,
  'num_experts_per_tok': 8,
  'n_group': 1,
  'topk_group': 1,
  'routed_scaling_factor': 2.827,
  'norm_topk_prob': True,
  'scoring_func': 'sigmoid',
  'topk_method': 'noaux_tc',
  'first_k_dense_replace': 1,
  'moe_layer_freq': 1,
  'kv_lora_rank': 512,
  'q_lora_rank': 1536,
  'qk_nope_head_dim': 128,
  'qk_rope_head_dim': 64,
  'v_head_dim': 128,
  'hidden_act': 'silu',
  'attention_bias': False,
  'rms_norm_eps': 1e-06,
  'rope_theta': 50000.0,
  'rope_scaling': {
    'type': 'yarn',
    'factor': 32.0,
    'original_max_position_embeddings': 4096,
    'beta_fast': 1.0,
    'beta_slow': 1.0,
    'mscale': 1.0,
    'mscale_all_dim': 1.0,
  },
  'max_position_embeddings': 131072,
  'num_nextn_predict_layers': 0,
  'tie_word_embeddings': False,
}


def _tiny_hf(**changes):
  hf = model_config.to_hf(model_config.TINY) | changes
  return {name: value for name, value in hf.items() if value != 'absent'}


class ConfigTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('gqa', model_config.TINY),
    ('mla', model_config.TINY_MLA),
    (
      'gqa_yarn',
      dataclasses.replace(
        model_config.TINY,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_theta=5e5,
        rope_scaling=model_config.YarnConfig(4.0, 64),
      ),
    ),
    (
      'mla_full_rank',
      dataclasses.replace(
        model_config.TINY_MLA, q_lora_rank=None, rope_scaling=None
      ),
    ),
  )
  def test_json_and_back(self, config):
    text = json.dumps(model_config.to_hf(config))
    read = model_config.from_hf(json.loads(text))
    # How experts are computed is no property of a checkpoint.
    self.assertEqual(
      read, dataclasses.replace(config, expert_dispatch='ragged')
    )

  def test_kimi_k2(self):
    config = model_config.from_hf(KIMI_K2)
    self.assertEqual(config.moe_layers, 60)
    self.assertEqual(config.num_experts, 384)
    self.assertEqual(config.rope_theta, 50000.0)
    # YaRN: mscale = 0.1 ln 32 + 1 = 1.346574; as mscale = mscale_all_dim, cos
    # and sin are not scaled. Softmax: 192 ** -0.5 * 1.346574 ** 2.
    self.assertEqual(config.rope_scaling.attention_factor(), 1.0)
    self.assertAlmostEqual(config.softmax_scale, 0.1308605, places=6)

  def test_yarn_without_mscale_scales_cos_and_sin(self):
    # 0.1 ln 4 + 1
    yarn = model_config.YarnConfig(4.0, 64)
    self.assertAlmostEqual(yarn.attention_factor(), 1.1386294, places=6)
    self.assertEqual(yarn.softmax_factor(), 1.0)

  def test_both_spellings_of_the_number_of_experts(self):
    config = model_config.from_hf(
      _tiny_hf(num_experts='absent', num_local_experts=8)
    )
    self.assertEqual(config.num_experts, 8)

  @parameterized.named_parameters(
    ('architecture', {'model_type': 'llama'}, "model_type='llama'; known: qw"),
    ('no_architecture', {'model_type': 'absent'}, 'model_type=None'),
    ('activation', {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    ('bias', {'attention_bias': True}, 'attention_bias=True'),
    ('dense_layers', {'mlp_only_layers': [0]}, r'mlp_only_layers=\[0\]'),
    ('missing', {'head_dim': 'absent'}, "qwen3_moe model lacks 'head_dim'"),
    ('heads', {'num_attention_heads': 'absent'}, "lacks 'num_attention_heads'"),
    ('experts', {'num_experts_per_tok': 9}, 'num_experts_per_tok=9 must be'),
    ('kv_heads', {'num_key_value_heads': 3}, 'num_key_value_heads=3 must'),
    (
      'rope',
      {'rope_parameters': {'rope_type': 'llama3'}},
      "rope type 'llama3' is unknown; known: default, yarn",
    ),
    (
      'yarn_field',
      {'rope_parameters': {'rope_type': 'yarn', 'factor': 2, 'truncate': 0}},
      r"unknown fields \['truncate'\] and lack \['original_max_position_emb",
    ),
  )
  def test_refused(self, changes, message):
    with self.assertRaisesRegex(model_config.ConfigError, message):
      model_config.from_hf(_tiny_hf(**changes))

  @parameterized.named_parameters(
    ('groups', {'n_group': 3}, 'n_group=3 must divide num_experts=8'),
    ('all_dense', {'first_k_dense_replace': 3}, 'must leave at least one MoE'),
    ('scores', {'scoring_func': 'tanh'}, "scoring_func='tanh' must be"),
    ('dispatch', {'expert_dispatch': 'x'}, "expert_dispatch='x' must be"),
  )
  def test_refused_at_construction(self, changes, message):
    with self.assertRaisesRegex(model_config.ConfigError, message):
      dataclasses.replace(model_config.TINY, **changes)


if __name__ == '__main__':
  absltest.main()
