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
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from swe17_jax.core import records
from swe17_jax.engine import programs, sampler
from swe17_jax.engine.interface import (
  EngineError,
  Generation,
  SamplingParams,
)
from swe17_jax.model import hf, transformer
from swe17_jax.model.config import MoEConfig
from swe17_jax.weights import delta


@dataclasses.dataclass(eq=False)
class _Request:
  """A request on its way through the engine; owned by the engine thread."""

  prompt: np.ndarray
  sampling: SamplingParams
  future: concurrent.futures.Future
  on_chunk: object | None = None  # called with each Generation of a stream
  slot: int = -1
  tokens: list = dataclasses.field(default_factory=list)
  logprobs: list = dataclasses.field(default_factory=list)
  masks: list = dataclasses.field(default_factory=list)
  versions: list = dataclasses.field(default_factory=list)
  routed: list = dataclasses.field(default_factory=list)

  def controls(self) -> tuple:
    """Returns the row of `sampler.Controls` for this request."""
    sampling = self.sampling
    return (
      sampling.temperature,
      sampling.top_k,
      sampling.top_p,
      sampling.seed & 0xFFFFFFFF,
    )

  def finish_reason(self) -> str | None:
    """Says whether the last token ends the request."""
    if self.tokens[-1] in self.sampling.stop_token_ids:
      return 'stop'
    if len(self.tokens) >= self.sampling.max_new_tokens:
      return 'length'
    return None

  def generation(self, finish: str | None, *, start: int) -> Generation:
    """Returns the tokens from `start` on, with all experts at the end."""
    return Generation(
      token_ids=np.asarray(self.tokens[start:], np.int32),
      rollout_logprobs=np.asarray(self.logprobs[start:], np.float32),
      sampling_mask=records.SamplingMask.from_lists(self.masks[start:]),
      weight_versions=np.asarray(self.versions[start:], np.int32),
      routed_experts=np.concatenate(self.routed) if finish else None,
      finish_reason=finish,
    )


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
    self._waiting: collections.deque[_Request] = collections.deque()
    self._slots: list[_Request | None] = [None] * config.slots
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
      loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    request = self._submit(prompt_ids, sampling, on_chunk)
    request.future.add_done_callback(lambda _: on_chunk(None))
    try:
      while (chunk := await chunks.get()) is not None:
        yield chunk
      request.future.result()  # raises what ended the stream early
    finally:
      request.future.cancel()

  def _submit(self, prompt_ids, sampling, on_chunk) -> _Request:
    config = self._config
    prompt = np.asarray(prompt_ids, np.int32)
    if not 0 < prompt.size < config.max_tokens:
      raise EngineError(
        f'a prompt of {prompt.size} tokens must have between 1 and '
        f'max_tokens - 1 = {config.max_tokens - 1}; raise '
        'EngineConfig.max_tokens or compact the prompt'
      )
    if sampling.top_k > config.max_mask_tokens:
      raise EngineError(
        f'top_k={sampling.top_k} is above max_mask_tokens='
        f'{config.max_mask_tokens}; raise EngineConfig.max_mask_tokens'
      )
    room = config.max_tokens - prompt.size
    if sampling.max_new_tokens > room:
      sampling = dataclasses.replace(sampling, max_new_tokens=room)
    request = _Request(prompt, sampling, concurrent.futures.Future(), on_chunk)
    self._enqueue(self._waiting, request)
    return request

  def _enqueue(self, queue, item) -> None:
    with self._wake:
      if self._failure is not None:
        raise EngineError(f'the engine has died: {self._failure!r}')
      if self._closed:
        raise EngineError('the engine is closed')
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
    staged: delta.StagedDelta,
    *,
    weight_version: int,
    tensors_digest: str,
  ) -> None:
    """Scatters a staged delta into the weights between two tokens.

    Raises:
      delta.DeltaError: the result has another digest; the engine must be
        given a base before it serves again.
    """

    def scatter():
      staged.apply(self._views)
      found = delta.digest(self._views)
      if found != tensors_digest:
        raise delta.DeltaError(
          f'weights after the delta to version {weight_version} have digest '
          f'{found}, the manifest says {tensors_digest}; load a base'
        )
      self._install(weight_version)

    self._command(scatter)

  def _install(self, weight_version: int) -> None:
    dtype = jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
    self._params = jax.tree.map(lambda x: jnp.asarray(x, dtype), self._host)
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
    """Stops the engine thread; unfinished requests are cancelled."""
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
      self._cancel_all()

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
      except ValueError as error:  # DeltaError, HfError: the caller's to know
        command.future.set_exception(error)
      else:
        command.future.set_result(None)

  def _drop_cancelled(self) -> None:
    for slot, request in enumerate(self._slots):
      if request is not None and request.future.cancelled():
        self._slots[slot] = None

  def _cancel_all(self) -> None:
    failure = self._failure or EngineError('the engine is closed')
    pending = [*self._waiting, *filter(None, self._slots), *self._commands]
    for item in pending:
      if not item.future.done():
        item.future.set_exception(failure)

  def _admit(self, cache):
    """Prefills waiting requests into free slots, equal prompts once."""
    free = [slot for slot, request in enumerate(self._slots) if not request]
    prompts: dict[bytes, int] = {}
    chosen: list[tuple[_Request, int]] = []
    while self._waiting and free:
      request = self._waiting[0]
      key = request.prompt.tobytes()
      if key not in prompts and len(prompts) == self._config.prefill_prompts:
        break
      self._waiting.popleft()
      if request.future.cancelled():
        continue
      request.slot = free.pop()
      chosen.append((request, prompts.setdefault(key, len(prompts))))
    if not chosen:
      return cache
    longest = max(request.prompt.size for request, _ in chosen)
    width = min(w for w in self._config.prefill_lengths if w >= longest)
    tokens = np.zeros((self._config.prefill_prompts, width), np.int32)
    lengths = np.ones(self._config.prefill_prompts, np.int32)
    source = np.zeros(self._config.slots, np.int32)
    target = np.full(self._config.slots, self._config.slots, np.int32)
    controls = _no_controls(self._config.slots)
    for row, (request, prompt) in enumerate(chosen):
      tokens[prompt, : request.prompt.size] = request.prompt
      lengths[prompt] = request.prompt.size
      source[row], target[row] = prompt, request.slot
      for column, value in zip(controls, request.controls(), strict=True):
        column[row] = value
    sampled, routed, cache = self._prefill(
      self._params, cache, tokens, lengths, source, target, controls
    )
    routed = np.asarray(routed)
    for request, prompt in chosen:
      request.routed.append(routed[prompt, : request.prompt.size])
      self._slots[request.slot] = request
    self._deliver([request for request, _ in chosen], sampled, None)
    return cache

  def _step(self, cache):
    """Decodes one token in every busy slot."""
    size = self._config.slots
    tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    # An empty slot writes past the end of the cache, that is nowhere.
    positions[:] = self._config.max_tokens
    controls = _no_controls(size)
    busy: list[_Request] = []
    for slot, request in enumerate(self._slots):
      if request is None:
        continue
      busy.append(request)
      tokens[slot] = request.tokens[-1]
      positions[slot] = request.prompt.size + len(request.tokens) - 1
      for column, value in zip(controls, request.controls(), strict=True):
        column[slot] = value
    sampled, routed, cache = self._decode(
      self._params, cache, tokens, positions, controls
    )
    rows = [request.slot for request in busy]
    sampled = sampler.Sampled(*(np.asarray(x)[rows] for x in sampled))
    self._deliver(busy, sampled, np.asarray(routed)[rows])
    return cache

  def _deliver(self, requests, sampled, routed) -> None:
    sampled = sampler.Sampled(*map(np.asarray, sampled))
    token, logprob = sampled.token.tolist(), sampled.logprob.tolist()
    sizes = sampled.mask_size.tolist()
    for row, request in enumerate(requests):
      request.tokens.append(token[row])
      request.logprobs.append(logprob[row])
      request.masks.append(sampled.mask_ids[row, : sizes[row]].tolist())
      request.versions.append(self._version)
      if routed is not None:
        request.routed.append(routed[row])
      finish = request.finish_reason()
      if finish:
        self._slots[request.slot] = None
      if request.on_chunk is not None:
        start = len(request.tokens) - 1
        request.on_chunk(request.generation(finish, start=start))
      if finish and request.future.set_running_or_notify_cancel():
        request.future.set_result(request.generation(finish, start=0))


def _no_controls(rows: int) -> sampler.Controls:
  return sampler.Controls(
    temperature=np.ones(rows, np.float32),
    top_k=np.zeros(rows, np.int32),
    top_p=np.ones(rows, np.float32),
    seed=np.zeros(rows, np.uint32),
  )
