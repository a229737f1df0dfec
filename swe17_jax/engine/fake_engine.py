"""An engine without a model, for tests of everything around an engine.

`FakeEngine` holds real weights and takes real deltas, and "samples" tokens
that are a fixed function of the prompt and seed.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from swe17_jax.core import records
from swe17_jax.engine.interface import Generation, SamplingParams
from swe17_jax.weights import delta
from swe17_jax.weights import staged as stages


class FakeEngine:
  """A deterministic engine with weights but no model.

  Its tokens are a hash of prompt, seed and position, below `vocab_size`, and
  end with the stop token when one is asked for.
  """

  def __init__(self, *, vocab_size: int, routed_shape: tuple[int, int]):
    self._vocab_size = vocab_size
    self._routed_shape = routed_shape
    self._tensors: dict[str, np.ndarray] = {}
    self._version: int | None = None

  @property
  def weight_version(self) -> int | None:
    """The version served; None before the first base."""
    return self._version

  def tensors(self) -> Mapping[str, np.ndarray]:
    """The weights as last applied."""
    return self._tensors

  def load_base(
    self, tensors: Mapping[str, np.ndarray], *, weight_version: int
  ) -> None:
    """Replaces all weights."""
    self._tensors = {name: np.array(x) for name, x in tensors.items()}
    self._version = weight_version

  def apply_delta(
    self,
    staged: stages.StagedDelta,
    *,
    weight_version: int,
    tensors_digest: str,
  ) -> None:
    """Scatters a delta in place and checks the digest of the result."""
    staged.apply(self._tensors)
    found = delta.digest(self._tensors)
    if found != tensors_digest:
      raise stages.DeltaError(
        f'weights have digest {found}, expected {tensors_digest}'
      )
    self._version = weight_version

  async def generate(
    self, prompt_ids: np.ndarray, *, sampling: SamplingParams
  ) -> Generation:
    """Returns three hashed tokens and the stop token."""
    seed = np.asarray(prompt_ids, np.int32).tobytes()
    seed += sampling.seed.to_bytes(8, 'little', signed=True)
    digest = hashlib.sha256(seed).digest()
    tokens = [byte % self._vocab_size for byte in digest[:3]]
    tokens += sampling.stop_token_ids[:1]
    rows = len(prompt_ids) + len(tokens) - 1
    return Generation(
      token_ids=np.asarray(tokens, np.int32),
      rollout_logprobs=np.full(len(tokens), -1.0, np.float32),
      sampling_mask=records.SamplingMask.empty(len(tokens)),
      weight_versions=np.full(len(tokens), self._version, np.int32),
      routed_experts=np.zeros((rows, *self._routed_shape), np.int16),
      finish_reason='stop',
    )
