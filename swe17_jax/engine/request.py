"""A request on its way through the embedded engine, and what a slot keeps.

When a request is done its slot still holds the keys and values of all its
tokens but the last. The next turn of the same conversation begins with these
tokens, so it goes on in that slot: its new tokens are fed through the decode
steps that run anyway, one per step, and nothing is computed twice.
"""

import concurrent.futures
import dataclasses

import numpy as np

from swe17_jax.core import records
from swe17_jax.engine.interface import Generation, SamplingParams


@dataclasses.dataclass(frozen=True)
class Held:
  """What the cache of an idle slot holds: tokens and their experts."""

  tokens: np.ndarray  # int32[n]
  routed_experts: np.ndarray  # int16[n, L, A]

  def begins(self, prompt: np.ndarray) -> bool:
    """Whether the prompt goes on from here."""
    size = self.tokens.size
    return prompt.size > size and np.array_equal(prompt[:size], self.tokens)


@dataclasses.dataclass(eq=False)
class Request:
  """One prompt and what has been sampled; owned by the engine thread.

  `fed` counts the prompt's tokens whose entries are in the cache.
  """

  prompt: np.ndarray  # int32[prompt]
  sampling: SamplingParams
  future: concurrent.futures.Future
  on_chunk: object | None = None  # called with each Generation of a stream
  slot: int = -1
  fed: int = 0
  tokens: list = dataclasses.field(default_factory=list)
  logprobs: list = dataclasses.field(default_factory=list)
  masks: list = dataclasses.field(default_factory=list)
  versions: list = dataclasses.field(default_factory=list)
  routed: list = dataclasses.field(default_factory=list)  # arrays [n, L, A]

  def controls(self) -> tuple:
    """Returns the row of `sampler.Controls` for this request."""
    sampling = self.sampling
    return (
      sampling.temperature,
      sampling.top_k,
      sampling.top_p,
      sampling.seed & 0xFFFFFFFF,
    )

  def go_on(self, held: Held) -> None:
    """Starts from what a slot holds."""
    self.fed = held.tokens.size
    self.routed.append(held.routed_experts)

  def next_input(self) -> tuple[int, int]:
    """Returns the token to feed and its position, and counts it as fed."""
    if self.fed < self.prompt.size:
      self.fed += 1
      return int(self.prompt[self.fed - 1]), self.fed - 1
    return self.tokens[-1], self.prompt.size + len(self.tokens) - 1

  def finish_reason(self) -> str | None:
    """Says whether the last token ends the request."""
    if self.tokens[-1] in self.sampling.stop_token_ids:
      return 'stop'
    if len(self.tokens) >= self.sampling.max_new_tokens:
      return 'length'
    return None

  def held(self) -> Held:
    """Returns what the slot keeps of a finished request."""
    sampled = np.asarray(self.tokens[:-1], np.int32)
    return Held(
      np.concatenate([self.prompt, sampled]), np.concatenate(self.routed)
    )

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
