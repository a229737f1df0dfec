"""The embedded engine: our decoder with a KV cache and continuous batching.

It is what a laptop, a test or one machine uses in place of SGLang, with the
same contract (`engine/interface.py`). A fixed number of slots decode together,
one token per step; requests enter a free slot when they come and leave it
when they are done. Between two steps, and only there, the engine thread takes
commands: new weights are swapped in while requests stay in their slots with
their KV cache (PipelineRL, arXiv 2509.19128).

Shapes are fixed: one decode step, and one prefill per entry of
`prefill_lengths`. No request ever compiles anything new.

The weights are kept twice: the published bytes in host memory, which deltas
are applied to and digested, and the compute copy on the device.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from swe17_jax.engine import programs, sampler
from swe17_jax.engine.interface import (
  EngineError,
  Generation,
  SamplingParams,
)
from swe17_jax.engine.request import Held, Request
from swe17_jax.model import hf, transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.weights import delta
from swe17_jax.weights import staged as stages


@dataclasses.dataclass(eq=False)
class _Command:
  """A function to run between two tokens, and who waits for it."""

  run: object
  future: concurrent.futures.Future


class JaxEngine:
  """Serves one model; see the module docstring. Close it when done."""

  def __init__(self, model: MoEConfig, config: programs.EngineConfig):
    self._model = model
    self._config = config
    self._host: dict | None = None  # nested numpy arrays, published bytes
    self._views: dict[str, np.ndarray] = {}
    self._params = None
    self._version: int | None = None
    self._wake = threading.Condition()
    self._commands: collections.deque[_Command] = collections.deque()
    self._waiting: collections.deque[Request] = collections.deque()
    self._slots: list[Request | None] = [None] * config.slots
    # Idle slots, the longest idle first, and what their caches still hold.
    self._idle: dict[int, Held | None] = dict.fromkeys(range(config.slots))
    self._closed = False
    self._failure: BaseException | None = None
    self._prefill = jax.jit(
      functools.partial(programs.prefill, model=model, config=config),
      donate_argnums=1,
    )
    self._decode = jax.jit(
      functools.partial(programs.decode, model=model, config=config),
      donate_argnums=1,
    )
    self._thread = threading.Thread(
      target=self._serve, name='jax-engine', daemon=True
    )
    self._thread.start()

  # ------------------------------------------------------------ requests

  async def generate(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> Generation:
    """Samples from one prompt until a stop token or the token limit.

    Raises:
      EngineError: the prompt does not fit, or the engine has died.
    """
    request = self._submit(prompt_ids, sampling, None)
    return await asyncio.wrap_future(request.future)

  async def stream(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> AsyncIterator[Generation]:
    """As `generate`, one chunk per token."""
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue()

    def on_chunk(chunk):
      with contextlib.suppress(RuntimeError):  # the reader's loop has closed
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    request = self._submit(prompt_ids, sampling, on_chunk)
    request.future.add_done_callback(lambda _: on_chunk(None))
    try:
      while (chunk := await chunks.get()) is not None:
        yield chunk
      request.future.result()  # raises what ended the stream early
    finally:
      request.future.cancel()

  def _submit(self, prompt_ids, sampling, on_chunk) -> Request:
    config = self._config
    prompt = np.asarray(prompt_ids, np.int32)
    if not 0 < prompt.size < config.max_tokens:
      raise EngineError(
        f'a prompt of {prompt.size} tokens must have between 1 and '
        f'max_tokens - 1 = {config.max_tokens - 1}; raise '
        'EngineConfig.max_tokens or compact the prompt'
      )
    for token in (int(prompt.min()), int(prompt.max())):
      if not 0 <= token < self._model.vocab_size:
        raise EngineError(
          f'token id {token} of a prompt is outside the vocabulary of '
          f'{self._model.vocab_size}; is the tokenizer of another model?'
        )
    if sampling.top_k > config.max_mask_tokens:
      raise EngineError(
        f'top_k={sampling.top_k} is above max_mask_tokens='
        f'{config.max_mask_tokens}; raise EngineConfig.max_mask_tokens'
      )
    room = config.max_tokens - prompt.size
    if sampling.max_new_tokens > room:
      sampling = dataclasses.replace(sampling, max_new_tokens=room)
    request = Request(prompt, sampling, concurrent.futures.Future(), on_chunk)
    self._enqueue(self._waiting, request)
    return request

  def _enqueue(self, queue, item) -> None:
    with self._wake:
      if self._closed:
        raise self._refusal()
      queue.append(item)
      self._wake.notify()

  # ------------------------------------------------------------- weights

  @property
  def weight_version(self) -> int | None:
    """The version of the next token; None before the first weights."""
    return self._version

  def tensors(self) -> Mapping[str, np.ndarray]:
    """The served weights in Hugging Face names (views; do not write)."""
    return self._views

  def load_base(
    self, tensors: Mapping[str, np.ndarray], *, weight_version: int
  ) -> None:
    """Replaces all weights between two tokens.

    Raises:
      hf.HfError: a tensor is missing or misshapen; nothing has changed.
    """
    host = hf.from_hf(
      tensors.__getitem__,
      self._model,
      shapes={name: tensor.shape for name, tensor in tensors.items()},
    )

    def swap():
      self._host = host
      self._views = hf.views(host, self._model)
      self._install(weight_version)

    self._command(swap)

  def apply_delta(
    self,
    staged: stages.StagedDelta,
    *,
    weight_version: int,
    tensors_digest: str,
  ) -> None:
    """Scatters a staged delta into the weights between two tokens.

    Raises:
      stages.DeltaError: the result has another digest. The engine goes on
        with the version that it served; no delta fits until the next base.
    """

    def scatter():
      staged.apply(self._views)
      found = delta.digest(self._views)
      if found != tensors_digest:
        raise stages.DeltaError(
          f'weights after the delta to version {weight_version} have digest '
          f'{found}, the manifest says {tensors_digest}; load a base'
        )
      self._install(weight_version)

    self._command(scatter)

  def _install(self, weight_version: int) -> None:
    dtype = jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
    # A copy, always: the next delta is written into the host's arrays.
    self._params = jax.tree.map(lambda x: jnp.array(x, dtype), self._host)
    self._version = weight_version
    logging.info('engine serves weight_version %d', weight_version)

  def _command(self, run) -> None:
    command = _Command(run, concurrent.futures.Future())
    self._enqueue(self._commands, command)
    command.future.result()

  # -------------------------------------------------------------- serving

  def compilations(self) -> int:
    """Number of programs compiled so far; bounded by the shapes."""
    return self._prefill._cache_size() + self._decode._cache_size()

  def close(self) -> None:
    """Stops the engine thread; unfinished requests get an EngineError."""
    with self._wake:
      self._closed = True
      self._wake.notify()
    self._thread.join()

  def _serve(self) -> None:
    """The engine thread: commands, then prefill, then one decode step."""
    cache = None
    try:
      while self._wait():
        self._run_commands()
        if self._params is None:
          continue
        if cache is None:
          cache = transformer.empty_cache(
            self._params,
            self._model,
            batch=self._config.slots,
            length=self._config.max_tokens,
          )
        self._drop_cancelled()
        cache = self._admit(cache)
        if any(self._slots):
          cache = self._step(cache)
    except BaseException as error:  # the supervisor of the engine thread
      logging.exception('engine thread died')
      self._failure = error
    finally:
      self._refuse_all()

  def _wait(self) -> bool:
    with self._wake:
      while not (
        self._closed
        or self._commands
        or any(self._slots)
        or (self._waiting and self._params is not None)
      ):
        self._wake.wait()
      return not self._closed

  def _run_commands(self) -> None:
    while self._commands:
      command = self._commands.popleft()
      try:
        command.run()
      except BaseException as error:  # the caller's to know, whatever it is
        command.future.set_exception(error)
        if not isinstance(error, ValueError):  # neither DeltaError nor HfError
          raise
      else:
        command.future.set_result(None)

  def _drop_cancelled(self) -> None:
    for request in filter(None, list(self._slots)):
      if request.future.cancelled():
        self._release(request.slot, None)

  def _release(self, slot: int, held: Held | None) -> None:
    self._slots[slot] = None
    self._idle[slot] = held

  def _refuse_all(self) -> None:
    """Ends what is unfinished; nothing is taken after this."""
    with self._wake:
      self._closed = True
    pending = [*self._waiting, *filter(None, self._slots), *self._commands]
    for item in pending:
      if item.future.set_running_or_notify_cancel():
        item.future.set_exception(self._refusal())

  def _refusal(self) -> EngineError:
    if self._failure is None:
      return EngineError('the engine is closed')
    return EngineError(
      f'the engine has died: {self._failure!r}; start another one and give '
      'it a base'
    )

  def _admit(self, cache):
    """Gives waiting requests a slot, in order, and prefills new prompts."""
    prompts: dict[bytes, int] = {}
    chosen: list[tuple[Request, int]] = []
    while self._waiting and self._idle:
      request = self._waiting[0]
      if request.future.cancelled():
        self._waiting.popleft()
        continue
      slot = self._slot_that_holds(request.prompt)
      if slot is None:
        key = request.prompt.tobytes()
        if key not in prompts and len(prompts) == self._config.prefill_prompts:
          break
        slot = next(iter(self._idle))
        chosen.append((request, prompts.setdefault(key, len(prompts))))
      else:
        request.go_on(self._idle[slot])
      self._waiting.popleft()
      del self._idle[slot]
      self._slots[slot], request.slot = request, slot
    return self._fill(cache, chosen) if chosen else cache

  def _slot_that_holds(self, prompt: np.ndarray) -> int | None:
    """Returns an idle slot that the prompt goes on from, the longest one."""
    longest = prompt.size - self._config.max_fed_tokens - 1
    best = None
    for slot, held in self._idle.items():
      if held and held.tokens.size > longest and held.begins(prompt):
        best, longest = slot, held.tokens.size
    return best

  def _fill(self, cache, chosen: list[tuple[Request, int]]):
    """Prefills (request, row of its prompt) pairs, equal prompts once."""
    longest = max(request.prompt.size for request, _ in chosen)
    width = min(w for w in self._config.prefill_lengths if w >= longest)
    tokens = np.zeros((self._config.prefill_prompts, width), np.int32)
    lengths = np.ones(self._config.prefill_prompts, np.int32)
    source = np.zeros(self._config.slots, np.int32)
    target = np.full(self._config.slots, self._config.slots, np.int32)
    controls = _no_controls(self._config.slots)
    for row, (request, prompt) in enumerate(chosen):
      tokens[prompt, : request.prompt.size] = request.prompt
      lengths[prompt] = request.fed = request.prompt.size
      source[row], target[row] = prompt, request.slot
      for column, value in zip(controls, request.controls(), strict=True):
        column[row] = value
    sampled, routed, cache = self._prefill(
      self._params, cache, tokens, lengths, source, target, controls
    )
    routed = np.asarray(routed)
    for request, prompt in chosen:
      request.routed.append(routed[prompt, : request.prompt.size])
    self._deliver(list(enumerate(request for request, _ in chosen)), sampled)
    return cache

  def _step(self, cache):
    """Feeds one token in every busy slot and samples the next."""
    size = self._config.slots
    tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    # An idle slot writes past the end of the cache, that is nowhere.
    positions[:] = self._config.max_tokens
    controls = _no_controls(size)
    busy = list(filter(None, self._slots))
    for request in busy:
      slot = request.slot
      tokens[slot], positions[slot] = request.next_input()
      for column, value in zip(controls, request.controls(), strict=True):
        column[slot] = value
    sampled, routed, cache = self._decode(
      self._params, cache, tokens, positions, controls
    )
    routed = np.asarray(routed)  # [slots, 1, L, A]
    for request in busy:
      request.routed.append(routed[request.slot])
    self._deliver(
      [(r.slot, r) for r in busy if r.fed == r.prompt.size], sampled
    )
    return cache

  def _deliver(self, rows: list[tuple[int, Request]], sampled) -> None:
    """Hands each request the token sampled in its row."""
    sampled = sampler.Sampled(*map(np.asarray, sampled))
    token, logprob = sampled.token.tolist(), sampled.logprob.tolist()
    sizes = sampled.mask_size.tolist()
    for row, request in rows:
      request.tokens.append(token[row])
      request.logprobs.append(logprob[row])
      request.masks.append(sampled.mask_ids[row, : sizes[row]].tolist())
      request.versions.append(self._version)
      finish = request.finish_reason()
      if request.on_chunk is not None:
        start = len(request.tokens) - 1
        request.on_chunk(request.generation(finish, start=start))
      if finish:
        self._release(request.slot, request.held())
        if request.future.set_running_or_notify_cancel():
          request.future.set_result(request.generation(finish, start=0))


def _no_controls(rows: int) -> sampler.Controls:
  return sampler.Controls(
    temperature=np.ones(rows, np.float32),
    top_k=np.zeros(rows, np.int32),
    top_p=np.ones(rows, np.float32),
    seed=np.zeros(rows, np.uint32),
  )
