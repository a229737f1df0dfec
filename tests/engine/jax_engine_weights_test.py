"""What happens to requests in flight: weights, cancels, a dead engine."""

import asyncio
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17_jax.engine import jax_engine, sampler
from swe17_jax.engine.interface import EngineError, Generation, SamplingParams
from swe17_jax.model import hf, transformer
from swe17_jax.weights import delta
from swe17_jax.weights import staged as stages
from tests.engine.served import (
  GQA,
  SETTINGS,
  SINGLE,
  assert_exact,
  assert_same,
  compute_params,
  copied,
  generate_one,
  make_prompt,
  random_weights,
)


class Gate:
  """Stops an engine before its nth decode step, until it is opened."""

  def __init__(self, engine, *, before: int):
    self.calls = 0
    self.reached, self.opened = threading.Event(), threading.Event()
    self._decode, self._before = engine._decode, before
    self._patch = mock.patch.object(engine, '_decode', self._call)

  def _call(self, *arguments):
    self.calls += 1
    if self.calls == self._before:
      self.reached.set()
      assert self.opened.wait(60)
    return self._decode(*arguments)

  def __enter__(self):
    self._patch.start()
    return self

  def __exit__(self, *_):
    self.opened.set()
    self._patch.stop()


LONG = SamplingParams(max_new_tokens=40, seed=9)
SHORT = SamplingParams(max_new_tokens=3, seed=9)


def test_a_cancelled_generation_frees_its_slot(single):
  async def run(gate):
    long = asyncio.create_task(
      single.generate(make_prompt(1, 4), sampling=LONG)
    )
    waiting = asyncio.create_task(
      single.generate(make_prompt(2, 4), sampling=LONG)
    )
    await asyncio.to_thread(gate.reached.wait, 60)
    long.cancel()
    waiting.cancel()  # one that never had a slot
    await asyncio.gather(long, waiting, return_exceptions=True)
    gate.opened.set()
    return await single.generate(make_prompt(3, 4), sampling=SHORT)

  with Gate(single, before=5) as gate:
    found = asyncio.run(run(gate))
  assert found.token_ids.size == 3
  assert gate.calls <= 5 + 2  # not the 39 steps of the cancelled one
  assert_same(found, generate_one(single, make_prompt(3, 4), SHORT))


def test_a_stream_that_nobody_reads_frees_its_slot(single):
  """Its loop is closed when the engine hands over the next token."""

  async def leave(gate):
    async for chunk in single.stream(make_prompt(1, 4), sampling=LONG):
      await asyncio.to_thread(gate.reached.wait, 60)
      return chunk

  with Gate(single, before=5) as gate:
    asyncio.run(leave(gate))
    gate.opened.set()
    found = generate_one(single, make_prompt(3, 4), SHORT)
  assert found.token_ids.size == 3
  assert gate.calls <= 5 + 2


# ------------------------------------------------------------------ weights


def _delta(old, new):
  """Returns a staged delta and the digest of what it makes."""
  return delta.decode(delta.encode(old, new), old), delta.digest(new)


def _seam(engine, *, change, prompt, sampling) -> Generation:
  """Runs a request during which `change` happens, after five tokens."""

  async def run(gate):
    request = asyncio.create_task(engine.generate(prompt, sampling=sampling))
    await asyncio.to_thread(gate.reached.wait, 60)
    changed = asyncio.create_task(asyncio.to_thread(change))
    while not engine._commands:
      await asyncio.sleep(0.001)
    gate.opened.set()
    await changed
    return await request

  with Gate(engine, before=5) as gate:
    return asyncio.run(run(gate))


@jax.jit
def _one_step(old, new, past, controls):
  """Samples after `past` [T]: its entries by `old`, the last token by `new`."""
  size = past.size - 1
  out = transformer.apply(
    old,
    GQA,
    past[None, :-1],
    positions=jnp.arange(size)[None],
    segment_ids=jnp.ones((1, size), jnp.int32),
  )
  cache = jax.tree.map(
    lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))), out.cache
  )
  step = transformer.apply(
    new, GQA, past[None, -1:], positions=jnp.array([[size]]), cache=cache
  )
  return sampler.sample(
    transformer.logits(new, GQA, step.hidden[:, 0]),
    jnp.array([past.size]),
    controls,
    max_mask_tokens=16,
  )


def _by_hand(old, new, prompt, tokens, sampling) -> tuple[int, float]:
  """Returns the next token and its log-probability, see `_one_step`."""
  past = np.concatenate([prompt, tokens]).astype(np.int32)
  controls = sampler.Controls(
    np.array([sampling.temperature], np.float32),
    np.array([sampling.top_k]),
    np.array([sampling.top_p], np.float32),
    np.array([sampling.seed], np.uint32),
  )
  sampled = _one_step(old, new, past, controls)
  return int(sampled.token[0]), float(sampled.logprob[0])


@pytest.mark.parametrize('way', ['delta', 'base'])
def test_weights_change_under_a_request_in_flight(single, way):
  before, after = random_weights(GQA, 0), random_weights(GQA, 1)
  prompt = make_prompt(13, 7)
  sampling = SamplingParams(top_k=12, max_new_tokens=30, seed=3)
  undisturbed = generate_one(single, prompt, sampling)

  def change():
    if way == 'base':
      single.load_base(copied(after), weight_version=1)
    else:
      staged, wanted = _delta(before, after)
      single.apply_delta(staged, weight_version=1, tensors_digest=wanted)

  found = _seam(single, change=change, prompt=prompt, sampling=sampling)
  assert single.weight_version == 1
  # One token from the prefill, five from decode steps, then the seam.
  assert found.weight_versions.tolist() == [0] * 6 + [1] * 24
  np.testing.assert_array_equal(found.token_ids[:6], undisturbed.token_ids[:6])
  np.testing.assert_array_equal(
    found.rollout_logprobs[:6], undisturbed.rollout_logprobs[:6]
  )
  old, new = compute_params(GQA, before), compute_params(GQA, after)
  token, logprob = _by_hand(old, new, prompt, found.token_ids[:6], sampling)
  assert found.token_ids[6] == token
  np.testing.assert_allclose(found.rollout_logprobs[6], logprob, atol=1e-5)
  # It shows: had the entries been computed anew, the number were another.
  _, recomputed = _by_hand(new, new, prompt, found.token_ids[:6], sampling)
  assert abs(logprob - recomputed) > 1e-3
  # New requests know nothing of the old weights.
  fresh = generate_one(single, prompt, sampling)
  assert_exact(GQA, new, prompt, fresh, sampling)
  assert delta.digest(single.tensors()) == delta.digest(after)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_half_applied_weights_are_never_served(single, dtype):
  """In float32 the device could share its memory with the host's arrays."""
  versions = [random_weights(GQA, seed, dtype) for seed in range(3)]
  single.load_base(copied(versions[0]), weight_version=0)
  prompt, sampling = make_prompt(14, 9), SETTINGS[1]
  reference = generate_one(single, prompt, sampling)
  staged, _ = _delta(versions[0], versions[1])

  def damaged():
    with pytest.raises(stages.DeltaError, match='load a base'):
      single.apply_delta(staged, weight_version=1, tensors_digest='0' * 32)

  assert_same(
    reference,
    _seam(single, change=damaged, prompt=prompt, sampling=sampling),
  )
  assert single.weight_version == 0
  assert_same(reference, generate_one(single, prompt, sampling))
  # The host's bytes are not version 0 any more, so its deltas do not fit.
  staged, wanted = _delta(versions[0], _one_change(versions[0]))
  with pytest.raises(stages.DeltaError, match='load a base'):
    single.apply_delta(staged, weight_version=1, tensors_digest=wanted)
  assert_same(reference, generate_one(single, prompt, sampling))
  single.load_base(copied(versions[2]), weight_version=2)
  assert single.weight_version == 2
  healed = generate_one(single, prompt, sampling)
  assert healed.weight_versions.tolist() == [2] * 20
  params = compute_params(GQA, versions[2])
  assert_exact(GQA, params, prompt, healed, sampling)
  staged, wanted = _delta(versions[2], versions[1])
  single.apply_delta(staged, weight_version=3, tensors_digest=wanted)
  assert single.weight_version == 3


def _one_change(tensors):
  changed = copied(tensors)
  changed['model.norm.weight'][0] *= 2
  return changed


def test_a_base_with_a_missing_tensor_changes_nothing(single):
  reference = generate_one(single, make_prompt(15, 5), SHORT)
  broken = copied(random_weights(GQA, 1))
  del broken['model.norm.weight']
  with pytest.raises(hf.HfError, match='model.norm.weight'):
    single.load_base(broken, weight_version=1)
  assert single.weight_version == 0
  assert_same(reference, generate_one(single, make_prompt(15, 5), SHORT))


# ---------------------------------------------------------------- its end


async def _outcomes(engine, count=3):
  """Starts requests, more than there are slots; returns what became of them."""
  requests = [(make_prompt(20 + i, 4), LONG) for i in range(count)]
  return await asyncio.gather(
    *(engine.generate(p, sampling=s) for p, s in requests),
    return_exceptions=True,
  )


@pytest.mark.parametrize('program', ['_prefill', '_decode'])
def test_a_dead_engine_says_so_to_everybody(doomed, program):
  with mock.patch.object(doomed, program, side_effect=RuntimeError('planted')):
    found = asyncio.run(asyncio.wait_for(_outcomes(doomed), 30))
  for error in found:
    assert isinstance(error, EngineError), error
    assert 'planted' in str(error) and 'start another' in str(error)
  with pytest.raises(EngineError, match='planted'):
    generate_one(doomed, make_prompt(1, 4), SHORT)
  with pytest.raises(EngineError, match='planted'):
    doomed.load_base(copied(random_weights(GQA, 0)), weight_version=1)

  async def read():
    async for _ in doomed.stream(make_prompt(1, 4), sampling=SHORT):
      pass

  with pytest.raises(EngineError, match='planted'):
    asyncio.run(read())


def test_an_install_that_fails_ends_the_engine(doomed):
  """Nobody knows what is on the device then; the caller is told why."""
  failure = mock.patch.object(doomed, '_install', side_effect=MemoryError('x'))
  with failure, pytest.raises(MemoryError):
    doomed.load_base(copied(random_weights(GQA, 1)), weight_version=1)
  with pytest.raises(EngineError, match='MemoryError'):
    generate_one(doomed, make_prompt(1, 4), SHORT)


def test_from_before_the_first_weights_to_after_the_close():
  engine = jax_engine.JaxEngine(GQA, SINGLE)

  async def first():
    request = asyncio.create_task(
      engine.generate(make_prompt(16, 5), sampling=SHORT)
    )
    await asyncio.sleep(0.05)
    assert engine.weight_version is None and not request.done()
    base = copied(random_weights(GQA, 0))
    await asyncio.to_thread(engine.load_base, base, weight_version=4)
    return await request

  async def last(gate):
    outcomes = asyncio.create_task(_outcomes(engine))
    await asyncio.to_thread(gate.reached.wait, 60)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    while not engine._closed:
      await asyncio.sleep(0.001)
    gate.opened.set()
    await closing
    return await outcomes

  try:
    assert asyncio.run(first()).weight_versions.tolist() == [4] * 3
    with Gate(engine, before=5) as gate:
      found = asyncio.run(last(gate))
  finally:
    engine.close()  # a second time does nothing
  assert [str(error) for error in found] == ['the engine is closed'] * 3
  assert not engine._thread.is_alive()
  with pytest.raises(EngineError, match='closed'):
    generate_one(engine, make_prompt(1, 4), SHORT)
