"""Which parameter gets which rule, and what the rules do together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized

from swe17_jax.model import transformer
from swe17_jax.model.config import TINY, TINY_MLA
from swe17_jax.optim import muon, optimizer

# Every parameter, written out: a new one must be put somewhere on purpose.
GQA = {
  'muon': [
    'moe_layers.mlp.experts.down_proj',
    'moe_layers.mlp.experts.gate_proj',
    'moe_layers.mlp.experts.up_proj',
    'moe_layers.self_attn.k_proj',
    'moe_layers.self_attn.o_proj',
    'moe_layers.self_attn.q_proj',
    'moe_layers.self_attn.v_proj',
  ],
  'adamw': [
    'embed_tokens',
    'lm_head',
    'moe_layers.input_layernorm.weight',
    'moe_layers.mlp.gate.weight',
    'moe_layers.post_attention_layernorm.weight',
    'moe_layers.self_attn.k_norm.weight',
    'moe_layers.self_attn.q_norm.weight',
    'norm.weight',
  ],
}
_LATENT = ('kv_a_proj_with_mqa', 'kv_b_proj', 'o_proj', 'q_a_proj', 'q_b_proj')
_MLP = ('down_proj', 'gate_proj', 'up_proj')
_NORMS = (
  *('input_layernorm.weight', 'post_attention_layernorm.weight'),
  *('self_attn.kv_a_layernorm.weight', 'self_attn.q_a_layernorm.weight'),
)
MLA = {
  'muon': [
    *(f'dense_layers.mlp.{name}' for name in _MLP),
    *(f'dense_layers.self_attn.{name}' for name in _LATENT),
    *(f'moe_layers.mlp.experts.{name}' for name in _MLP),
    *(f'moe_layers.mlp.shared_experts.{name}' for name in _MLP),
    *(f'moe_layers.self_attn.{name}' for name in _LATENT),
  ],
  'adamw': [
    *('embed_tokens', 'lm_head', 'moe_layers.mlp.gate.weight', 'norm.weight'),
    *(f'dense_layers.{name}' for name in _NORMS),
    *(f'moe_layers.{name}' for name in _NORMS),
  ],
  'frozen': ['moe_layers.mlp.gate.e_score_correction_bias'],
}


def paths(config):
  """Returns path -> abstract parameter of a model."""
  params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def example():
  """One parameter for each rule, and matrices that Muon must not touch."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  return {
    'embed_tokens': draw(8, 4),
    'moe_layers': {
      'mlp': {
        'experts': {'up_proj': draw(2, 3, 6, 4)},
        'gate': {
          'weight': draw(2, 3, 4),
          'e_score_correction_bias': draw(2, 3),
        },
      }
    },
    'norm': {'weight': draw(4)},
  }


def run(config, steps, params=None, scale=1.0):
  """Returns parameters after each step with seeded gradients."""
  tx = optimizer.build(config)
  params = example() if params is None else params
  state, out = tx.init(params), [params]
  for seed in range(steps):
    rng = np.random.default_rng(seed + 10)
    grads = jax.tree.map(
      lambda p: scale * rng.normal(size=p.shape).astype(np.float32),  # noqa: B023
      params,
    )
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out


class RuleTest(parameterized.TestCase):
  @parameterized.named_parameters(('gqa', TINY, GQA), ('mla', TINY_MLA, MLA))
  def test_every_parameter_has_the_rule_that_is_meant(self, config, wanted):
    found = {}
    for path in paths(config):
      found.setdefault(optimizer.rule(path), []).append('.'.join(path))
    self.assertEqual(
      {rule: sorted(names) for rule, names in found.items()},
      {rule: sorted(names) for rule, names in wanted.items()},
    )

  @parameterized.named_parameters(('gqa', TINY), ('mla', TINY_MLA))
  def test_matrices_and_only_matrices_are_orthogonalised(self, config):
    not_muon = {'embed_tokens', 'lm_head'}  # tables of rows
    for path, leaf in paths(config).items():
      stacked = path[0].endswith('_layers')
      axes = leaf.ndim - stacked - ('experts' in path)
      router_or_norm = path[-1] == 'weight'
      wanted = axes == 2 and path[-1] not in not_muon and not router_or_norm
      self.assertEqual(optimizer.rule(path) == 'muon', wanted, path)


class BuildTest(parameterized.TestCase):
  def test_the_router_bias_stays_bit_for_bit(self):
    config = optimizer.OptimizerConfig(weight_decay=0.5)
    first, *_, last = run(config, 3)
    before, after = (p['moe_layers']['mlp']['gate'] for p in (first, last))
    name = 'e_score_correction_bias'
    self.assertEqual(
      np.asarray(before[name]).tobytes(), np.asarray(after[name]).tobytes()
    )
    self.assertFalse(np.array_equal(before['weight'], after['weight']))

  def test_each_rule_by_its_own_optax_twin(self):
    """Warm-up, clipping and decay included, parameter by parameter."""
    config = optimizer.OptimizerConfig(
      muon_lr=0.1,
      adam_lr=0.03,
      weight_decay=0.1,
      warmup_steps=1,
      max_grad_norm=0.5,
    )
    found = run(config, 3)
    params = example()
    muon_tx = muon.scale_by_muon(momentum=config.momentum)
    adam_tx = optax.scale_by_adam(b1=config.b1, b2=config.b2)
    expert = params['moe_layers']['mlp']['experts']['up_proj']
    norm = params['norm']['weight']
    muon_state, adam_state = muon_tx.init(expert), adam_tx.init(norm)
    for step, rate in enumerate((0.5, 1.0, 1.0)):  # of the full rate
      rng = np.random.default_rng(step + 10)
      grads = jax.tree.map(
        lambda p: rng.normal(size=p.shape).astype(np.float32),  # noqa: B023
        params,
      )
      size = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
      clip = min(1.0, config.max_grad_norm / size)
      update, muon_state = muon_tx.update(
        clip * grads['moe_layers']['mlp']['experts']['up_proj'], muon_state
      )
      expert = expert - rate * config.muon_lr * (update + 0.1 * expert)
      update, adam_state = adam_tx.update(
        clip * grads['norm']['weight'], adam_state
      )
      norm = norm - rate * config.adam_lr * (update + 0.1 * norm)
      after = found[step + 1]
      np.testing.assert_allclose(after['norm']['weight'], norm, atol=1e-5)
      np.testing.assert_allclose(
        after['moe_layers']['mlp']['experts']['up_proj'], expert, atol=1e-5
      )

  def test_a_gradient_above_the_norm_counts_as_its_direction(self):
    config = optimizer.OptimizerConfig(max_grad_norm=1.0)
    for x, y in zip(
      jax.tree.leaves(run(config, 2, scale=100.0)[-1]),
      jax.tree.leaves(run(config, 2, scale=200.0)[-1]),
    ):
      np.testing.assert_allclose(x, y, atol=1e-6)

  @parameterized.parameters(
    # Linear warm-up: (n + 1) / (warmup + 1) of the rate, then all of it.
    (0, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
    # Then half a cosine to a tenth, three steps long.
    (6, [0.25, 0.5, 0.75, 1.0, 0.775, 0.325, 0.1]),
  )
  def test_the_schedule_by_hand(self, decay_steps, wanted):
    # A constant gradient moves AdamW by exactly the rate in every step.
    config = optimizer.OptimizerConfig(
      adam_lr=1.0, warmup_steps=3, decay_steps=decay_steps
    )
    tx = optimizer.build(config)
    params = {'norm': jnp.zeros(1)}
    state, moved = tx.init(params), []
    for _ in wanted:
      updates, state = tx.update({'norm': jnp.ones(1)}, state, params)
      moved.append(-float(updates['norm'][0]))
    np.testing.assert_allclose(moved, wanted, atol=1e-5)

  @parameterized.parameters('muon_lr', 'adam_lr', 'max_grad_norm')
  def test_a_rate_of_zero_is_refused(self, name):
    with pytest.raises(ValueError, match=f'{name}=0'):
      optimizer.OptimizerConfig(**{name: 0})
