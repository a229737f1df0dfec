"""Trainer side: commits versions of the weights to a store.

A version is a base or a delta against the snapshot, the publisher's own copy
of what it last committed. Order is everything: blobs, then the manifest, then
the snapshot. Killed anywhere in between, the publisher leaves a version that
is either whole or invisible, and publishing it again continues. The snapshot
follows what engines can read, never what one was hoped to receive (slime
#2104: a snapshot that ran ahead made the drift permanent).

Example:
  >>> publisher = Publisher(storage.open_store('memory://'), base_every=25)
  >>> publisher.publish(0, {'w': np.zeros(3, np.float32)}).kind
  'base'
"""

import dataclasses
import os
import socket
from collections.abc import Mapping

import numpy as np
from absl import logging

from swe17_jax.core import storage
from swe17_jax.weights import delta
from swe17_jax.weights import manifest as manifests


class PublishError(RuntimeError):
  """A version cannot be committed; what engines see has not changed."""


@dataclasses.dataclass(frozen=True)
class Published:
  """What one call of `publish` uploaded.

  Attributes:
    version: the weight version.
    kind: 'base' or 'delta'.
    bytes: size of the blob; 0 if the version was committed before.
    changed_fraction: share of elements in the blob; 0.0 likewise.
  """

  version: int
  kind: str
  bytes: int
  changed_fraction: float


class Publisher:
  """Writes versions; one publisher per store at a time. Not thread-safe."""

  def __init__(self, store: storage.Store, *, base_every: int):
    """Starts without a snapshot: the first version becomes a base.

    Args:
      store: where manifests and blobs go.
      base_every: versions from one base to the next, >= 1. A late engine
        replays fewer deltas than this.
    """
    if base_every < 1:
      raise ValueError(f'{base_every=} must be at least 1 (1 = bases only)')
    self._store = store
    self._base_every = base_every
    self._created_by = f'{socket.gethostname()}:{os.getpid()}'
    self._snapshot: dict[str, np.ndarray] = {}
    self._version: int | None = None  # that the snapshot holds
    self._deltas = 0  # committed since the last base

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
        another publisher is at work.
      delta.DeltaError: names, shapes or dtypes changed since the snapshot.
      storage.StorageError: the store failed; call again.
    """
    digest = delta.digest(tensors)
    kind = self._committed_kind(version, digest=digest)
    if kind is not None:
      self._advance(version, tensors)
      logging.info('weights: version %d is committed already', version)
      return Published(version, kind, bytes=0, changed_fraction=0.0)
    parent = self._choose_parent(version)
    snapshot = {} if parent is None else self._snapshot
    blob = delta.encode(snapshot, tensors)
    # What engines will do, before they see it.
    staged = delta.decode(blob, snapshot)
    kind = 'base' if parent is None else 'delta'
    self._commit(kind, version, parent=parent, blob=blob, digest=digest)
    if parent is None:
      self._snapshot, self._deltas = staged.tensors(), 0
    else:
      staged.apply(self._snapshot)
      self._deltas += 1
    self._version = version
    fraction = staged.changed_fraction
    logging.info(
      'weights: committed version %d, %s of %d bytes, %.3f%% changed',
      *(version, kind, len(blob), 100 * fraction),
    )
    return Published(version, kind, len(blob), changed_fraction=fraction)

  def resume(self, version: int, tensors: Mapping[str, np.ndarray]) -> bool:
    """Restores the snapshot after a restart, so that deltas go on.

    Returns:
      Whether `version` had been committed. If not, nothing happens and the
      next version will be a base.

    Raises:
      PublishError: it was committed with other tensors.
    """
    kind = self._committed_kind(version, digest=delta.digest(tensors))
    if kind is not None:
      self._advance(version, tensors)
    return kind is not None

  def _committed_kind(self, version: int, *, digest: str) -> str | None:
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
    if parent_is_gone or self._deltas + 1 >= self._base_every:
      return None
    return self._version

  def _commit(
    self,
    kind: str,
    version: int,
    *,
    parent: int | None,
    blob: bytes,
    digest: str,
  ) -> None:
    entry = manifests.make_blob(kind, version=version, data=blob)
    record = manifests.Manifest(
      version=version,
      parent_version=parent,
      kind=kind,
      codec=delta.FORMAT,
      blobs=(entry,),
      tensors_digest=digest,
      created_by=self._created_by,
    )
    self._store.write_once(entry.name, blob)
    try:
      self._store.write_once(manifests.name(version), record.to_bytes())
    except storage.ObjectExists:
      # Another publisher was faster; with the same tensors that is no harm.
      if self._committed_kind(version, digest=digest) is None:
        raise

  def _advance(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
    """Takes a committed version as the snapshot, and counts its deltas."""
    deltas = 0
    committed = manifests.read(self._store, version=version)
    try:
      while committed.kind == 'delta' and deltas < self._base_every:
        deltas += 1
        committed = manifests.read(
          self._store, version=committed.parent_version
        )
    except storage.ObjectNotFound:
      deltas = self._base_every  # no base is left: make one
    self._snapshot, self._deltas = _copy(tensors), deltas
    self._version = version


def _copy(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name: np.array(array, order='C') for name, array in tensors.items()}
