"""Router, experts and routing replay against a slow NumPy twin."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from swe17_jax.model import config as model_config
from swe17_jax.model import moe

_SMALL = dict(hidden_size=12, moe_intermediate_size=6, num_experts=8)
_SOFTMAX = dataclasses.replace(
  model_config.TINY, **_SMALL, num_experts_per_tok=3
)
_CONFIGS = {
  'softmax': _SOFTMAX,
  'softmax_unnormalised': dataclasses.replace(_SOFTMAX, norm_topk_prob=False),
  'sigmoid_grouped_shared': dataclasses.replace(
    model_config.TINY_MLA, **_SMALL, num_experts_per_tok=3
  ),
}
_TOKENS = 10


@functools.cache
def _layer(config):
  """Returns (graph, parameters) with a correction bias that matters."""
  layer = moe.MoE(config, rngs=nnx.Rngs(0))
  graph, state = nnx.split(layer)
  params = nnx.to_pure_dict(state)
  if config.scoring_func == 'sigmoid':
    params['gate']['e_score_correction_bias'] = jnp.linspace(0.6, -0.6, 8)
  return graph, params


@functools.partial(jax.jit, static_argnames='config')
def _run(params, x, recorded, *, config):
  layer = nnx.merge(_layer(config)[0], nnx.State(params))
  return layer(x, recorded)


def _x():
  # A router that is fed larger inputs makes sharper choices.
  return 2 * jax.random.normal(jax.random.key(1), (1, _TOKENS, 12))


def _recorded():
  """Experts that differ from the router's choice; token 4 has none."""
  generator = np.random.default_rng(0)
  rows = [generator.permutation(8)[:3] for _ in range(_TOKENS)]
  rows[4] = [-1, -1, -1]
  return np.asarray(rows, np.int16)[None]


def _twin(params, config, x, recorded=None):
  """Token by token, expert by expert, in float64."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  outputs, chosen = [], []
  for t, token in enumerate(np.asarray(x[0], np.float64)):
    scores = params['gate']['weight'] @ token
    if config.scoring_func == 'sigmoid':
      scores = 1 / (1 + np.exp(-scores))
      ranked = scores + params['gate']['e_score_correction_bias']
      per = config.num_experts // config.n_group
      best = [
        sum(sorted(ranked[g * per : (g + 1) * per])[-2:])
        for g in range(config.n_group)
      ]
      for g in np.argsort(best)[: config.n_group - config.topk_group]:
        ranked[g * per : (g + 1) * per] = -np.inf
    else:
      scores = np.exp(scores) / np.exp(scores).sum()
      ranked = scores
    experts = np.argsort(-ranked)[: config.num_experts_per_tok]
    if recorded is not None and recorded[0, t, 0] >= 0:
      experts = recorded[0, t]
    gates = scores[experts]
    if config.norm_topk_prob:
      gates = gates / gates.sum()
    gates = gates * config.routed_scaling_factor
    weights = params['experts']
    out = sum(
      gate * _mlp({name: w[e] for name, w in weights.items()}, token)
      for gate, e in zip(gates, experts)
    )
    if config.n_shared_experts:
      out = out + _mlp(params['shared_experts'], token)
    outputs.append(out)
    chosen.append(experts)
  return np.stack(outputs)[None], np.stack(chosen)[None]


def _mlp(weights, x):
  gate = weights['gate_proj'] @ x
  hidden = gate / (1 + np.exp(-gate)) * (weights['up_proj'] @ x)
  return weights['down_proj'] @ hidden


_CASES = tuple(
  (f'{name}_{dispatch}', dataclasses.replace(config, expert_dispatch=dispatch))
  for name, config in _CONFIGS.items()
  for dispatch in ('dense', 'ragged')
)


class MoETest(parameterized.TestCase):
  @parameterized.named_parameters(*_CASES)
  def test_equals_the_twin(self, config):
    params = _layer(config)[1]
    out, routed = _run(params, _x(), None, config=config)
    wanted, experts = _twin(params, config, _x())
    np.testing.assert_array_equal(routed, experts)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)

  @parameterized.named_parameters(*_CASES)
  def test_replays_recorded_experts_with_its_own_gates(self, config):
    params = _layer(config)[1]
    out, routed = _run(params, _x(), _recorded(), config=config)
    wanted, experts = _twin(params, config, _x(), _recorded())
    np.testing.assert_array_equal(routed, experts)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)

  @parameterized.named_parameters(*_CASES)
  def test_replaying_its_own_choice_changes_no_bit(self, config):
    params = _layer(config)[1]
    out, routed = _run(params, _x(), None, config=config)
    # The same program in both calls: -1 stands for 'not recorded'.
    none = np.full_like(routed, -1)
    fallback, _ = _run(params, _x(), none, config=config)
    replayed, _ = _run(params, _x(), routed, config=config)
    np.testing.assert_array_equal(fallback, replayed)
    np.testing.assert_allclose(out, replayed, rtol=1e-6, atol=1e-6)

  def test_bias_and_groups_change_the_choice_but_not_the_gates(self):
    # By hand: 4 experts in 2 groups, 1 group of which may be chosen. Scores
    # .9 .1 | .6 .5: sums 1.0 and 1.1, so the second group wins.
    config = dataclasses.replace(
      _CONFIGS['sigmoid_grouped_shared'],
      num_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1,
    )  # fmt: skip
    scores = jnp.asarray([[0.9, 0.1, 0.6, 0.5]])
    self.assertEqual(moe.limited_top_k(scores, config).tolist(), [[2]])
    one_group = dataclasses.replace(config, topk_group=2)
    self.assertEqual(moe.limited_top_k(scores, one_group).tolist(), [[0]])


class GradientTest(parameterized.TestCase):
  @parameterized.named_parameters(*_CONFIGS.items())
  def test_replay_trains_the_router(self, config):
    params = _layer(config)[1]
    target = jax.random.normal(jax.random.key(2), (1, _TOKENS, 12))

    @jax.jit
    def loss(weight):
      gate = params['gate'] | {'weight': weight}
      out, _ = _run(params | {'gate': gate}, _x(), _recorded(), config=config)
      return (out * target).sum()

    weight = params['gate']['weight']
    gradient = jax.grad(loss)(weight)
    self.assertGreater(jnp.abs(gradient).max(), 1e-2)
    # Central difference along a random direction. f32 rounding of a loss of
    # order 10 divided by the step of 1e-2 leaves about 1e-3.
    direction = jax.random.normal(jax.random.key(3), weight.shape)
    step = 1e-2
    slope = (
      loss(weight + step * direction) - loss(weight - step * direction)
    ) / (2 * step)
    wanted = (gradient * direction).sum()
    np.testing.assert_allclose(slope, wanted, rtol=1e-2, atol=5e-3)

  def test_gradients_of_both_dispatches_agree(self):
    def gradient(dispatch):
      config = dataclasses.replace(_SOFTMAX, expert_dispatch=dispatch)

      def loss(params):
        return (_run(params, _x(), _recorded(), config=config)[0] ** 2).sum()

      return jax.jit(jax.grad(loss))(_layer(_SOFTMAX)[1])

    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
      gradient('dense'),
      gradient('ragged'),
    )

  def test_only_replayed_experts_are_trained(self):
    recorded = np.broadcast_to(np.asarray([1, 4, 6]), (1, _TOKENS, 3))

    def loss(params):
      return _run(params, _x(), recorded, config=_SOFTMAX)[0].sum()

    gradient = jax.jit(jax.grad(loss))(_layer(_SOFTMAX)[1])
    size = jnp.abs(gradient['experts']['up_proj']).max((1, 2))
    self.assertEqual(np.flatnonzero(size).tolist(), [1, 4, 6])


if __name__ == '__main__':
  absltest.main()
