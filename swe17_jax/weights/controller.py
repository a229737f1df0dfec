"""Engine side: brings one target to the newest version and keeps it there.

The controller polls the store for manifests, fetches and decodes everything
that a chain needs while the target goes on serving, and touches the target
last. A target says that it is at a version only after it has verified the
digest of its own weights. If that fails half-way it is fenced: the controller
trusts nothing it holds and rebuilds it from the newest base (NeMo-RL #2444,
sglang-omni #784). `verified_version` is what a router may route on.

Polling reads the name that the next manifest should have, which on an object
store costs a tenth of a listing. The store is listed at the start, where the
chain has a gap, and every `_LIST_EVERY` quiet polls, in case the step between
versions changed.

Example:
  controller = Controller(store, engine, poll_s=1.0)
  threading.Thread(target=controller.run, args=(stop,)).start()
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from absl import logging

from swe17_jax.core import storage
from swe17_jax.weights import manifest as manifests
from swe17_jax.weights import rebuild
from swe17_jax.weights import staged as stages

MAX_BACKOFF_S = 60.0

# Quiet polls from one listing to the next. A listing costs as much as about 12
# reads (Cloud Storage class A against class B), so this doubles the price.
_LIST_EVERY = 12


class ControllerError(RuntimeError):
  """The target could not be brought to a version."""


class WeightTarget(Protocol):
  """What takes weights: an engine, or a group of them seen as one."""

  @property
  def weight_version(self) -> int | None:
    """The version in place and verified; None before the first one."""

  def tensors(self) -> Mapping[str, np.ndarray]:
    """The weights in place in host memory; the controller only reads them."""

  def load_base(
    self, tensors: Mapping[str, np.ndarray], *, weight_version: int
  ) -> None:
    """Replaces all weights. May keep and change the arrays."""

  def apply_delta(
    self,
    staged: stages.StagedDelta,
    *,
    weight_version: int,
    tensors_digest: str,
  ) -> None:
    """Applies a delta in place.

    Raises:
      stages.DeltaError: `delta.digest` of the result is not `tensors_digest`.
    """


class Controller:
  """Watches a store on behalf of one target.

  Attributes:
    errors: polls that failed since the start.
    versions_applied: versions installed since the start.
  """

  def __init__(
    self,
    store: storage.Store,
    target: WeightTarget,
    *,
    poll_s: float,
    threads: int | None = None,
  ):
    """Makes a controller; nothing happens before `poll_once` or `run`.

    Args:
      store: where the publisher commits.
      target: what to update; driven from one thread.
      poll_s: seconds between polls, > 0.
      threads: groups to decode at a time; all cores by default.
    """
    if not poll_s > 0:
      raise ValueError(f'{poll_s=} must be above 0 seconds')
    self._store = store
    self._target = target
    self._poll_s = poll_s
    self._threads = threads or os.cpu_count()
    self._fenced = False
    self._digest: str | None = None  # of the target's weights, if we put them
    # From a version to the next, as the last delta had it.
    self._stride: int | None = None
    self._quiet_polls = 0
    self.errors = 0
    self.versions_applied = 0

  @property
  def verified_version(self) -> int | None:
    """The target's version; None while it must not serve."""
    return None if self._fenced else self._target.weight_version

  def poll_once(self) -> int:
    """Installs what is newer than the target's version.

    Returns:
      How many versions the target moved along the chain; 0 = nothing new.

    Raises:
      ManifestError, DeltaError: something committed is damaged or does not
        fit; the target still serves its old version, or is fenced.
      StorageError: the store failed.
      ControllerError: the target is fenced and there is no base to heal it.
    """
    have = self.verified_version
    chain = manifests.plan(have, self._discover(have))
    if not chain:
      if self._fenced:
        raise ControllerError(
          'target is fenced after a failed update and no base can be reached; '
          'publish a base'
        )
      return 0
    rebuild.check_codec(chain)
    self._check_parent(chain[0])
    if chain[0].kind == 'base':
      tensors = rebuild.tensors(self._fetch, chain, threads=self._threads)
      with self._fencing():
        self._target.load_base(tensors, weight_version=chain[-1].version)
        self._check_target(chain[-1])
    else:
      staged = self._stage(chain)
      with self._fencing():
        self._target.apply_delta(
          staged,
          weight_version=chain[-1].version,
          tensors_digest=chain[-1].tensors_digest,
        )
        self._check_target(chain[-1])
    self._note_applied(have, chain)
    return len(chain)

  def run(self, stop: threading.Event) -> None:
    """Polls until `stop` is set; errors are logged, counted and backed off."""
    failures = 0
    while not stop.is_set():
      delay_s = self._poll_s
      try:
        if self.poll_once():
          delay_s = 0.0
        failures = 0
      except Exception:
        failures += 1
        self.errors += 1
        delay_s = min(self._poll_s * 2 ** min(failures, 16), MAX_BACKOFF_S)
        logging.exception(
          'weights: poll failed (%d in a row), verified version %s, next try '
          'in %.1f s',
          *(failures, self.verified_version, delay_s),
        )
      stop.wait(delay_s)

  def _discover(self, have: int | None) -> dict[int, manifests.Manifest]:
    """Reads the manifests that may lead on from `have`."""
    if have is None or self._stride is None:
      return self._list(have)
    found: dict[int, manifests.Manifest] = {}
    version = have + self._stride
    while (manifest := self._probe(version)) is not None:
      found[version] = manifest
      version += self._stride
    self._quiet_polls += 1
    if manifests.plan(have, found):
      return found
    if not found and self._quiet_polls % _LIST_EVERY:
      return {}
    return self._list(have)

  def _probe(self, version: int) -> manifests.Manifest | None:
    try:
      return manifests.read(self._store, version=version)
    except storage.ObjectNotFound:
      return None

  def _list(self, have: int | None) -> dict[int, manifests.Manifest]:
    """Reads from the newest version down, as far as the chain needs."""
    after = -1 if have is None else have
    found: dict[int, manifests.Manifest] = {}
    for version in reversed(manifests.versions(self._store, after=after)):
      found[version] = manifests.read(self._store, version=version)
      if found[version].kind == 'base' and manifests.plan(have, found):
        break
    return found

  def _check_parent(self, link: manifests.Manifest) -> None:
    known = self._digest
    if link.kind == 'delta' and known not in (None, link.parent_digest):
      raise manifests.ManifestError(
        f'version {link.version} was made against weights with digest '
        f'{link.parent_digest}; version {link.parent_version} in place has '
        f'{known}: wrong parent. Stop all but one publisher and let it publish '
        'a new base'
      )

  def _fetch(self, blob: manifests.Blob) -> bytes:
    return self._store.read(blob.name)

  def _stage(self, chain: Sequence[manifests.Manifest]) -> stages.StagedDelta:
    """Decodes a chain of deltas into one, while the target serves."""
    tensors, staged = self._target.tensors(), []
    for link in chain:
      staged.append(
        rebuild.stage(self._fetch, link, tensors, threads=self._threads)
      )
      if link is not chain[-1]:
        tensors = staged[-1].applied(tensors)
    return stages.merge(staged)

  def _check_target(self, link: manifests.Manifest) -> None:
    if self._target.weight_version != link.version:
      raise ControllerError(
        f'target says version {self._target.weight_version} after it took '
        f'{link.version}; it must set weight_version when it has verified one'
      )

  def _note_applied(
    self, have: int | None, chain: Sequence[manifests.Manifest]
  ) -> None:
    last = chain[-1]
    if last.kind == 'delta':  # a base does not say what came before it
      self._stride = last.version - last.parent_version
    self._digest = last.tensors_digest
    self._quiet_polls = 0
    self.versions_applied += len(chain)
    logging.info(
      'weights: version %s -> %d by %s (%d bytes)',
      *(have, last.version, '+'.join(link.kind for link in chain)),
      sum(blob.size for link in chain for blob in link.blobs),
    )

  @contextlib.contextmanager
  def _fencing(self) -> Iterator[None]:
    """Leaves the target fenced unless the block runs to its end."""
    complete = False
    try:
      yield
      complete = True
    finally:
      self._fenced = not complete
