"""Muon as an optax transform, for stacked matrices.

The momentum of a weight matrix is replaced by the nearest (semi-)orthogonal
matrix, found by five Newton-Schulz steps (Jordan et al. 2024). Leading axes
(layers, experts) are batch: every expert's matrix is orthogonalised alone.
The update has the RMS of an AdamW update, `0.2 * sqrt(max(out, in))` times an
orthogonal matrix (Moonlight, arXiv 2502.16982, section 2.2), so learning rate
and weight decay carry over from AdamW.

Example:
  tx = optax.chain(scale_by_muon(), optax.scale(-1e-3))
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

# Quintic of Jordan et al. 2024, tuned for slope at zero.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_MATCH = 0.2  # Moonlight, section 2.2


class MuonState(NamedTuple):
  """Momentum of every matrix, f32."""

  momentum: optax.Updates


def orthogonalize(matrices: jax.Array, *, steps: int = 5) -> jax.Array:
  """Returns the approximate polar factor of each matrix [..., out, in]."""
  a, b, c = NS_COEFFICIENTS
  x = matrices.astype(jnp.float32)
  tall = x.shape[-2] > x.shape[-1]
  x = x.swapaxes(-1, -2) if tall else x
  x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
  for _ in range(steps):
    gram = x @ x.swapaxes(-1, -2)
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.swapaxes(-1, -2) if tall else x


def scale_by_muon(*, momentum: float = 0.95) -> optax.GradientTransformation:
  """Nesterov momentum, orthogonalised, with the RMS of AdamW.

  Args:
    momentum: decay of the accumulated gradient.

  Raises:
    ValueError: at `init`, a leaf with fewer than two axes.
  """

  def init(params):
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
      if leaf.ndim < 2:
        raise ValueError(
          f'Muon needs matrices, {jax.tree_util.keystr(path)} has shape '
          f'{leaf.shape}; give it to another rule'
        )
    return MuonState(jax.tree.map(jnp.zeros_like, params))

  def update(grads, state, params=None):
    del params
    grown = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, grads)

    def direction(m, g):
      scale = RMS_MATCH * max(m.shape[-2:]) ** 0.5
      return scale * orthogonalize(momentum * m + g)  # Nesterov

    return jax.tree.map(direction, grown, grads), MuonState(grown)

  return optax.GradientTransformation(init, update)
