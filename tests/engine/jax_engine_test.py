"""The embedded engine, replayed by the plain decoder in both families.

What an engine says about a token is recomputed from the whole sequence with
`transformer.apply`, the way the trainer does it.
"""

import asyncio
import dataclasses
import functools
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swe17_jax.core import records
from swe17_jax.engine import jax_engine, programs, sampler
from swe17_jax.engine.interface import EngineError, Generation, SamplingParams
from swe17_jax.model import config as model_config
from swe17_jax.model import hf, transformer
from swe17_jax.rl import sampling_mask
from swe17_jax.weights import delta

_SIZES = {
  'vocab_size': 64,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_experts': 4,
  'moe_intermediate_size': 16,
}
GQA = dataclasses.replace(
  model_config.TINY, **_SIZES, num_attention_heads=2, head_dim=16
)
MLA = dataclasses.replace(
  model_config.TINY_MLA,
  **_SIZES,
  **{'intermediate_size': 48, 'n_group': 2, 'topk_group': 1},
  **{'kv_lora_rank': 16, 'q_lora_rank': 24, 'v_head_dim': 16},
)
MAX_TOKENS = 48
CONFIG = programs.EngineConfig(
  slots=6,
  max_tokens=MAX_TOKENS,
  prefill_lengths=(12, 24, MAX_TOKENS),
  prefill_prompts=3,
  max_fed_tokens=6,
  max_mask_tokens=16,
)
# One slot and one prefill length: quick to compile.
SINGLE = dataclasses.replace(
  CONFIG, slots=1, prefill_lengths=(MAX_TOKENS,), prefill_prompts=1
)
SETTINGS = (
  SamplingParams(max_new_tokens=20, seed=1),
  SamplingParams(top_k=8, max_new_tokens=20, seed=2),
  SamplingParams(top_k=16, top_p=0.9, temperature=0.7, max_new_tokens=20),
  SamplingParams(top_k=1, max_new_tokens=5),
  SamplingParams(temperature=1.7, max_new_tokens=1, seed=3),
)


@functools.cache
def _weights(model, seed: int, dtype='bfloat16'):
  """Returns random weights as a publisher has them."""
  params = transformer.init(model, jax.random.key(seed))
  kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  host = jax.tree.map(lambda x: np.asarray(x).astype(kind), params)
  return hf.views(host, model)


def _params(model, tensors):
  """Returns the parameters that the trainer computes with."""
  shapes = {name: x.shape for name, x in tensors.items()}
  host = hf.from_hf(tensors.__getitem__, model, shapes=shapes)
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), host)


def _copy(tensors):
  return {name: np.array(x) for name, x in tensors.items()}


@pytest.fixture(scope='module', params=[GQA, MLA], ids=['gqa', 'mla'])
def model(request):
  return request.param


@pytest.fixture(scope='module')
def engine(model):
  made = jax_engine.JaxEngine(model, CONFIG)
  made.load_base(_copy(_weights(model, 0)), weight_version=0)
  yield made
  made.close()


@pytest.fixture(scope='module')
def shared():
  made = jax_engine.JaxEngine(GQA, SINGLE)
  yield made
  made.close()


@pytest.fixture
def single(shared):
  """An engine with one slot that serves version 0 of `GQA`."""
  shared.load_base(_copy(_weights(GQA, 0)), weight_version=0)
  return shared


@pytest.fixture
def doomed():
  """As `single`, to be broken."""
  made = jax_engine.JaxEngine(GQA, SINGLE)
  made.load_base(_copy(_weights(GQA, 0)), weight_version=0)
  yield made
  made.close()


def _prompt(seed: int, size: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 64, size).astype(np.int32)


async def _all(engine, requests) -> list[Generation]:
  return await asyncio.gather(
    *(engine.generate(p, sampling=s) for p, s in requests)
  )


def _generate(engine, prompt, sampling) -> Generation:
  return asyncio.run(engine.generate(prompt, sampling=sampling))


@functools.cache
def _scorer(model):
  """Returns a program of fixed shape for whole sequences."""

  @jax.jit
  def score(params, tokens, routed, mask_ids, mask_rows, temperature):
    out = transformer.apply(
      params,
      model,
      tokens[None],
      positions=jnp.arange(MAX_TOKENS)[None],
      segment_ids=jnp.ones((1, MAX_TOKENS), jnp.int32),
      routed_experts=routed[None],
    )
    logprobs = sampling_mask.masked_logprobs(
      transformer.logits(params, model, out.hidden)[0] / temperature,
      jnp.roll(tokens, -1),
      mask_ids=mask_ids,
      mask_rows=mask_rows,
    )
    return logprobs, out.routed_experts[0]

  return score


def _replay(model, params, prompt, generation, temperature):
  """Returns logprobs [n] and experts [prompt + n - 1, L, A] of a sequence.

  The log-probabilities are computed with the recorded experts, the experts
  without. Padding stands behind the sequence, where attention never looks.
  """
  tokens = np.zeros(MAX_TOKENS, np.int32)
  sequence = np.concatenate([prompt, generation.token_ids])
  tokens[: sequence.size] = sequence
  shape = (MAX_TOKENS, model.moe_layers, model.num_experts_per_tok)
  own, routed = np.full((2, *shape), -1, np.int16)
  first, rows = prompt.size - 1, sequence.size - 1
  routed[:rows] = generation.routed_experts
  mask = generation.sampling_mask
  mask_ids = np.zeros(MAX_TOKENS * 16, np.int32)
  mask_rows = np.full(MAX_TOKENS * 16, MAX_TOKENS, np.int32)
  mask_ids[: mask.token_ids.size] = mask.token_ids
  mask_rows[: mask.token_ids.size] = np.repeat(
    np.arange(first, rows), mask.sizes()
  )
  score, rest = _scorer(model), (mask_ids, mask_rows, temperature)
  logprobs, _ = score(params, tokens, routed, *rest)
  _, experts = score(params, tokens, own, *rest)
  return np.asarray(logprobs)[first:rows], np.asarray(experts)[:rows]


def _assert_exact(model, params, prompt, generation, sampling):
  size = generation.token_ids.size
  assert generation.rollout_logprobs.shape == (size,)
  assert len(generation.sampling_mask) == size
  assert generation.routed_experts.shape == (
    prompt.size + size - 1,
    model.moe_layers,
    model.num_experts_per_tok,
  )
  assert generation.routed_experts.dtype == np.int16
  logprobs, routed = _replay(
    model, params, prompt, generation, sampling.temperature
  )
  assert np.abs(logprobs - generation.rollout_logprobs).max() <= 1e-5
  np.testing.assert_array_equal(routed, generation.routed_experts)


def _same(a: Generation, b: Generation):
  np.testing.assert_array_equal(a.token_ids, b.token_ids)
  np.testing.assert_allclose(
    a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=1e-5
  )
  np.testing.assert_array_equal(
    a.sampling_mask.offsets, b.sampling_mask.offsets
  )
  np.testing.assert_array_equal(a.weight_versions, b.weight_versions)
  assert a.finish_reason == b.finish_reason


# ------------------------------------------------------------------ requests


def test_replay_is_exact(model, engine):
  params = _params(model, _weights(model, 0))
  requests = [
    (_prompt(i, size), SETTINGS[i % len(SETTINGS)])
    for i, size in enumerate((1, 2, 7, 12, 13, 20, 24, 27, 3, 47))
  ]
  for (prompt, sampling), generation in zip(
    requests, asyncio.run(_all(engine, requests))
  ):
    _assert_exact(model, params, prompt, generation, sampling)
    assert not generation.weight_versions.any()
    sizes = generation.sampling_mask.sizes()
    if sampling.top_k:
      assert 1 <= sizes.min() and sizes.max() <= sampling.top_k
    else:
      assert not sizes.any()
    for t, token in enumerate(generation.token_ids):
      assert not sampling.top_k or token in generation.sampling_mask.span(t)


def test_company_changes_nothing(engine):
  """31 requests on 6 slots, and the first of them alone."""
  generator = np.random.default_rng(4)
  requests = [
    (
      _prompt(100 + i, int(generator.integers(1, 28))),
      dataclasses.replace(SETTINGS[i % len(SETTINGS)], seed=i),
    )
    for i in range(31)
  ]
  together = asyncio.run(_all(engine, requests))
  assert all(g.finish_reason == 'length' for g in together)
  assert [g.token_ids.size for g in together] == [
    s.max_new_tokens for _, s in requests
  ]
  for i in (0, 1, 2, 30):
    _same(together[i], _generate(engine, *requests[i]))
  backwards = asyncio.run(_all(engine, requests[::-1]))[::-1]
  for a, b in zip(together, backwards):
    _same(a, b)


def test_equal_prompts_differ_by_seed_alone(engine):
  prompt, sampling = _prompt(5, 9), SETTINGS[0]
  group = [
    (prompt, dataclasses.replace(sampling, seed=i % 4)) for i in range(8)
  ]
  found = asyncio.run(_all(engine, group))
  for i in range(4):
    _same(found[i], found[i + 4])
  assert len({g.token_ids.tobytes() for g in found}) == 4


def test_what_ends_a_request(engine):
  prompt, sampling = _prompt(6, 10), SETTINGS[0]
  free = _generate(engine, prompt, sampling)
  assert free.finish_reason == 'length' and free.token_ids.size == 20
  stop = int(free.token_ids[7])
  at = free.token_ids.tolist().index(stop) + 1
  stopped = _generate(
    engine, prompt, dataclasses.replace(sampling, stop_token_ids=(stop,))
  )
  assert stopped.finish_reason == 'stop'
  assert stopped.token_ids.tolist() == free.token_ids[:at].tolist()
  full = _generate(engine, _prompt(7, MAX_TOKENS - 3), sampling)
  assert full.finish_reason == 'length' and full.token_ids.size == 3


@pytest.mark.parametrize(
  'prompt, sampling, message',
  [
    (_prompt(0, MAX_TOKENS), SETTINGS[0], 'raise EngineConfig.max_tokens'),
    (_prompt(0, 0), SETTINGS[0], 'a prompt of 0 tokens'),
    (
      np.array([3, 64]),
      SETTINGS[0],
      r'token id 64 .* outside the vocabulary of 64',
    ),
    (np.array([3, -1]), SETTINGS[0], 'token id -1'),
    (
      _prompt(0, 3),
      SamplingParams(top_k=17),
      r'top_k=17 .* raise EngineConfig.max_mask_tokens',
    ),
  ],
)
def test_a_request_that_cannot_be_served_says_what_to_change(
  engine, prompt, sampling, message
):
  with pytest.raises(EngineError, match=message):
    _generate(engine, prompt, sampling)


def test_a_stream_is_the_generation_in_pieces(engine):
  prompt, sampling = _prompt(8, 11), SETTINGS[2]

  async def collect():
    return [chunk async for chunk in engine.stream(prompt, sampling=sampling)]

  chunks = asyncio.run(collect())
  whole = _generate(engine, prompt, sampling)
  assert [c.token_ids.size for c in chunks] == [1] * 20
  _same(
    whole,
    Generation(
      np.concatenate([c.token_ids for c in chunks]),
      np.concatenate([c.rollout_logprobs for c in chunks]),
      records.SamplingMask.concatenate([c.sampling_mask for c in chunks]),
      np.concatenate([c.weight_versions for c in chunks]),
      chunks[-1].routed_experts,
      chunks[-1].finish_reason,
    ),
  )
  np.testing.assert_array_equal(whole.routed_experts, chunks[-1].routed_experts)
  assert {(c.finish_reason, c.routed_experts) for c in chunks[:-1]} == {
    (None, None)
  }


def test_the_next_turn_goes_on_without_a_prefill(model, engine):
  params = _params(model, _weights(model, 0))
  first = _prompt(9, 10)
  short = SamplingParams(top_k=8, max_new_tokens=4, seed=5)
  others = [(_prompt(50 + i, 5), short) for i in range(3)]
  turn = asyncio.run(_all(engine, [(first, short), *others]))[0]
  second = np.concatenate([first, turn.token_ids, _prompt(10, 5)])
  with mock.patch.object(engine, '_prefill', wraps=engine._prefill) as prefill:
    after = _generate(engine, second, SETTINGS[1])
    assert not prefill.called
  rows = turn.routed_experts.shape[0]
  np.testing.assert_array_equal(
    after.routed_experts[:rows], turn.routed_experts
  )
  _assert_exact(model, params, second, after, SETTINGS[1])
  # The slot has moved on: now the same prompt is prefilled, to the same end.
  with mock.patch.object(engine, '_prefill', wraps=engine._prefill) as prefill:
    again = _generate(engine, second, SETTINGS[1])
    assert prefill.called
  _same(after, again)
  np.testing.assert_array_equal(after.routed_experts, again.routed_experts)


def test_two_turns_with_one_past_take_two_slots(model, engine):
  params = _params(model, _weights(model, 0))
  prompt = _prompt(11, 8)
  greedy = SamplingParams(top_k=1, max_new_tokens=4)
  [turn, _] = asyncio.run(_all(engine, [(prompt, greedy)] * 2))
  past = np.concatenate([prompt, turn.token_ids])
  nexts = [
    (np.concatenate([past, _prompt(60 + i, 3)]), SETTINGS[i]) for i in range(4)
  ]
  for (prompt, sampling), found in zip(nexts, asyncio.run(_all(engine, nexts))):
    _assert_exact(model, params, prompt, found, sampling)


def test_nothing_compiles_after_the_first_requests(model, engine):
  generator = np.random.default_rng(12)

  def requests(count):
    return [
      (
        _prompt(int(generator.integers(1 << 30)), size),
        SamplingParams(
          temperature=float(generator.uniform(0.5, 2)),
          top_k=int(generator.integers(1, 17)),
          top_p=float(generator.uniform(0.1, 1)),
          max_new_tokens=int(generator.integers(1, 30)),
          stop_token_ids=tuple(range(int(generator.integers(0, 4)))),
          seed=int(generator.integers(-5, 1 << 40)),
        ),
      )
      for size in generator.integers(1, MAX_TOKENS, count).tolist()
    ]

  asyncio.run(_all(engine, requests(40)))
  compiled = engine.compilations()
  assert compiled <= 1 + len(CONFIG.prefill_lengths)
  engine.load_base(_copy(_weights(model, 0)), weight_version=0)
  asyncio.run(_all(engine, requests(40)))
  assert engine.compilations() == compiled


# -------------------------------------------------------------------- slots


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
    long = asyncio.create_task(single.generate(_prompt(1, 4), sampling=LONG))
    waiting = asyncio.create_task(single.generate(_prompt(2, 4), sampling=LONG))
    await asyncio.to_thread(gate.reached.wait, 60)
    long.cancel()
    waiting.cancel()  # one that never had a slot
    await asyncio.gather(long, waiting, return_exceptions=True)
    gate.opened.set()
    return await single.generate(_prompt(3, 4), sampling=SHORT)

  with Gate(single, before=5) as gate:
    found = asyncio.run(run(gate))
  assert found.token_ids.size == 3
  assert gate.calls <= 5 + 2  # not the 39 steps of the cancelled one
  _same(found, _generate(single, _prompt(3, 4), SHORT))


def test_a_stream_that_nobody_reads_frees_its_slot(single):
  """Its loop is closed when the engine hands over the next token."""

  async def leave(gate):
    async for chunk in single.stream(_prompt(1, 4), sampling=LONG):
      await asyncio.to_thread(gate.reached.wait, 60)
      return chunk

  with Gate(single, before=5) as gate:
    asyncio.run(leave(gate))
    gate.opened.set()
    found = _generate(single, _prompt(3, 4), SHORT)
  assert found.token_ids.size == 3
  assert gate.calls <= 5 + 2


# ------------------------------------------------------------------ weights


def _delta(old, new):
  """Returns a staged delta and the digest of what it makes."""
  return delta.decode(delta.encode(old, new)), delta.digest(new)


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
  before, after = _weights(GQA, 0), _weights(GQA, 1)
  prompt = _prompt(13, 7)
  sampling = SamplingParams(top_k=12, max_new_tokens=30, seed=3)
  undisturbed = _generate(single, prompt, sampling)

  def change():
    if way == 'base':
      single.load_base(_copy(after), weight_version=1)
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
  old, new = _params(GQA, before), _params(GQA, after)
  token, logprob = _by_hand(old, new, prompt, found.token_ids[:6], sampling)
  assert found.token_ids[6] == token
  np.testing.assert_allclose(found.rollout_logprobs[6], logprob, atol=1e-5)
  # It shows: had the entries been computed anew, the number were another.
  _, recomputed = _by_hand(new, new, prompt, found.token_ids[:6], sampling)
  assert abs(logprob - recomputed) > 1e-3
  # New requests know nothing of the old weights.
  fresh = _generate(single, prompt, sampling)
  _assert_exact(GQA, new, prompt, fresh, sampling)
  assert delta.digest(single.tensors()) == delta.digest(after)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_half_applied_weights_are_never_served(single, dtype):
  """In float32 the device could share its memory with the host's arrays."""
  versions = [_weights(GQA, seed, dtype) for seed in range(3)]
  single.load_base(_copy(versions[0]), weight_version=0)
  prompt, sampling = _prompt(14, 9), SETTINGS[1]
  reference = _generate(single, prompt, sampling)
  staged, _ = _delta(versions[0], versions[1])

  def damaged():
    with pytest.raises(delta.DeltaError, match='load a base'):
      single.apply_delta(staged, weight_version=1, tensors_digest='0' * 32)

  _same(
    reference,
    _seam(single, change=damaged, prompt=prompt, sampling=sampling),
  )
  assert single.weight_version == 0
  _same(reference, _generate(single, prompt, sampling))
  # The host's bytes are not version 0 any more, so its deltas do not fit.
  staged, wanted = _delta(versions[0], _one_change(versions[0]))
  with pytest.raises(delta.DeltaError, match='load a base'):
    single.apply_delta(staged, weight_version=1, tensors_digest=wanted)
  _same(reference, _generate(single, prompt, sampling))
  single.load_base(_copy(versions[2]), weight_version=2)
  assert single.weight_version == 2
  healed = _generate(single, prompt, sampling)
  assert healed.weight_versions.tolist() == [2] * 20
  params = _params(GQA, versions[2])
  _assert_exact(GQA, params, prompt, healed, sampling)
  staged, wanted = _delta(versions[2], versions[1])
  single.apply_delta(staged, weight_version=3, tensors_digest=wanted)
  assert single.weight_version == 3


def _one_change(tensors):
  changed = _copy(tensors)
  changed['model.norm.weight'][0] *= 2
  return changed


def test_a_base_with_a_missing_tensor_changes_nothing(single):
  reference = _generate(single, _prompt(15, 5), SHORT)
  broken = _copy(_weights(GQA, 1))
  del broken['model.norm.weight']
  with pytest.raises(hf.HfError, match='model.norm.weight'):
    single.load_base(broken, weight_version=1)
  assert single.weight_version == 0
  _same(reference, _generate(single, _prompt(15, 5), SHORT))


# ---------------------------------------------------------------- its end


async def _outcomes(engine, count=3):
  """Starts requests, more than there are slots; returns what became of them."""
  requests = [(_prompt(20 + i, 4), LONG) for i in range(count)]
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
    _generate(doomed, _prompt(1, 4), SHORT)
  with pytest.raises(EngineError, match='planted'):
    doomed.load_base(_copy(_weights(GQA, 0)), weight_version=1)

  async def read():
    async for _ in doomed.stream(_prompt(1, 4), sampling=SHORT):
      pass

  with pytest.raises(EngineError, match='planted'):
    asyncio.run(read())


def test_an_install_that_fails_ends_the_engine(doomed):
  """Nobody knows what is on the device then; the caller is told why."""
  failure = mock.patch.object(doomed, '_install', side_effect=MemoryError('x'))
  with failure, pytest.raises(MemoryError):
    doomed.load_base(_copy(_weights(GQA, 1)), weight_version=1)
  with pytest.raises(EngineError, match='MemoryError'):
    _generate(doomed, _prompt(1, 4), SHORT)


def test_from_before_the_first_weights_to_after_the_close():
  engine = jax_engine.JaxEngine(GQA, SINGLE)

  async def first():
    request = asyncio.create_task(
      engine.generate(_prompt(16, 5), sampling=SHORT)
    )
    await asyncio.sleep(0.05)
    assert engine.weight_version is None and not request.done()
    base = _copy(_weights(GQA, 0))
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
    _generate(engine, _prompt(1, 4), SHORT)
