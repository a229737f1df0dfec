"""The table of names: complete, one slice per tensor, bitwise, and strict."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from swe17_jax.core import safetensors_folder
from swe17_jax.model import config as model_config
from swe17_jax.model import hf, transformer

_CONFIGS = {
  'gqa': model_config.TINY,
  'mla': model_config.TINY_MLA,
  'mla_full_rank_query': dataclasses.replace(
    model_config.TINY_MLA, q_lora_rank=None, first_k_dense_replace=0
  ),
  'tied': dataclasses.replace(model_config.TINY, tie_word_embeddings=True),
}
_ALL = tuple(_CONFIGS.items())


def _small(config):
  return dataclasses.replace(
    config, vocab_size=32, hidden_size=16, num_experts=4, n_group=2,
    topk_group=1, moe_intermediate_size=8, intermediate_size=8,
  )  # fmt: skip


def _random_params(config):
  """Stacked host arrays with random bits, in bfloat16."""
  generator = np.random.default_rng(0)
  params = {}
  for leaf in hf.leaves(config):
    parent = params
    for key in leaf.path[:-1]:
      parent = parent.setdefault(key, {})
    bits = generator.integers(0, 2**16, leaf.shape, dtype=np.uint16)
    parent[leaf.path[-1]] = bits.view(jnp.bfloat16)
  return params


def _shapes(config):
  specs = hf.tensor_specs(config)
  return {name: slot.shape for name, slot in specs.items()}


class TableTest(parameterized.TestCase):
  @parameterized.named_parameters(*_ALL)
  def test_leaves_are_the_parameters_of_the_decoder(self, config):
    shapes = jax.eval_shape(
      lambda key: transformer.init(config, key), jax.random.key(0)
    )
    wanted = {
      tuple(k.key for k in path): x.shape
      for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    }
    found = {leaf.path: leaf.shape for leaf in hf.leaves(config)}
    self.assertEqual(found, wanted)

  def test_names_and_slots_by_hand(self):
    specs = hf.tensor_specs(model_config.TINY_MLA)
    # Layer 0 is dense, so layer 2 is the second of the MoE layers.
    self.assertEqual(
      specs['model.layers.2.mlp.experts.5.up_proj.weight'],
      hf.Slot(('moe_layers', 'mlp', 'experts', 'up_proj'), (1, 5), (64, 128)),
    )
    self.assertEqual(
      specs['model.layers.0.mlp.down_proj.weight'],
      hf.Slot(('dense_layers', 'mlp', 'down_proj'), (0,), (128, 256)),
    )
    # 32 of the latent and 16 of the rotated key.
    self.assertEqual(
      specs['model.layers.1.self_attn.kv_a_proj_with_mqa.weight'],
      hf.Slot(
        ('moe_layers', 'self_attn', 'kv_a_proj_with_mqa'), (0,), (48, 128)
      ),
    )
    self.assertEqual(
      specs['model.norm.weight'], hf.Slot(('norm', 'weight'), (), (128,))
    )
    names = list(specs)
    self.assertEqual(names[0], 'model.embed_tokens.weight')
    self.assertEqual(names[-2:], ['model.norm.weight', 'lm_head.weight'])
    self.assertLess(
      names.index('model.layers.1.mlp.experts.7.down_proj.weight'),
      names.index('model.layers.2.input_layernorm.weight'),
    )

  def test_logical_axes_by_hand(self):
    axes = {
      '.'.join(leaf.path): leaf.logical_axes
      for leaf in hf.leaves(model_config.TINY)
    }
    self.assertEqual(
      axes['moe_layers.mlp.experts.down_proj'],
      ('layers', 'expert', 'hidden', 'ffn'),
    )
    self.assertEqual(
      axes['moe_layers.self_attn.k_proj'], ('layers', 'heads', 'hidden')
    )
    self.assertEqual(axes['lm_head'], ('vocab', 'hidden'))

  @parameterized.named_parameters(*_ALL)
  def test_views_cover_every_element_once_without_copies(self, config):
    params = jax.tree.map(
      lambda x: np.zeros(x.shape, np.int8), _random_params(_small(config))
    )
    for view in hf.views(params, _small(config)).values():
      self.assertTrue(view.flags.c_contiguous)
      view += 1  # in place, as a weight delta is applied
    for array in jax.tree.leaves(params):
      self.assertTrue((array == 1).all())


class RoundTripTest(parameterized.TestCase):
  def _assert_same_bits(self, found, wanted):
    def same(x, y):
      self.assertEqual(x.dtype, y.dtype)
      self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())

    jax.tree.map(same, found, wanted)

  @parameterized.named_parameters(*_ALL)
  def test_to_a_folder_and_back_is_bitwise(self, config):
    config = _small(config)
    params = _random_params(config)
    path = pathlib.Path(self.create_tempdir().full_path) / 'model'
    safetensors_folder.write_folder(
      path,
      model_config.to_hf(config),
      hf.to_hf(jax.tree.map(jnp.asarray, params), config),
      max_shard_bytes=5000,
    )
    folder = safetensors_folder.open_folder(path)
    read = dataclasses.replace(
      model_config.from_hf(folder.config), expert_dispatch='dense'
    )
    self.assertEqual(hf.tensor_specs(read), hf.tensor_specs(config))
    self._assert_same_bits(
      hf.from_hf(folder.read, read, shapes=folder.shapes), params
    )

  def test_a_slice_of_an_array_reads_only_its_tensors(self):
    config = _small(model_config.TINY_MLA)
    params = _random_params(config)
    tensors = hf.views(params, config)
    asked = []

    def read_slice(name, index):
      asked.append(name)
      return tensors[name][index]

    (leaf,) = (
      leaf
      for leaf in hf.leaves(config)
      if leaf.path[-2:] == ('experts', 'up_proj')
    )
    index = (slice(1, 2), slice(2, 4), slice(None), slice(4, 12))
    found = hf.read_leaf(read_slice, leaf, index)
    wanted = params['moe_layers']['mlp']['experts']['up_proj'][index]
    self._assert_same_bits(found, wanted)
    self.assertEqual(found.shape, (1, 2, 8, 8))
    self.assertEqual(
      asked, [f'model.layers.2.mlp.experts.{e}.up_proj.weight' for e in (2, 3)]
    )


class StrictnessTest(parameterized.TestCase):
  def test_all_problems_are_named_at_once(self):
    config = model_config.TINY
    shapes = _shapes(config)
    del shapes['model.layers.1.self_attn.q_norm.weight']
    del shapes['model.layers.2.mlp.experts.3.up_proj.weight']
    shapes['lm_head.weight'] = (512, 64)
    shapes['model.layers.0.self_attn.q_proj.bias'] = (128,)
    with self.assertRaises(hf.HfError) as caught:
      hf.check_shapes(shapes, config)
    message = str(caught.exception)
    self.assertStartsWith(message, '4 tensors do not fit')
    for part in (
      'missing model.layers.1.self_attn.q_norm.weight (32,)',
      'missing model.layers.2.mlp.experts.3.up_proj.weight (64, 128)',
      'lm_head.weight has shape (512, 64), but the config gives (512, 128)',
      'unexpected model.layers.0.self_attn.q_proj.bias (128,)',
    ):
      self.assertIn(part, message)

  def test_from_hf_checks_before_it_reads(self):
    with self.assertRaisesRegex(hf.HfError, 'missing model.embed_tokens'):
      hf.from_hf({}.__getitem__, model_config.TINY, shapes={})

  @parameterized.named_parameters(
    ('draft_layer', 'mla', 'model.layers.3.mlp.experts.0.up_proj.weight'),
    ('draft_head', 'mla', 'model.layers.3.shared_head.head.weight'),
    ('frequencies', 'gqa', 'model.layers.0.self_attn.rotary_emb.inv_freq'),
    ('tied_head', 'tied', 'lm_head.weight'),
  )
  def test_what_the_decoder_does_not_use_is_logged(self, which, name):
    config = _CONFIGS[which]
    with self.assertLogs('absl', level='INFO') as logs:
      hf.check_shapes(_shapes(config) | {name: (1,)}, config)
    self.assertIn(name, logs.output[0])

  def test_dtypes_within_an_array_must_agree(self):
    config = _small(model_config.TINY)
    tensors = hf.views(_random_params(config), config)
    name = 'model.layers.1.self_attn.o_proj.weight'
    tensors[name] = tensors[name].astype(np.float32)
    with self.assertRaisesRegex(hf.HfError, f'{name} is float32, but .*bfloa'):
      hf.from_hf(tensors.__getitem__, config, shapes=_shapes(config))

  def test_parameters_of_another_config(self):
    params = _random_params(_small(model_config.TINY))
    with self.assertRaisesRegex(
      hf.HfError, r'embed_tokens has shape \(32, 16\), but .*\(512, 128\)'
    ):
      hf.views(params, model_config.TINY)
    del params['lm_head']
    with self.assertRaisesRegex(hf.HfError, 'have no lm_head'):
      hf.views(params, _small(model_config.TINY))


if __name__ == '__main__':
  absltest.main()
