"""Trainer side: commits versions of the weights to a store.

A version is a base or a delta against the snapshot, the publisher's own copy
of what it last committed. Order is everything: blobs, then the manifest, then
the snapshot. Killed anywhere in between, the publisher leaves a version that
is either whole or invisible, and publishing it again continues. The snapshot
follows what engines can read, never what one was hoped to receive (slime
#2104: a snapshot that ran ahead made the drift permanent).

On several hosts each publisher has tensors of its own, encodes and uploads
them; the first host decides what is made, and commits. They talk through an
`Exchange` and call the same methods in the same order. An error on one of
them is an error on all.

With a `tolerance` above 0, values of matrices that moved by no more than
tolerance * RMS of the matrix since they were last sent are not sent. The
snapshot keeps the old value, so what is held back adds up until it is sent,
and nothing drifts: each published value is within that bound of the
trainer's. A version is then still exact and digested, it only lags.

Example:
  >>> publisher = Publisher(storage.open_store('memory://'), base_every=25)
  >>> publisher.publish(0, {'w': np.zeros(3, np.float32)}).kind
  'base'
"""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from swe17_jax.core import storage
from swe17_jax.weights import delta
from swe17_jax.weights import manifest as manifests
from swe17_jax.weights import staged as stages

# From this host's payload to those of all hosts, in their order. Called by all
# with the same keys; no key comes twice.
Exchange = Callable[[str, bytes], list[bytes]]

_BLOB_BYTES = 1 << 26
# Deltas since a base may add up to this many times its size: more would cost a
# late engine too much, and a base costs all others.
_CHAIN_BASES = 4
_UPLOADS = 4  # at a time, so also the number of blobs in memory


class PublishError(RuntimeError):
  """A version cannot be committed; what engines see has not changed."""


@dataclasses.dataclass(frozen=True)
class Published:
  """What one call of `publish` uploaded, on all hosts together.

  Attributes:
    version: the weight version.
    kind: 'base' or 'delta'.
    bytes: size of the blobs; 0 if the version was committed before.
    changed_fraction: share of elements in the blobs; 0.0 likewise.
    seconds: from the call to the commit.
  """

  version: int
  kind: str
  bytes: int
  changed_fraction: float
  seconds: float


def alone(key: str, payload: bytes) -> list[bytes]:
  """The `Exchange` of a single host."""
  del key
  return [payload]


class Publisher:
  """Writes versions; one per host and store at a time. Not thread-safe."""

  def __init__(
    self,
    store: storage.Store,
    *,
    base_every: int,
    tolerance: float = 0.0,
    host: int = 0,
    exchange: Exchange = alone,
    threads: int | None = None,
  ):
    """Starts without a snapshot: the first version becomes a base.

    Args:
      store: where manifests and blobs go.
      base_every: versions from one base to the next, >= 1. A late engine
        replays fewer deltas than this. A base comes earlier where deltas are
        nearly as large as bases.
      tolerance: in units of each matrix's RMS, >= 0; 0 sends all changes.
      host: index of this host among those of `exchange`.
      exchange: how the hosts of the trainer talk.
      threads: units to encode at a time; all cores by default.
    """
    if base_every < 1:
      raise ValueError(f'{base_every=} must be at least 1 (1 = bases only)')
    if not tolerance >= 0:
      raise ValueError(f'{tolerance=} must be >= 0, in units of the RMS')
    self._store = store
    self._base_every = base_every
    self._tolerance = tolerance
    self._host = host
    self._exchange = exchange
    self._rounds = 0
    self._threads = threads or os.cpu_count()
    self._created_by = f'{socket.gethostname()}:{os.getpid()}'
    self._snapshot: dict[str, np.ndarray] = {}
    self._version: int | None = None  # that the snapshot holds
    self._digest: str | None = None  # of that version
    self._deltas = 0  # committed since the last base
    self._base_bytes, self._delta_bytes = 0, 0

  @property
  def snapshot_version(self) -> int | None:
    """The version that the next delta would be made against."""
    return self._version

  def publish(
    self, version: int, tensors: Mapping[str, np.ndarray]
  ) -> Published:
    """Commits `tensors` as `version`, or finds that this is already so.

    Args:
      version: above every version committed so far, unless it is the same
        one with the same tensors.
      tensors: Hugging Face name -> host array; copied before return.

    Raises:
      PublishError: the version holds other tensors, or is out of order, or
        another publisher is at work, or another host failed.
      delta.DeltaError: names, shapes or dtypes changed since the snapshot.
      storage.StorageError: the store failed; call again.
    """
    started_at, begun = time.time(), time.monotonic()
    tensors = self._held_back(tensors)
    digest = self._agree_on_digest(tensors)
    kind = self._committed_kind(version, digest=digest)
    if kind is not None:
      self._advance(version, tensors, digest=digest)
      logging.info('weights: version %d is committed already', version)
      return Published(version, kind, 0, 0.0, time.monotonic() - begun)
    parent = self._on_first_host(lambda: self._choose_parent(version))
    kind = 'base' if parent is None else 'delta'
    snapshot = {} if parent is None else self._snapshot
    staged: list[stages.StagedDelta] = []

    def upload():
      blobs = []
      for blob, part in self._uploads(kind, version, snapshot, tensors):
        blobs.append(dataclasses.asdict(blob))
        staged.append(part)
      changed = sum(part.changed for part in staged)
      return blobs, changed, sum(array.size for array in tensors.values())

    shares = self._on_all_hosts(upload)
    blobs = [
      manifests.Blob(**{**blob, 'chunks': tuple(blob['chunks'])})
      for share in shares
      for blob in share[0]
    ]
    record = manifests.Manifest(
      version=version,
      parent_version=parent,
      kind=kind,
      codec=delta.FORMAT,
      blobs=tuple(blobs),
      parent_digest=None if parent is None else self._digest,
      tensors_digest=digest,
      created_by=self._created_by,
      started_at=started_at,
      committed_at=time.time(),
    )
    self._on_first_host(lambda: self._commit(record))
    self._move_snapshot(record, stages.merge(staged))
    published = Published(
      version=version,
      kind=kind,
      bytes=sum(blob.size for blob in blobs),
      changed_fraction=sum(s[1] for s in shares)
      / max(sum(s[2] for s in shares), 1),
      seconds=time.monotonic() - begun,
    )
    logging.info('weights: committed %s', published)
    return published

  def resume(self, version: int, tensors: Mapping[str, np.ndarray]) -> bool:
    """Restores the snapshot after a restart, so that deltas go on.

    With a tolerance the committed weights are not the trainer's, so there is
    no snapshot to restore: the next version will be a base.

    Returns:
      Whether `version` had been committed. If not, nothing happens and the
      next version will be a base.

    Raises:
      PublishError: it was committed with other tensors.
    """
    if self._tolerance:
      name = manifests.name(version)
      return self._on_first_host(lambda: self._store.exists(name))
    digest = self._agree_on_digest(tensors)
    kind = self._committed_kind(version, digest=digest)
    if kind is not None:
      self._advance(version, tensors, digest=digest)
    return kind is not None

  def _held_back(
    self, tensors: Mapping[str, np.ndarray]
  ) -> Mapping[str, np.ndarray]:
    """Puts the snapshot's value wherever the change is within tolerance."""
    if not (self._tolerance and self._snapshot):
      return tensors
    return {
      name: within_tolerance(self._snapshot[name], array, self._tolerance)
      if name in self._snapshot
      else array
      for name, array in tensors.items()
    }

  def _agree_on_digest(self, tensors: Mapping[str, np.ndarray]) -> str:
    return delta.combine(self._on_all_hosts(lambda: delta.digest(tensors)))

  def _on_all_hosts(self, work: Callable[[], Any]) -> list[Any]:
    """Does this host's share; returns the (JSON) results of all hosts."""
    failure, mine = None, {}
    try:
      mine = {'value': work()}
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
      # The other hosts must hear of it.
      failure, mine = error, {'error': f'{type(error).__name__}: {error}'}
    self._rounds += 1
    key = f'publisher/{self._rounds}'
    shares = self._exchange(key, json.dumps(mine).encode())
    if failure is not None:
      raise failure
    shares = [json.loads(share) for share in shares]
    for host, share in enumerate(shares):
      if 'error' in share:
        raise PublishError(
          f'host {host} of the trainer failed, so nothing was committed: '
          f'{share["error"]}'
        )
    return [share['value'] for share in shares]

  def _on_first_host(self, work: Callable[[], Any]) -> Any:
    return self._on_all_hosts(work if self._host == 0 else lambda: None)[0]

  def _committed_kind(self, version: int, *, digest: str) -> str | None:
    return self._on_first_host(lambda: self._find(version, digest=digest))

  def _find(self, version: int, *, digest: str) -> str | None:
    try:
      committed = manifests.read(self._store, version=version)
    except storage.ObjectNotFound:
      return None
    if committed.tensors_digest != digest:
      raise PublishError(
        f'version {version} was committed by {committed.created_by} with '
        f'tensors {committed.tensors_digest}, not {digest}; resume from the '
        'checkpoint of that step or publish into an empty store'
      )
    return committed.kind

  def _choose_parent(self, version: int) -> int | None:
    """Returns the parent of the next delta, or None to make a base."""
    after = -1 if self._version is None else self._version - 1
    newest = max(manifests.versions(self._store, after=after), default=-1)
    if newest >= version:
      raise PublishError(
        f'version {version} comes after {newest}, which is committed; '
        'versions must grow: resume from a later checkpoint'
      )
    if self._version is None:
      return None
    if newest > self._version:
      raise PublishError(
        f'version {newest} was committed after our {self._version}, but not '
        'by us; stop the other publisher, or start a new one here, which '
        'begins with a base'
      )
    parent_is_gone = newest < self._version
    too_many = self._deltas + 1 >= self._base_every
    too_large = self._delta_bytes > _CHAIN_BASES * self._base_bytes
    if parent_is_gone or too_many or too_large:
      return None
    return self._version

  def _uploads(
    self,
    kind: str,
    version: int,
    snapshot: Mapping[str, np.ndarray],
    tensors: Mapping[str, np.ndarray],
  ) -> Iterator[tuple[manifests.Blob, stages.StagedDelta]]:
    """Uploads this host's blobs, and yields each as engines will see it."""
    with futures.ThreadPoolExecutor(_UPLOADS) as pool:
      writing: list[futures.Future] = []
      for data in delta.encode_blobs(
        snapshot, tensors, blob_bytes=_BLOB_BYTES, threads=self._threads
      ):
        if len(writing) >= _UPLOADS:
          writing.pop(0).result()
        blob = manifests.make_blob(kind, version=version, data=data)
        writing.append(pool.submit(self._store.write_once, blob.name, data))
        yield blob, delta.decode(data, snapshot, threads=self._threads)
      for write in writing:
        write.result()

  def _commit(self, record: manifests.Manifest) -> None:
    try:
      self._store.write_once(manifests.name(record.version), record.to_bytes())
    except storage.ObjectExists:
      # Another publisher was faster; with the same tensors that is no harm.
      digest = record.tensors_digest
      if self._find(record.version, digest=digest) is None:
        raise

  def _move_snapshot(
    self, record: manifests.Manifest, staged: stages.StagedDelta
  ) -> None:
    size = sum(blob.size for blob in record.blobs)
    if record.kind == 'base':
      self._snapshot = staged.tensors()
      self._deltas, self._base_bytes, self._delta_bytes = 0, size, 0
    else:
      staged.apply(self._snapshot)
      self._deltas, self._delta_bytes = (
        self._deltas + 1,
        self._delta_bytes + size,
      )
    self._version, self._digest = record.version, record.tensors_digest

  def _advance(
    self, version: int, tensors: Mapping[str, np.ndarray], *, digest: str
  ) -> None:
    """Takes a committed version as the snapshot, and measures its chain."""
    self._deltas, self._delta_bytes, self._base_bytes = self._on_first_host(
      lambda: self._chain_length(version)
    )
    self._snapshot, self._version = _copy(tensors), version
    self._digest = digest

  def _chain_length(self, version: int) -> tuple[int, int, int]:
    """Returns the number of deltas up to a version, their bytes, the base's."""
    deltas, size = 0, 0
    try:
      while deltas < self._base_every:
        link = manifests.read(self._store, version=version)
        link_bytes = sum(blob.size for blob in link.blobs)
        if link.kind == 'base':
          return deltas, size, link_bytes
        deltas, size, version = (
          deltas + 1,
          size + link_bytes,
          link.parent_version,
        )
    except storage.ObjectNotFound:
      pass  # no base is left: make one
    return self._base_every, size, 0


def within_tolerance(
  old: np.ndarray, new: np.ndarray, tolerance: float
) -> np.ndarray:
  """Returns `new`, with the old value wherever that is close enough.

  Args:
    old: what was published.
    new: of the same shape and dtype.
    tolerance: the largest |new - old| to hold back, in units of RMS(new).

  Returns:
    `new` itself unless it is a floating-point matrix (or a stack of them) of
    16 bits or more: vectors are few, and codes have no size of their own.
  """
  if new.ndim < 2 or new.dtype.kind not in 'fV' or new.itemsize < 2:
    return new
  if (old.shape, old.dtype) != (new.shape, new.dtype):
    return new  # `delta.encode` will refuse it
  values = new.astype(np.float32)
  bound = tolerance * np.sqrt(np.mean(np.square(values), dtype=np.float64))
  if not np.isfinite(bound):
    return new
  moved = np.abs(values - old.astype(np.float32))
  return np.where(moved <= bound, old, new)


def _copy(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name: np.array(array, order='C') for name, array in tensors.items()}
