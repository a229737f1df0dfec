"""Muon against its definition and against the one in optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from optax import contrib

from swe17_jax.optim import muon

MOMENTUM = 0.95


def draw(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quintic(singular_values):
  """What five Newton-Schulz steps make of singular values of norm 1."""
  a, b, c = 3.4445, -4.7750, 2.0315
  for _ in range(5):
    x = singular_values
    singular_values = a * x + b * x**3 + c * x**5
  return singular_values


class OrthogonalizeTest(parameterized.TestCase):
  @parameterized.parameters((12, 12), (24, 6), (6, 24), (1, 9))
  def test_singular_values_near_one_and_the_same_singular_vectors(self, *shape):
    matrix = draw(*shape)
    found = np.asarray(muon.orthogonalize(matrix), np.float64)
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    # The quintic reaches 0.7 to 1.2 where it has converged; a square random
    # matrix has some values too small for five steps.
    values = quintic(s / np.linalg.norm(s))
    np.testing.assert_allclose(found, (u * values) @ v, atol=2e-4)
    if shape[0] != shape[1]:
      self.assertGreater(values.min(), 0.6)
      self.assertLess(values.max(), 1.3)

  def test_scale_does_not_matter(self):
    matrix = draw(8, 5)
    wanted = muon.orthogonalize(matrix)
    for scale in (1e-4, 2.0**10):
      found = muon.orthogonalize(scale * matrix)
      np.testing.assert_allclose(found, wanted, atol=2e-3)

  def test_a_stack_is_each_matrix_alone(self):
    stack = draw(2, 3, 4, 7)
    found = np.asarray(muon.orthogonalize(stack))
    for place in np.ndindex(2, 3):
      np.testing.assert_allclose(
        found[place], muon.orthogonalize(stack[place]), atol=1e-5
      )

  def test_an_expert_without_gradient_gets_no_update(self):
    stack = draw(3, 4, 4)
    stack[1] = 0.0
    found = np.asarray(muon.orthogonalize(stack))
    self.assertTrue(np.isfinite(found).all())
    self.assertFalse(found[1].any())


class ScaleByMuonTest(parameterized.TestCase):
  def test_two_steps_by_hand(self):
    """Gradients that are multiples of one orthogonal matrix."""
    turn = np.asarray([[0.0, -1.0], [1.0, 0.0]], np.float32)
    tx = muon.scale_by_muon(momentum=0.5)
    state = tx.init({'w': jnp.zeros((2, 2))})
    # Nesterov: 0.5 * 2 + 2 = 3, then the momentum is 2 and the gradient -8:
    # it becomes 0.5 * 2 - 8 = -7, and 0.5 * -7 - 8 < 0 turns the update.
    for scale, momentum, sign in ((2.0, 2.0, 1), (-8.0, -7.0, -1)):
      update, state = tx.update({'w': scale * turn}, state)
      np.testing.assert_allclose(state.momentum['w'], momentum * turn)
      size = 0.2 * np.sqrt(2) * quintic(np.sqrt(0.5))
      np.testing.assert_allclose(update['w'], sign * size * turn, atol=1e-5)

  @parameterized.parameters((16, 16), (32, 8), (8, 32), (4, 16, 64))
  def test_the_update_has_the_rms_of_adamw(self, *shape):
    tx = muon.scale_by_muon(momentum=MOMENTUM)
    update, _ = tx.update({'w': draw(*shape)}, tx.init({'w': jnp.zeros(shape)}))
    # 0.2 for a matrix whose singular values are all 1; they are about 0.9.
    self.assertAlmostEqual(
      float(jnp.sqrt(jnp.mean(update['w'] ** 2))), 0.18, delta=0.04
    )

  @parameterized.named_parameters(
    ('tall', (24, 8)),
    ('wide', (8, 24)),
    ('square', (16, 16)),
    ('stacked', (2, 3, 12, 8)),
    ('stacked_wide', (2, 3, 8, 12)),
  )
  def test_equals_optax(self, shape):
    """Without optax's bias correction, which Jordan's Muon does not have.

    The correction goes to one as the count grows, so optax starts at a large
    count. Our momentum is then its own times 1 / (1 - momentum), which the
    orthogonalisation takes out. Our weights are [out, in], its reduction axis
    is the input.
    """
    numbers = {
      'w': contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    }
    theirs = contrib.muon(
      learning_rate=-1.0,
      beta=MOMENTUM,
      consistent_rms=muon.RMS_MATCH,
      muon_weight_dimension_numbers=numbers,
    )
    ours = muon.scale_by_muon(momentum=MOMENTUM)
    params = {'w': jnp.zeros(shape)}
    state = ours.init(params)
    their_state = optax.tree.set(theirs.init(params), count=jnp.asarray(10_000))
    step, their_step = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(5):
      grads = {'w': draw(*shape, seed=i)}
      update, state = step(grads, state)
      wanted, their_state = their_step(grads, their_state, params)
      np.testing.assert_allclose(update['w'], wanted['w'], atol=1e-5)

  def test_a_vector_is_refused(self):
    with pytest.raises(ValueError, match=r"\['norm'\] has shape \(3,\)"):
      muon.scale_by_muon().init({'norm': jnp.zeros(3)})
