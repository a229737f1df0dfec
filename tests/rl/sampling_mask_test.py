"""Log-probabilities over a mask: values, gradients, and their edges."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.rl import sampling_mask

R, V, N = 4, 7, 24  # rows, vocabulary, entries with padding


def flat(spans, padding_id=0):
  """Returns mask_ids and mask_rows [N] of one list of ids per row."""
  ids = [token for span in spans for token in span]
  rows = [row for row, span in enumerate(spans) for _ in span]
  ids += [padding_id] * (N - len(ids))
  rows += [R] * (N - len(rows))
  return np.asarray(ids, np.int32), np.asarray(rows, np.int32)


@jax.jit
def logprobs(logits, targets, ids, rows):
  return sampling_mask.masked_logprobs(
    logits, targets, mask_ids=ids, mask_rows=rows
  )


@jax.jit
def gradient(logits, targets, ids, rows, cotangent):
  """Gradient of the weighted sum of log-probabilities."""
  return jax.grad(
    lambda x: jnp.sum(cotangent * logprobs(x, targets, ids, rows))
  )(logits)


def twin(logits, targets, spans):
  """The definition in float64, row by row; also its Jacobian."""
  values, grads = [], np.zeros(logits.shape)
  for row, (target, span) in enumerate(zip(targets, spans)):
    kept = np.asarray(span if span else range(V))
    x = logits[row, kept].astype(np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    values.append(np.log(p[list(kept).index(target)]))
    grads[row, kept] -= p
    grads[row, target] += 1
  return np.asarray(values), grads


@st.composite
def cases(draw):
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  logits = rng.normal(0, draw(st.sampled_from([1, 10, 40])), (R, V))
  targets = rng.integers(0, V, R)
  spans = []
  for target in targets:
    others = rng.permutation(V)[: rng.integers(0, 4)]
    kept = rng.permutation(np.union1d(others, target)).tolist()
    spans.append([] if rng.random() < 0.3 else kept)
  return logits.astype(np.float32), targets.astype(np.int32), spans


class MaskedLogprobsTest(parameterized.TestCase):
  def test_by_hand(self):
    logits = np.zeros((R, V), np.float32)
    logits[1, 2] = np.log(3.0)
    targets = np.asarray([0, 2, 5, 1], np.int32)
    spans = [[], [2, 4], [5], [1, 2, 3, 4]]
    found = logprobs(logits, targets, *flat(spans))
    wanted = [-np.log(7), np.log(3 / 4), 0.0, -np.log(4)]
    np.testing.assert_allclose(found, wanted, atol=1e-6)

  @settings(max_examples=60, deadline=None)
  @given(cases())
  def test_values_and_gradients_are_those_of_the_definition(self, case):
    logits, targets, spans = case
    wanted, jacobian = twin(*case)
    found = logprobs(logits, targets, *flat(spans))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    weights = np.asarray([1.0, -2.0, 0.5, 3.0], np.float32)
    grads = gradient(logits, targets, *flat(spans), weights)
    np.testing.assert_allclose(
      grads, jacobian * weights[:, None], rtol=1e-4, atol=1e-5
    )
    for row, span in enumerate(spans):
      if span:  # exactly nothing reaches what could not be sampled
        outside = np.setdiff1d(range(V), span)
        self.assertFalse(np.asarray(grads)[row, outside].any())

  @settings(max_examples=30, deadline=None)
  @given(cases())
  def test_one_token_gives_exactly_zero_and_exactly_no_gradient(self, case):
    logits, targets, _ = case
    masks = flat([[target] for target in targets])
    self.assertFalse(np.asarray(logprobs(logits, targets, *masks)).any())
    weights = np.asarray([1.0, -2.0, 0.3, 1e4], np.float32)
    self.assertFalse(
      np.asarray(gradient(logits, targets, *masks, weights)).any()
    )

  def test_an_empty_span_is_the_whole_vocabulary(self):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(R, V)).astype(np.float32)
    targets = np.asarray([0, 3, 6, 2], np.int32)
    none = logprobs(logits, targets, *flat([[]] * R))
    every = logprobs(logits, targets, *flat([list(range(V))] * 3 + [[]]))
    wanted = jax.nn.log_softmax(logits)[np.arange(R), targets]
    np.testing.assert_allclose(none, wanted, atol=1e-6)
    np.testing.assert_allclose(every, wanted, atol=1e-6)

  @parameterized.parameters(50.0, 200.0, 1e4)
  def test_a_mask_far_below_the_row_maximum_does_not_underflow(self, above):
    logits = np.zeros((R, V), np.float32)
    logits[:, 0] = above
    logits[:, 3] = np.log(3.0)
    targets = np.full(R, 3, np.int32)
    masks = flat([[1, 3]] * R)
    np.testing.assert_allclose(
      logprobs(logits, targets, *masks), np.log(3 / 4), atol=1e-5
    )
    grads = gradient(logits, targets, *masks, np.ones(R, np.float32))
    wanted = np.zeros(V)
    wanted[[1, 3]] = -0.25, 0.25
    np.testing.assert_allclose(grads, np.tile(wanted, (R, 1)), atol=1e-5)

  @parameterized.parameters(0, 2, 6)
  def test_padding_is_in_no_sum_and_in_no_gradient(self, padding_id):
    """Where exp of the padding's own logit would be infinite, too."""
    logits = np.zeros((R, V), np.float32)
    logits[-1, padding_id] = 500.0
    targets = np.full(R, 3, np.int32)
    masks = flat([[1, 3]] * R, padding_id)
    np.testing.assert_allclose(
      logprobs(logits, targets, *masks), -np.log(2), atol=1e-6
    )
    grads = np.asarray(gradient(logits, targets, *masks, np.ones(R, 'f4')))
    self.assertTrue(np.isfinite(grads).all())
    self.assertEqual(grads[-1, padding_id], 0.0)

  @settings(max_examples=30, deadline=None)
  @given(cases(), st.floats(-30, 30))
  def test_a_shift_of_a_row_and_the_order_of_a_mask_do_not_matter(
    self, case, shift
  ):
    logits, targets, spans = case
    wanted = logprobs(logits, targets, *flat(spans))
    turned = [span[::-1] for span in spans]
    found = logprobs(logits + np.float32(shift), targets, *flat(turned))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-5)


class EntropyTest(parameterized.TestCase):
  def test_by_hand(self):
    logits = np.asarray(
      [[0.0, 0.0, 0.0, 0.0], [np.log(3), 0, -200, -200], [900, 0, 0, 0]], 'f4'
    )
    three_to_one = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(
      sampling_mask.entropy(logits), [np.log(4), three_to_one, 0], atol=1e-6
    )
