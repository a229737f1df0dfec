"""Requests to the embedded engine, replayed in both model families."""

import asyncio
import dataclasses
from unittest import mock

import numpy as np
import pytest

from swe17_jax.core import records
from swe17_jax.engine.interface import EngineError, Generation, SamplingParams
from tests.engine.served import (
  CONFIG,
  MAX_TOKENS,
  SETTINGS,
  assert_exact,
  assert_same,
  compute_params,
  copied,
  generate_all,
  generate_one,
  make_prompt,
  random_weights,
)

# ------------------------------------------------------------------ requests


def test_replay_is_exact(model, engine):
  params = compute_params(model, random_weights(model, 0))
  requests = [
    (make_prompt(i, size), SETTINGS[i % len(SETTINGS)])
    for i, size in enumerate((1, 2, 7, 12, 13, 20, 24, 27, 3, 47))
  ]
  for (prompt, sampling), generation in zip(
    requests, asyncio.run(generate_all(engine, requests))
  ):
    assert_exact(model, params, prompt, generation, sampling)
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
      make_prompt(100 + i, int(generator.integers(1, 28))),
      dataclasses.replace(SETTINGS[i % len(SETTINGS)], seed=i),
    )
    for i in range(31)
  ]
  together = asyncio.run(generate_all(engine, requests))
  assert all(g.finish_reason == 'length' for g in together)
  assert [g.token_ids.size for g in together] == [
    s.max_new_tokens for _, s in requests
  ]
  for i in (0, 1, 2, 30):
    assert_same(together[i], generate_one(engine, *requests[i]))
  backwards = asyncio.run(generate_all(engine, requests[::-1]))[::-1]
  for a, b in zip(together, backwards):
    assert_same(a, b)


def test_equal_prompts_differ_by_seed_alone(engine):
  prompt, sampling = make_prompt(5, 9), SETTINGS[0]
  group = [
    (prompt, dataclasses.replace(sampling, seed=i % 4)) for i in range(8)
  ]
  found = asyncio.run(generate_all(engine, group))
  for i in range(4):
    assert_same(found[i], found[i + 4])
  assert len({g.token_ids.tobytes() for g in found}) == 4


def test_what_ends_a_request(engine):
  prompt, sampling = make_prompt(6, 10), SETTINGS[0]
  free = generate_one(engine, prompt, sampling)
  assert free.finish_reason == 'length' and free.token_ids.size == 20
  stop = int(free.token_ids[7])
  at = free.token_ids.tolist().index(stop) + 1
  stopped = generate_one(
    engine, prompt, dataclasses.replace(sampling, stop_token_ids=(stop,))
  )
  assert stopped.finish_reason == 'stop'
  assert stopped.token_ids.tolist() == free.token_ids[:at].tolist()
  full = generate_one(engine, make_prompt(7, MAX_TOKENS - 3), sampling)
  assert full.finish_reason == 'length' and full.token_ids.size == 3


@pytest.mark.parametrize(
  'prompt, sampling, message',
  [
    (make_prompt(0, MAX_TOKENS), SETTINGS[0], 'raise EngineConfig.max_tokens'),
    (make_prompt(0, 0), SETTINGS[0], 'a prompt of 0 tokens'),
    (
      np.array([3, 64]),
      SETTINGS[0],
      r'token id 64 .* outside the vocabulary of 64',
    ),
    (np.array([3, -1]), SETTINGS[0], 'token id -1'),
    (
      make_prompt(0, 3),
      SamplingParams(top_k=17),
      r'top_k=17 .* raise EngineConfig.max_mask_tokens',
    ),
  ],
)
def test_a_request_that_cannot_be_served_says_what_to_change(
  engine, prompt, sampling, message
):
  with pytest.raises(EngineError, match=message):
    generate_one(engine, prompt, sampling)


def test_a_stream_is_the_generation_in_pieces(engine):
  prompt, sampling = make_prompt(8, 11), SETTINGS[2]

  async def collect():
    return [chunk async for chunk in engine.stream(prompt, sampling=sampling)]

  chunks = asyncio.run(collect())
  whole = generate_one(engine, prompt, sampling)
  assert [c.token_ids.size for c in chunks] == [1] * 20
  assert_same(
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
  params = compute_params(model, random_weights(model, 0))
  first = make_prompt(9, 10)
  short = SamplingParams(top_k=8, max_new_tokens=4, seed=5)
  others = [(make_prompt(50 + i, 5), short) for i in range(3)]
  turn = asyncio.run(generate_all(engine, [(first, short), *others]))[0]
  second = np.concatenate([first, turn.token_ids, make_prompt(10, 5)])
  with mock.patch.object(engine, '_prefill', wraps=engine._prefill) as prefill:
    after = generate_one(engine, second, SETTINGS[1])
    assert not prefill.called
  rows = turn.routed_experts.shape[0]
  np.testing.assert_array_equal(
    after.routed_experts[:rows], turn.routed_experts
  )
  assert_exact(model, params, second, after, SETTINGS[1])
  # The slot has moved on: now the same prompt is prefilled, to the same end.
  with mock.patch.object(engine, '_prefill', wraps=engine._prefill) as prefill:
    again = generate_one(engine, second, SETTINGS[1])
    assert prefill.called
  assert_same(after, again)
  np.testing.assert_array_equal(after.routed_experts, again.routed_experts)


def test_two_turns_with_one_past_take_two_slots(model, engine):
  params = compute_params(model, random_weights(model, 0))
  prompt = make_prompt(11, 8)
  greedy = SamplingParams(top_k=1, max_new_tokens=4)
  [turn, _] = asyncio.run(generate_all(engine, [(prompt, greedy)] * 2))
  past = np.concatenate([prompt, turn.token_ids])
  nexts = [
    (np.concatenate([past, make_prompt(60 + i, 3)]), SETTINGS[i])
    for i in range(4)
  ]
  for (prompt, sampling), found in zip(
    nexts, asyncio.run(generate_all(engine, nexts))
  ):
    assert_exact(model, params, prompt, found, sampling)


def test_nothing_compiles_after_the_first_requests(model, engine):
  generator = np.random.default_rng(12)

  def requests(count):
    return [
      (
        make_prompt(int(generator.integers(1 << 30)), size),
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

  asyncio.run(generate_all(engine, requests(40)))
  compiled = engine.compilations()
  assert compiled <= 1 + len(CONFIG.prefill_lengths)
  engine.load_base(copied(random_weights(model, 0)), weight_version=0)
  asyncio.run(generate_all(engine, requests(40)))
  assert engine.compilations() == compiled


# -------------------------------------------------------------------- slots
