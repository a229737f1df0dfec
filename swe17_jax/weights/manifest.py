"""The chain of weight versions: which blobs make which version.

A version exists once its manifest does: blobs are uploaded first, and the
appearance of `weights/manifest/{version:08d}.json` is the commit. A base
stands alone; a delta turns exactly `parent_version` into `version`. Versions
are trainer steps, so they grow but need not be consecutive.

Format of a manifest (UTF-8 JSON, all fields required, no others):

    format          "swe17.manifest.2"
    version         int, 0 <= version < 10**8
    parent_version  int < version; null for a base
    kind            "base" | "delta"
    codec           format of the blobs, e.g. "swe17.delta.2"
    blobs           [{"name": str, "size": bytes, "digest": xxh3-128 hex,
                      "chunk_bytes": int, "chunks": [xxh3-128 hex]}]
    parent_digest   `delta.digest` of the weights at parent_version; null for
                    a base
    tensors_digest  `delta.digest` of the weights at this version
    created_by      who wrote it, for people
    started_at      when the weights were handed to the publisher, and when
    committed_at    it wrote this; seconds since 1970 by the publisher's
                    clock, for people and latency plots: nothing is decided
                    by them, so clocks may be wrong

A version has one blob or more, in any order; together they hold each changed
tensor once. Blobs are named `weights/{kind}/{version:08d}-{digest}`: what was
uploaded by a publisher that died before its commit is never mistaken for
anything else. Chunks are what hosts pass to each other: all of chunk_bytes
but the last, each with its own digest, so that none is passed on damaged.

`plan` is pure; it decides what an engine group has to install. Example:

    have 3, manifests 4 (delta of 3) and 5 (delta of 4)  ->  4, 5
    have 3, manifests 5 (base) and 6 (delta of 5)        ->  5, 6
    have 3, manifest 5 (delta of 4)                      ->  nothing yet
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from swe17_jax.core import storage

FORMAT = 'swe17.manifest.2'
PREFIX = 'weights/manifest/'

CHUNK_BYTES = 1 << 24
_KINDS = ('base', 'delta')
_VERSIONS = 10**8  # names have eight digits, so that they sort like versions
_DIGEST = re.compile(r'[0-9a-f]{32}')
_NAME = re.compile(re.escape(PREFIX) + r'(\d{8})\.json')


class ManifestError(ValueError):
  """A manifest, a blob of it, or the chain breaks a rule."""


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ManifestError(message)


@dataclasses.dataclass(frozen=True)
class Blob:
  """One object of a version."""

  name: str
  size: int  # bytes
  digest: str  # xxh3-128 of its bytes, hex
  chunk_bytes: int  # of all chunks but the last, which may be shorter
  chunks: tuple[str, ...]  # xxh3-128 of each

  def __post_init__(self):
    _require(
      isinstance(self.name, str) and bool(self.name),
      f'blob name={self.name!r} must be a non-empty string',
    )
    _require(
      type(self.size) is int and self.size >= 0,
      f'blob {self.name}: size={self.size!r} must be an int >= 0',
    )
    _require_digest(f'blob {self.name}: digest', self.digest)
    _require(
      type(self.chunk_bytes) is int and self.chunk_bytes > 0,
      f'blob {self.name}: chunk_bytes={self.chunk_bytes!r} must be an int > 0',
    )
    count = -(-self.size // self.chunk_bytes)
    _require(
      len(self.chunks) == count,
      f'blob {self.name} of {self.size} bytes must have {count} chunks of '
      f'{self.chunk_bytes}, not {len(self.chunks)}',
    )
    for i, chunk in enumerate(self.chunks):
      _require_digest(f'blob {self.name}: chunks[{i}]', chunk)

  def span(self, chunk: int) -> tuple[int, int]:
    """The first byte of a chunk, and the one behind its last."""
    start = chunk * self.chunk_bytes
    return start, min(start + self.chunk_bytes, self.size)

  def check_chunk(self, chunk: int, data: bytes) -> None:
    """Raises ManifestError unless `data` is this chunk as published."""
    start, stop = self.span(chunk)
    found = xxhash.xxh3_128_hexdigest(data)
    _require(
      (len(data), found) == (stop - start, self.chunks[chunk]),
      f'bytes {start} to {stop} of blob {self.name} came as {len(data)} bytes '
      f'with digest {found}; its manifest says {self.chunks[chunk]}; fetch '
      'them again, or publish a new base if the object itself is damaged',
    )

  def check(self, data: bytes) -> None:
    """Raises ManifestError unless `data` is what was published."""
    found = xxhash.xxh3_128_hexdigest(data)
    _require(
      (len(data), found) == (self.size, self.digest),
      f'blob {self.name} has {len(data)} bytes with digest {found}; its '
      f'manifest says {self.size} and {self.digest}; fetch it again, or '
      'publish a new base if the object itself is damaged',
    )


@dataclasses.dataclass(frozen=True)
class Manifest:
  """One version; see Format in the module docstring."""

  version: int
  parent_version: int | None
  kind: str
  codec: str
  blobs: tuple[Blob, ...]
  parent_digest: str | None
  tensors_digest: str
  created_by: str
  started_at: float
  committed_at: float
  format: str = FORMAT

  def __post_init__(self):
    _require(
      self.format == FORMAT,
      f'manifest has format={self.format!r}, this code reads {FORMAT}; run '
      'the same release on the trainer and on the engines',
    )
    _require(
      type(self.version) is int and 0 <= self.version < _VERSIONS,
      f'version={self.version!r} must be an int in [0, {_VERSIONS})',
    )
    where = f'manifest of version {self.version}'
    _require(
      self.kind in _KINDS, f'{where}: kind={self.kind!r} not in {_KINDS}'
    )
    if self.kind == 'base':
      _require(
        self.parent_version is None,
        f'{where}: a base has no parent, not {self.parent_version!r}',
      )
      _require(
        self.parent_digest is None,
        f'{where}: a base has no parent_digest, not {self.parent_digest!r}',
      )
    else:
      _require(
        type(self.parent_version) is int
        and 0 <= self.parent_version < self.version,
        f'{where}: parent_version={self.parent_version!r} of a delta must be '
        'an int in [0, version)',
      )
      _require_digest(f'{where}: parent_digest', self.parent_digest)
    _require(bool(self.blobs), f'{where}: blobs must not be empty')
    _require_digest(f'{where}: tensors_digest', self.tensors_digest)
    for field in ('codec', 'created_by'):
      value = getattr(self, field)
      _require(isinstance(value, str), f'{where}: {field}={value!r} is no text')
    for field in ('started_at', 'committed_at'):
      value = getattr(self, field)
      _require(
        type(value) in (int, float) and value >= 0,
        f'{where}: {field}={value!r} must be seconds >= 0',
      )

  def to_bytes(self) -> bytes:
    """The manifest as JSON."""
    return json.dumps(dataclasses.asdict(self), indent=1).encode()

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Manifest':
    """Parses and checks a manifest. Raises ManifestError."""
    try:
      fields = json.loads(data)
    except ValueError as error:
      raise ManifestError(f'manifest is not JSON: {error}') from error
    _check_fields(cls, fields)
    _require(
      isinstance(fields['blobs'], list),
      f'manifest: blobs={fields["blobs"]!r} must be a list',
    )
    for blob in fields['blobs']:
      _check_fields(Blob, blob)
      _require(
        isinstance(blob['chunks'], list),
        f'blob {blob["name"]}: chunks={blob["chunks"]!r} must be a list',
      )
    blobs = tuple(
      Blob(**{**blob, 'chunks': tuple(blob['chunks'])})
      for blob in fields['blobs']
    )
    return cls(**{**fields, 'blobs': blobs})


def _require_digest(what: str, value: Any) -> None:
  _require(
    isinstance(value, str) and bool(_DIGEST.fullmatch(value)),
    f'{what}={value!r} must be 32 lower-case hexadecimal digits',
  )


def _check_fields(record: type, fields: Any) -> None:
  _require(
    isinstance(fields, dict),
    f'{record.__name__}={fields!r} must be a JSON object',
  )
  wanted = {field.name for field in dataclasses.fields(record)}
  _require(
    fields.keys() == wanted,
    f'{record.__name__} lacks {sorted(wanted - fields.keys())} and has '
    f'unknown {sorted(fields.keys() - wanted)}',
  )


def make_blob(
  kind: str, *, version: int, data: bytes, chunk_bytes: int = CHUNK_BYTES
) -> Blob:
  """Names `data` as a blob of a version; does not write it."""
  digest = xxhash.xxh3_128_hexdigest(data)
  view = memoryview(data)
  return Blob(
    name=f'weights/{kind}/{version:08d}-{digest}',
    size=len(data),
    digest=digest,
    chunk_bytes=chunk_bytes,
    chunks=tuple(
      xxhash.xxh3_128_hexdigest(view[start : start + chunk_bytes])
      for start in range(0, len(data), chunk_bytes)
    ),
  )


def name(version: int) -> str:
  """The object that commits a version."""
  return f'{PREFIX}{version:08d}.json'


def read(store: storage.Store, *, version: int) -> Manifest:
  """Reads one manifest. Raises ObjectNotFound if it is not committed."""
  manifest = Manifest.from_bytes(store.read(name(version)))
  _require(
    manifest.version == version,
    f'{name(version)} says version {manifest.version}; it was copied by hand: '
    'delete it',
  )
  return manifest


def versions(store: storage.Store, *, after: int = -1) -> list[int]:
  """The committed versions above `after`, ascending."""
  start = name(after) if after >= 0 else ''
  found = [_NAME.fullmatch(n) for n in store.list(PREFIX, start_after=start)]
  return sorted(int(match[1]) for match in found if match)


def plan(
  have: int | None, available: Mapping[int, Manifest]
) -> tuple[Manifest, ...]:
  """Decides what to install, in order, to reach the newest version possible.

  Deltas from `have` are preferred; where they do not lead there, a base
  replaces everything. A missing version stops its successors until the next
  base.

  Args:
    have: version in place; None if there is none that can be trusted.
    available: the committed manifests by version, or those that matter.

  Returns:
    Manifests to install; only the first may be a base. Empty if nothing
    newer than `have` can be reached.

  Raises:
    ManifestError: a delta that is needed skips a version, which means that
      two publishers wrote into one store.
  """
  known = sorted(available.keys() | ({have} - {None}))
  for target in reversed(known):
    if have is not None and target <= have:
      break
    chain = _chain(target, have=have, available=available, known=known)
    if chain:
      return chain
  return ()


def _chain(
  target: int,
  *,
  have: int | None,
  available: Mapping[int, Manifest],
  known: Iterable[int],
) -> tuple[Manifest, ...]:
  """Walks from `target` back to `have` or a base; empty if neither is met."""
  chain = []
  version = target
  while version != have:
    if version not in available:
      return ()
    manifest = available[version]
    chain.append(manifest)
    if manifest.kind == 'base':
      break
    between = [v for v in known if manifest.parent_version < v < version]
    parent = available.get(manifest.parent_version)
    _require(
      parent is None or parent.tensors_digest == manifest.parent_digest,
      f'version {version} was made against weights with digest '
      f'{manifest.parent_digest}, but version {manifest.parent_version} has '
      'another: two publishers wrote here. Stop all but one and let it publish '
      'a new base',
    )
    _require(
      not between,
      f'version {version} is a delta of {manifest.parent_version}, but '
      f'{between} were published in between: wrong parent. Stop all but one '
      'publisher and let it publish a new base',
    )
    version = manifest.parent_version
  return tuple(reversed(chain))
