"""Reads versions back from a store: one version, or a chain into memory."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from swe17_jax.weights import delta
from swe17_jax.weights import manifest as manifests
from swe17_jax.weights import staged as stages

Fetch = Callable[[manifests.Blob], bytes]


def check_codec(chain: Sequence[manifests.Manifest]) -> None:
  """Raises ManifestError unless this release reads all of a chain."""
  for link in chain:
    if link.codec != delta.FORMAT:
      raise manifests.ManifestError(
        f'version {link.version} has codec {link.codec!r}; this release reads '
        f'{delta.FORMAT}: run the same release on trainer and engines'
      )


def stage(
  fetch: Fetch,
  link: manifests.Manifest,
  parent: Mapping[str, np.ndarray],
  *,
  threads: int,
) -> stages.StagedDelta:
  """Fetches, checks and decodes all blobs of one version."""
  parts = []
  for blob in link.blobs:
    data = fetch(blob)
    blob.check(data)
    parts.append(delta.decode(data, parent, threads=threads))
  if any(part.is_base != (link.kind == 'base') for part in parts):
    raise manifests.ManifestError(
      f'version {link.version} is a {link.kind}, but its blobs are not; '
      'publish a new base'
    )
  return stages.merge(parts)


def tensors(
  fetch: Fetch,
  chain: Sequence[manifests.Manifest],
  *,
  threads: int,
) -> dict[str, np.ndarray]:
  """Builds the last version of a chain in host memory.

  Args:
    fetch: returns the bytes of a blob.
    chain: a base and the deltas after it.
    threads: groups to decode at a time.

  Raises:
    DeltaError: a blob is damaged, or the result has another digest.
  """
  base, *deltas = chain
  found = stage(fetch, base, {}, threads=threads).tensors()
  for link in deltas:
    stage(fetch, link, found, threads=threads).apply(found)
  digest, wanted = delta.digest(found), chain[-1].tensors_digest
  if digest != wanted:
    raise stages.DeltaError(
      f'version {chain[-1].version} rebuilt from base {base.version} has '
      f'digest {digest}, its manifest says {wanted}; publish a new base'
    )
  return found
