"""What an engine is: token ids in, token ids and their replay fields out.

An engine serves one model. It samples tokens, says under which
`weight_version` it sampled each, and takes new weights in place between two
tokens while requests are in flight. `rollout/` sees this file and no engine.

Everything that the trainer needs to replay a token comes back with it: the
log-probability renormalised over its sampling mask, the mask itself, and the
experts that every input token used. These are the fields of SGLang's
`/generate` (`return_sampling_mask`, `return_routed_experts`).
"""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import numpy as np

from swe17_jax.core import records


class EngineError(RuntimeError):
  """An engine cannot serve a request; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How to sample; the seed makes a request repeatable."""

  temperature: float = 1.0  # > 0; divides the logits
  top_k: int = 0  # tokens kept; 0 = all of them
  top_p: float = 1.0  # probability mass kept, in (0, 1]
  max_new_tokens: int = 64
  stop_token_ids: tuple[int, ...] = ()
  seed: int = 0

  def __post_init__(self):
    if not self.temperature > 0:
      raise ValueError(f'temperature={self.temperature} must be above 0')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p={self.top_p} must be in (0, 1]')
    if self.top_k < 0 or self.max_new_tokens < 1:
      raise ValueError(
        f'top_k={self.top_k} must be >= 0 and '
        f'max_new_tokens={self.max_new_tokens} >= 1'
      )
    if self.top_p < 1 and not self.top_k:
      raise ValueError(
        f'top_p={self.top_p} needs a finite top_k: sampling masks are '
        'bounded by it, as in SGLang; set top_k, for example to 64'
      )


@dataclasses.dataclass(frozen=True)
class Generation:
  """Sampled tokens (n of them) and what replays them.

  Attributes:
    token_ids: int32[n].
    rollout_logprobs: float32[n], after temperature, renormalised over the
      sampling mask.
    sampling_mask: n positions; an empty span is the full vocabulary.
    weight_versions: int32[n].
    routed_experts: int16[prompt + n - 1, L, A] of a finished generation: the
      experts of every token that was an input. Chunks of a stream hold none.
    finish_reason: 'stop', 'length', 'abort', or None for a chunk of a stream
      with more to come.
  """

  token_ids: np.ndarray
  rollout_logprobs: np.ndarray
  sampling_mask: records.SamplingMask
  weight_versions: np.ndarray
  routed_experts: np.ndarray | None
  finish_reason: str | None


class Engine(Protocol):
  """The verbs of an engine. All are safe to call from any thread."""

  async def generate(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> Generation:
    """Samples from one prompt until a stop token or the token limit."""

  def stream(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> AsyncIterator[Generation]:
    """As `generate`, in chunks; the last one has all routed experts."""

  @property
  def weight_version(self) -> int | None:
    """The version of the next token; None before the first weights."""

  def load_base(
    self, tensors: Mapping[str, np.ndarray], *, weight_version: int
  ) -> None:
    """Replaces all weights at a token boundary."""

  def apply_delta(
    self, staged, *, weight_version: int, tensors_digest: str
  ) -> None:
    """Scatters a staged delta into the weights at a token boundary."""
