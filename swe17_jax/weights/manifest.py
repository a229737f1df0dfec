"""The chain of weight versions: which blobs make which version.

A version exists once its manifest does: blobs are uploaded first, and the
appearance of `weights/manifest/{version:08d}.json` is the commit. A base
stands alone; a delta turns exactly `parent_version` into `version`. Versions
are trainer steps, so they grow but need not be consecutive.

Format of a manifest (UTF-8 JSON, all fields required, no others):

    format          "swe17.manifest.1"
    version         int, 0 <= version < 10**8
    parent_version  int < version; null for a base
    kind            "base" | "delta"
    codec           format of the blobs, e.g. "swe17.delta.1"
    blobs           [{"name": str, "size": bytes, "digest": xxh3-128 hex}]
    tensors_digest  `delta.digest` of the weights at this version
    created_by      who wrote it, for people

Blobs are named `weights/{kind}/{version:08d}-{digest}`: what was uploaded by
a publisher that died before its commit is never mistaken for anything else.

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

FORMAT = 'swe17.manifest.1'
PREFIX = 'weights/manifest/'

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
  tensors_digest: str
  created_by: str
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
    else:
      _require(
        type(self.parent_version) is int
        and 0 <= self.parent_version < self.version,
        f'{where}: parent_version={self.parent_version!r} of a delta must be '
        'an int in [0, version)',
      )
    _require(bool(self.blobs), f'{where}: blobs must not be empty')
    _require_digest(f'{where}: tensors_digest', self.tensors_digest)
    for field in ('codec', 'created_by'):
      value = getattr(self, field)
      _require(isinstance(value, str), f'{where}: {field}={value!r} is no text')

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
    blobs = tuple(Blob(**blob) for blob in fields['blobs'])
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


def make_blob(kind: str, *, version: int, data: bytes) -> Blob:
  """Names `data` as the blob of a version; does not write it."""
  digest = xxhash.xxh3_128_hexdigest(data)
  name = f'weights/{kind}/{version:08d}-{digest}'
  return Blob(name=name, size=len(data), digest=digest)


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
    _require(
      not between,
      f'version {version} is a delta of {manifest.parent_version}, but '
      f'{between} were published in between: wrong parent. Stop all but one '
      'publisher and let it publish a new base',
    )
    version = manifest.parent_version
  return tuple(reversed(chain))
