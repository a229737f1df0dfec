"""Objects behind names: a bucket, a local folder, or this process's memory.

Everything that leaves a process goes through a `Store`: weights, manifests
and rollout records. An object appears whole or not at all and never changes
afterwards, so a small manifest can commit any number of large blobs.

`write_once` is create-only, also between processes and machines: of two
writers of one name the first wins, the second sees `ObjectExists`. Writing
the same bytes again is no error, so a writer that was killed simply repeats
what it was doing.

Names are `/`-separated, as in a bucket; no part is empty or begins with a
dot (a `LocalStore` keeps unfinished files under `.tmp`).

Example:
  >>> store = open_store('memory://')
  >>> store.write_once('weights/a', b'1')
  >>> store.list('weights/')
  ['weights/a']
"""

import contextlib
import errno
import os
import pathlib
import threading
import uuid
from collections.abc import Iterator
from typing import Protocol

from absl import logging

# Google Cloud Storage. Requests are repeated on a broken connection and on
# the statuses that its documentation calls retryable, with a doubling delay.
GCS_RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
GCS_RETRY_INITIAL_S = 0.5
GCS_RETRY_MAXIMUM_S = 16.0
GCS_RETRY_TIMEOUT_S = 90.0
GCS_REQUEST_TIMEOUT_S = 60.0  # without one byte of progress
GCS_READ_ATTEMPTS = 3  # downloads whose checksum may be wrong before we stop

_LOCAL_REMEDIES = {
  errno.ENOSPC: 'free disk space or choose another store',
  errno.EDQUOT: 'raise the quota or choose another store',
  errno.EFBIG: 'raise the file size limit (ulimit -f)',
  errno.EACCES: 'give this user read and write permission',
  errno.EPERM: 'give this user permission; the file system must allow links',
  errno.EROFS: 'mount the file system writable or choose another store',
  errno.ENOTDIR: 'a part of the path is an object itself; rename one of them',
}


class StorageError(RuntimeError):
  """The store failed; the message names the object, bytes and remedy."""


class ObjectNotFound(StorageError):
  """No object of that name has been committed."""


class ObjectExists(StorageError):
  """An object of that name exists and holds other bytes."""


class Store(Protocol):
  """Named, write-once byte strings. All methods are thread-safe."""

  def read(self, name: str) -> bytes:
    """Returns the whole object. Raises ObjectNotFound."""

  def exists(self, name: str) -> bool:
    """Whether the object has been committed."""

  def write_once(self, name: str, data: bytes) -> None:
    """Creates the object. Raises ObjectExists if it holds other bytes."""

  def list(self, prefix: str, start_after: str = '') -> list[str]:
    """Sorted names that begin with `prefix` and come after `start_after`."""

  def delete(self, name: str) -> None:
    """Removes the object; a missing one is no error."""


def open_store(url: str) -> Store:
  """Opens a store.

  Args:
    url: `gs://bucket/prefix`, `memory://`, `file:///folder` or a plain path.

  Raises:
    ValueError: the scheme is none of these.
    StorageError: the client library or its credentials are missing.
  """
  scheme, separator, rest = url.partition('://')
  if not separator:
    return LocalStore(url)
  if scheme == 'file' and rest.startswith('/'):
    return LocalStore(rest)
  if scheme == 'memory' and not rest:
    return MemoryStore()
  if scheme == 'gs' and rest.strip('/'):
    bucket, _, prefix = rest.strip('/').partition('/')
    return GcsStore(bucket, prefix=prefix)
  raise ValueError(
    f'{url=} must be gs://bucket/prefix, file:///absolute/path, memory:// or '
    'a plain path'
  )


def _check_name(name: str) -> None:
  if any(part[:1] in ('', '.') for part in name.split('/')) or '\0' in name:
    raise ValueError(
      f'object {name=} must be parts joined by "/", none of them empty or '
      'beginning with a dot'
    )


def _check_prefix(prefix: str) -> None:
  if prefix:
    _check_name(prefix + 'x' if prefix.endswith('/') else prefix)


def _other_content(where: str, size: int) -> ObjectExists:
  return ObjectExists(
    f'{where} exists with other content than the {size} bytes to write; '
    'objects are written once: use a new name, or stop the other writer'
  )


class MemoryStore:
  """A store that lives and dies with this process."""

  def __init__(self):
    self._lock = threading.Lock()
    self._objects: dict[str, bytes] = {}

  def read(self, name: str) -> bytes:
    _check_name(name)
    with self._lock:
      if name not in self._objects:
        raise ObjectNotFound(f'memory://{name} does not exist')
      return self._objects[name]

  def exists(self, name: str) -> bool:
    _check_name(name)
    with self._lock:
      return name in self._objects

  def write_once(self, name: str, data: bytes) -> None:
    _check_name(name)
    with self._lock:
      if self._objects.setdefault(name, bytes(data)) != data:
        raise _other_content(f'memory://{name}', len(data))

  def list(self, prefix: str, start_after: str = '') -> list[str]:
    _check_prefix(prefix)
    with self._lock:
      names = list(self._objects)
    return sorted(n for n in names if n.startswith(prefix) and n > start_after)

  def delete(self, name: str) -> None:
    _check_name(name)
    with self._lock:
      self._objects.pop(name, None)


class LocalStore:
  """A store in a folder, shared by all processes that can see it.

  An object is written and synced under `.tmp` and then hard-linked to its
  name, which fails if the name is taken. A killed writer leaves a file under
  `.tmp` at most; delete that folder when no writer runs.
  """

  def __init__(self, root: str):
    self._root = pathlib.Path(root).absolute()

  def read(self, name: str) -> bytes:
    path = self._path(name)
    try:
      return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
      raise ObjectNotFound(f'{path} does not exist') from None
    except OSError as error:
      raise _local_error(f'cannot read {path}', error) from error

  def exists(self, name: str) -> bool:
    path = self._path(name)
    try:
      return path.is_file()
    except OSError as error:
      raise _local_error(f'cannot look up {path}', error) from error

  def write_once(self, name: str, data: bytes) -> None:
    path = self._path(name)
    temporary = self._root / '.tmp' / uuid.uuid4().hex
    try:
      _make_folder(temporary.parent)
      _make_folder(path.parent)
      try:
        with temporary.open('xb') as file:
          file.write(data)
          file.flush()
          os.fsync(file.fileno())
        os.link(temporary, path)
      finally:
        temporary.unlink(missing_ok=True)
      _sync_folder(path.parent)
    except FileExistsError:
      if not path.is_file() or self.read(name) != data:
        raise _other_content(str(path), len(data)) from None
    except OSError as error:
      action = f'cannot write {len(data)} bytes to {path}'
      raise _local_error(action, error) from error

  def list(self, prefix: str, start_after: str = '') -> list[str]:
    _check_prefix(prefix)
    names = []
    try:
      for folder, folders, files in os.walk(
        self._root / prefix.rpartition('/')[0], onerror=_ignore_missing
      ):
        folders[:] = [f for f in folders if not f.startswith('.')]
        parent = pathlib.Path(folder).relative_to(self._root)
        names += [(parent / f).as_posix() for f in files if f[0] != '.']
    except OSError as error:
      raise _local_error(f'cannot list {self._root}', error) from error
    return sorted(n for n in names if n.startswith(prefix) and n > start_after)

  def delete(self, name: str) -> None:
    path = self._path(name)
    try:
      path.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
      pass
    except OSError as error:
      raise _local_error(f'cannot delete {path}', error) from error

  def _path(self, name: str) -> pathlib.Path:
    _check_name(name)
    return self._root / name


def _local_error(action: str, error: OSError) -> StorageError:
  remedy = _LOCAL_REMEDIES.get(error.errno, 'check the path and its device')
  return StorageError(f'{action}: {error.strerror}; {remedy}')


def _ignore_missing(error: OSError) -> None:
  """A folder that is not there holds no objects; other errors count."""
  if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
    raise error


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes the folder's entries survive a crash of the machine."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _make_folder(folder: pathlib.Path) -> None:
  if folder.is_dir():
    return
  _make_folder(folder.parent)
  try:
    folder.mkdir()
  except FileExistsError:
    if not folder.is_dir():
      raise NotADirectoryError(
        errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)
      ) from None
  _sync_folder(folder.parent)


class GcsStore:
  """A store in a Google Cloud Storage bucket.

  Uses the emulator at STORAGE_EMULATOR_HOST where that is set. Attribute
  `retries` counts the requests that had to be repeated.
  """

  def __init__(self, bucket: str, *, prefix: str = ''):
    """Opens `gs://{bucket}/{prefix}` with the default credentials."""
    try:
      from google.api_core import exceptions, retry
      from google.auth import credentials
      from google.auth import exceptions as auth_exceptions
      from google.cloud import storage
      from google.cloud.storage import exceptions as storage_exceptions
      from requests import exceptions as http_exceptions
    except ImportError as error:
      raise StorageError(
        f'gs://{bucket} needs google-cloud-storage ({error}); '
        "pip install 'swe17_jax[gcs]'"
      ) from error
    _check_prefix(prefix)
    self._url = f'gs://{bucket}/'
    self._prefix = f'{prefix}/' if prefix else ''
    self._not_found = exceptions.NotFound
    self._taken = exceptions.PreconditionFailed
    self._corrupt = storage_exceptions.DataCorruption
    self._invalid = storage_exceptions.InvalidResponse
    self._unreachable = (
      auth_exceptions.TransportError,
      http_exceptions.ConnectionError,
      http_exceptions.ChunkedEncodingError,
      http_exceptions.Timeout,
      ConnectionError,
    )
    self._failures = self._unreachable + (
      exceptions.GoogleAPIError,
      auth_exceptions.GoogleAuthError,
      http_exceptions.RequestException,
      self._corrupt,
      self._invalid,
    )
    self.retries = 0
    self._options = dict(
      timeout=GCS_REQUEST_TIMEOUT_S,
      retry=retry.Retry(
        predicate=self._transient,
        initial=GCS_RETRY_INITIAL_S,
        maximum=GCS_RETRY_MAXIMUM_S,
        timeout=GCS_RETRY_TIMEOUT_S,
        on_error=self._count_retry,
      ),
    )
    with self._named_errors('open', ''):
      if 'STORAGE_EMULATOR_HOST' in os.environ:
        anonymous = credentials.AnonymousCredentials()
        client = storage.Client(project='emulator', credentials=anonymous)
      else:
        client = storage.Client()
    self._bucket = client.bucket(bucket)

  def read(self, name: str) -> bytes:
    with self._named_errors('read', name):
      return self._download(self._blob(name))

  def exists(self, name: str) -> bool:
    with self._named_errors('look up', name):
      return self._blob(name).exists(**self._options)

  def write_once(self, name: str, data: bytes) -> None:
    blob = self._blob(name)
    nonce = uuid.uuid4().hex
    blob.metadata = {'writer': nonce}
    with self._named_errors(f'write {len(data)} bytes to', name):
      try:
        blob.upload_from_string(
          data,
          content_type='application/octet-stream',
          if_generation_match=0,  # only if there is no such object
          checksum='crc32c',
          **self._options,
        )
      except self._taken:
        self._settle(name, data, nonce=nonce)

  def list(self, prefix: str, start_after: str = '') -> list[str]:
    _check_prefix(prefix)
    with self._named_errors('list', prefix):
      blobs = self._bucket.list_blobs(
        prefix=self._prefix + prefix,
        start_offset=self._prefix + start_after,  # inclusive, hence `>` below
        fields='items(name),nextPageToken',
        **self._options,
      )
      names = [blob.name.removeprefix(self._prefix) for blob in blobs]
    return sorted(name for name in names if name > start_after)

  def delete(self, name: str) -> None:
    with contextlib.suppress(ObjectNotFound):
      with self._named_errors('delete', name):
        self._blob(name).delete(**self._options)

  def _blob(self, name: str):
    _check_name(name)
    return self._bucket.blob(self._prefix + name)

  def _download(self, blob) -> bytes:
    for attempt in range(1, GCS_READ_ATTEMPTS + 1):
      try:
        return blob.download_as_bytes(checksum='crc32c', **self._options)
      except self._corrupt as error:
        if attempt == GCS_READ_ATTEMPTS:
          raise
        self._count_retry(error)

  def _settle(self, name: str, data: bytes, *, nonce: str) -> None:
    """The name is taken: by our own write whose reply was lost, or not."""
    theirs = self._blob(name)
    theirs.reload(**self._options)
    if (theirs.metadata or {}).get('writer') == nonce:
      return
    if theirs.size != len(data) or self._download(theirs) != data:
      raise _other_content(self._url + self._prefix + name, len(data))

  def _transient(self, error: Exception) -> bool:
    status = (
      error.response.status_code
      if isinstance(error, self._invalid)
      else getattr(error, 'code', None)
    )
    return isinstance(error, self._unreachable) or (
      status in GCS_RETRY_STATUSES
    )

  def _count_retry(self, error: Exception) -> None:
    self.retries += 1
    logging.warning('%s: trying again after %r', self._url, error)

  @contextlib.contextmanager
  def _named_errors(self, action: str, name: str) -> Iterator[None]:
    where = self._url + self._prefix + name
    try:
      yield
    except self._not_found as error:
      raise ObjectNotFound(f'{where} does not exist ({error})') from error
    except self._failures as error:
      raise StorageError(
        f'cannot {action} {where}: {error!r}; check the bucket, its '
        'permissions (storage.objects.*) and the network'
      ) from error
