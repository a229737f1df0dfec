"""A version is whole or invisible, whenever and however the publisher dies."""

import dataclasses
import threading
from concurrent import futures

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.core import storage
from swe17_jax.weights import delta, publisher
from swe17_jax.weights import manifest as manifests
from swe17_jax.weights import staged as stages


class Killed(BaseException):
  """Not an Exception: nothing may catch it."""


class MortalStore(storage.MemoryStore):
  """Kills its caller at the n-th write, before or after it took place."""

  kill_at: int | None = None
  after: bool = False

  def write_once(self, name, data):
    if self.kill_at is None:
      return super().write_once(name, data)
    self.kill_at -= 1
    if self.kill_at == 0 and not self.after:
      raise Killed(name)
    super().write_once(name, data)
    if self.kill_at == 0:
      raise Killed(name)


def weights(version):
  """100 bf16 and 50 f32 values, one of which is new in each version."""
  matrix = np.zeros((10, 10), ml_dtypes.bfloat16)
  bias = np.zeros(50, np.float32)
  matrix.reshape(-1)[: version + 1] = 1.5
  bias[: version + 1] = version
  return {'matrix': matrix, 'bias': bias}


def replayed(store):
  """The newest version, rebuilt from what is in the store."""
  available = {
    v: manifests.read(store, version=v) for v in manifests.versions(store)
  }
  chain = manifests.plan(None, available)
  tensors = {}
  for link in chain:
    parts = []
    for blob in link.blobs:
      data = store.read(blob.name)
      blob.check(data)
      parts.append(delta.decode(data, tensors))
    for part in parts:
      if link.kind == 'base':
        tensors |= part.tensors()
      else:
        part.apply(tensors)
    assert delta.digest(tensors) == link.tensors_digest
  return chain[-1].version, tensors


class PublisherTest(parameterized.TestCase):
  def test_bases_and_deltas(self):
    store = storage.MemoryStore()
    pub = publisher.Publisher(store, base_every=3)
    published = [pub.publish(v, weights(v)) for v in (0, 2, 3, 4, 5, 6, 8)]
    assert [p.kind for p in published] == [
      *('base', 'delta', 'delta'),
      *('base', 'delta', 'delta'),
      'base',
    ]
    # Version 3 against 2: one of 100 values in the matrix (sparse), and 4 of
    # 50 in the bias (8%, sparse too).
    assert published[2].changed_fraction == pytest.approx(5 / 150)
    assert published[0].changed_fraction == 1.0
    for p in published:
      record = manifests.read(store, version=p.version)
      assert (record.kind, record.blobs[0].size) == (p.kind, p.bytes)
      assert record.tensors_digest == delta.digest(weights(p.version))
    assert manifests.read(store, version=8).parent_version is None
    assert manifests.read(store, version=6).parent_version == 5
    version, tensors = replayed(store)
    assert version == 8
    assert delta.digest(tensors) == delta.digest(weights(8))

  def test_snapshot_is_a_copy(self):
    store = storage.MemoryStore()
    pub = publisher.Publisher(store, base_every=10)
    tensors = weights(0)
    pub.publish(0, tensors)
    tensors['bias'][7] = 3  # the optimizer updates in place
    pub.publish(1, tensors)
    tensors['bias'][8] = 4
    assert pub.publish(2, tensors).changed_fraction == 1 / 150
    assert delta.digest(replayed(store)[1]) == delta.digest(tensors)

  @parameterized.product(at=(1, 2), after=(False, True), steps=(0, 2))
  def test_killed_while_it_writes(self, at, after, steps):
    """Two writes a version: the blob, then the manifest."""
    store = MortalStore()
    pub = publisher.Publisher(store, base_every=10)
    for version in range(steps):
      pub.publish(version, weights(version))
    store.kill_at, store.after = at, after
    with pytest.raises(Killed):
      pub.publish(steps, weights(steps))
    store.kill_at = None
    committed = (at, after) == (2, True)
    expected = list(range(steps + committed))
    assert manifests.versions(store) == expected
    if expected:
      assert replayed(store)[0] == expected[-1]
    # The same process tries again: nothing is lost, and deltas go on.
    again = pub.publish(steps, weights(steps))
    assert (again.bytes == 0) == committed
    assert pub.publish(steps + 1, weights(steps + 1)).kind == 'delta'
    version, tensors = replayed(store)
    assert version == steps + 1
    assert delta.digest(tensors) == delta.digest(weights(version))

  def test_snapshot_waits_for_the_commit(self):
    store = MortalStore()
    pub = publisher.Publisher(store, base_every=10)
    pub.publish(0, weights(0))
    store.kill_at = 2
    with pytest.raises(Killed):
      pub.publish(1, weights(1))
    store.kill_at = None
    assert pub.snapshot_version == 0
    # The trainer gives up on 1 and goes on: 2 must hold all since 0.
    pub.publish(2, weights(2))
    assert manifests.read(store, version=2).parent_version == 0
    assert delta.digest(replayed(store)[1]) == delta.digest(weights(2))

  def test_restart(self):
    store = storage.MemoryStore()
    pub = publisher.Publisher(store, base_every=3)
    for version in (0, 1):
      pub.publish(version, weights(version))
    # With the last version's weights deltas go on, and so does the count.
    pub = publisher.Publisher(store, base_every=3)
    assert not pub.resume(2, weights(2))
    assert pub.resume(1, weights(1))
    assert pub.snapshot_version == 1
    assert pub.publish(2, weights(2)).kind == 'delta'
    assert pub.publish(3, weights(3)).kind == 'base'
    # Without them a base comes first.
    pub = publisher.Publisher(store, base_every=3)
    assert pub.publish(4, weights(4)).kind == 'base'
    # A trainer that repeats steps finds its versions there.
    pub = publisher.Publisher(store, base_every=3)
    for version in (2, 3, 4):
      done = pub.publish(version, weights(version))
      assert (done.bytes, done.changed_fraction) == (0, 0.0)
    assert pub.publish(5, weights(5)).kind == 'delta'
    assert delta.digest(replayed(store)[1]) == delta.digest(weights(5))

  def test_other_content(self):
    store = storage.MemoryStore()
    publisher.Publisher(store, base_every=3).publish(1, weights(1))
    pub = publisher.Publisher(store, base_every=3)
    for call in (pub.publish, pub.resume):
      with pytest.raises(publisher.PublishError, match='version 1 was commit'):
        call(1, weights(2))
    with pytest.raises(publisher.PublishError, match='0 comes after 1'):
      pub.publish(0, weights(0))
    assert pub.snapshot_version is None
    assert manifests.versions(store) == [1]

  def test_other_publisher_went_ahead(self):
    store = storage.MemoryStore()
    ours = publisher.Publisher(store, base_every=9)
    theirs = publisher.Publisher(store, base_every=9)
    ours.publish(0, weights(0))
    theirs.resume(0, weights(0))
    theirs.publish(1, weights(1))
    with pytest.raises(publisher.PublishError, match='1 was committed after'):
      ours.publish(2, weights(2))
    ours.publish(1, weights(1))  # the same tensors: we follow
    ours.publish(2, weights(2))
    assert replayed(store)[0] == 2

  def test_parent_was_deleted(self):
    store = storage.MemoryStore()
    pub = publisher.Publisher(store, base_every=9)
    pub.publish(0, weights(0))
    store.delete(manifests.name(0))
    assert pub.publish(1, weights(1)).kind == 'base'

  @parameterized.parameters(True, False)
  def test_race_for_a_version(self, same):
    """Both pass every check before either of them commits."""
    barrier = threading.Barrier(2)

    class Gate(storage.MemoryStore):
      def write_once(self, name, data):
        if name == manifests.name(1):
          barrier.wait(timeout=10)
        super().write_once(name, data)

    store = Gate()
    publishers = [publisher.Publisher(store, base_every=9) for _ in range(2)]
    for i, pub in enumerate(publishers):
      pub._created_by = f'trainer {i}'
      pub.publish(0, weights(0))
    outcomes = [None, None]

    def work(i):
      try:
        outcomes[i] = publishers[i].publish(1, weights(1 if same else 1 + i))
      except publisher.PublishError as error:
        outcomes[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(timeout=10)
    failed = [isinstance(o, publisher.PublishError) for o in outcomes]
    assert sum(failed) == (0 if same else 1)
    winner = failed.index(False)
    version, tensors = replayed(store)
    assert version == 1
    expected = weights(1 if same else 1 + winner)
    assert delta.digest(tensors) == delta.digest(expected)
    assert publishers[winner].snapshot_version == 1
    if not same:
      assert publishers[1 - winner].snapshot_version == 0

  def test_model_changed(self):
    pub = publisher.Publisher(storage.MemoryStore(), base_every=9)
    pub.publish(0, weights(0))
    with pytest.raises(stages.DeltaError, match="only one has .'extra'"):
      pub.publish(1, weights(1) | {'extra': np.zeros(1, np.float32)})
    assert pub.snapshot_version == 0

  def test_base_every(self):
    with pytest.raises(ValueError, match='base_every=0'):
      publisher.Publisher(storage.MemoryStore(), base_every=0)


class Hosts:
  """The `Exchange` of several threads; stands in for the trainer's network."""

  def __init__(self, count):
    self.barrier = threading.Barrier(count, timeout=30)
    self.payloads = {}

  def exchange(self, host):
    def call(key, payload):
      assert (key, host) not in self.payloads
      self.payloads[key, host] = payload
      self.barrier.wait()
      return [self.payloads[key, h] for h in range(self.barrier.parties)]

    return call


def share(tensors, host, hosts):
  return {n: tensors[n] for n in sorted(tensors)[host::hosts]}


class SeveralHostsTest(parameterized.TestCase):
  def on_all(self, stores, work, count=3):
    """Runs `work(publisher, host)` on `count` hosts; returns what came."""
    hosts = Hosts(count)

    def one(host):
      pub = publisher.Publisher(
        *(stores[host],),
        base_every=10,
        host=host,
        exchange=hosts.exchange(host),
        threads=1,
      )
      try:
        return work(pub, host)
      except (publisher.PublishError, storage.StorageError) as error:
        return error

    with futures.ThreadPoolExecutor(count) as pool:
      return list(pool.map(one, range(count)))

  def test_each_host_publishes_its_share(self):
    store = storage.MemoryStore()

    def work(pub, host):
      return [pub.publish(v, share(many(v), host, 3)) for v in (0, 1, 2)]

    first, *others = self.on_all([store] * 3, work)
    assert [p.kind for p in first] == ['base', 'delta', 'delta']
    for other in others:
      for a, b in zip(first, other):
        assert dataclasses.replace(b, seconds=a.seconds) == a
    record = manifests.read(store, version=1)
    assert len(record.blobs) == 3
    assert record.tensors_digest == delta.digest(many(1))
    assert record.parent_digest == delta.digest(many(0))
    version, tensors = replayed(store)
    assert version == 2 and delta.digest(tensors) == delta.digest(many(2))

  def test_hosts_may_be_others_after_a_restart(self):
    store = storage.MemoryStore()
    self.on_all(
      [store] * 3, lambda pub, host: pub.publish(0, share(many(0), host, 3))
    )

    def work(pub, host):
      assert pub.resume(0, share(many(0), host, 2))
      return pub.publish(1, share(many(1), host, 2)).kind

    assert self.on_all([store] * 2, work, count=2) == ['delta', 'delta']
    assert delta.digest(replayed(store)[1]) == delta.digest(many(1))

  @parameterized.parameters(0, 2)
  def test_an_error_on_one_host_is_an_error_on_all(self, failing):
    store = storage.MemoryStore()
    stores = [store] * 3
    broken = FailingStore(store)
    stores[failing] = broken

    def work(pub, host):
      pub.publish(0, share(many(0), host, 3))
      broken.fail = True
      with pytest.raises((publisher.PublishError, storage.StorageError)) as e:
        pub.publish(1, share(many(1), host, 3))
      assert (f'host {failing}' in str(e.value)) == (host != failing)
      pub._exchange('healed', b'')  # all are here before it is
      broken.fail = False
      pub._exchange('go on', b'')
      return pub.publish(1, share(many(1), host, 3)).kind

    assert self.on_all(stores, work) == ['delta'] * 3
    assert manifests.versions(store) == [0, 1]
    assert delta.digest(replayed(store)[1]) == delta.digest(many(1))


class FailingStore:
  """A store that can be told to refuse writes."""

  fail = False

  def __init__(self, store):
    self.store = store

  def __getattr__(self, name):
    return getattr(self.store, name)

  def write_once(self, name, data):
    if self.fail:
      raise storage.StorageError(f'{name}: out of order')
    self.store.write_once(name, data)


def many(version):
  """Nine tensors, all of which change a little per version."""
  rng = np.random.default_rng(0)
  tensors = {f'{i}.w': rng.normal(size=(20, 30)) for i in range(9)}
  for array in tensors.values():
    array.reshape(-1)[:: 50 - version] += version
  return tensors


class ToleranceTest(parameterized.TestCase):
  @given(
    steps=st.lists(st.floats(0, 1e-2), min_size=1, max_size=6),
    tolerance=st.sampled_from([1e-3, 3e-3, 0.02]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]),
    seed=st.integers(0, 99),
  )
  @settings(max_examples=60, deadline=None)
  def test_lags_by_less_than_the_bound(self, steps, tolerance, dtype, seed):
    rng = np.random.default_rng(seed)
    store = storage.MemoryStore()
    pub = publisher.Publisher(store, base_every=100, tolerance=tolerance)
    master = rng.normal(0, 0.02, (30, 20))
    for version, step in enumerate([0, *steps]):
      master += 0.02 * step * rng.normal(size=master.shape)
      new = {'w': master.astype(dtype), 'bias': master[0].astype(dtype)}
      pub.publish(version, new)
      _, found = replayed(store)
      w = new['w'].astype(np.float32)
      lag = np.abs(w - found['w'].astype(np.float32))
      assert lag.max() <= tolerance * np.sqrt(np.mean(np.square(w))) * 1.0001
      assert found['bias'].tobytes() == new['bias'].tobytes()

  def test_what_is_held_back_adds_up_until_it_is_sent(self):
    pub = publisher.Publisher(
      storage.MemoryStore(), base_every=100, tolerance=0.01
    )
    matrix = np.ones((10, 10), np.float32)
    changed = []
    for version in range(8):
      matrix[0, 0] = 1 + 0.004 * version  # sent at every third step
      done = pub.publish(version, {'w': matrix})
      changed.append(round(100 * done.changed_fraction))
    assert changed == [100, 0, 0, 1, 0, 0, 1, 0]

  @parameterized.parameters(np.nan, np.inf)
  def test_what_has_no_size_is_sent(self, value):
    old, new = np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)
    new[0] = value, 1e-9
    found = publisher.within_tolerance(old, new, 0.1)
    assert found.tobytes() == new.tobytes()

  def test_codes_and_vectors_are_sent(self):
    for new in (np.ones((4, 4), np.uint8), np.ones(9, np.float32)):
      assert publisher.within_tolerance(new * 0, new, 99.0) is new

  def test_begins_with_a_base_after_a_restart(self):
    store = storage.MemoryStore()
    first = publisher.Publisher(store, base_every=100, tolerance=0.5)
    for version in (0, 1):
      first.publish(version, weights(version))
    again = publisher.Publisher(store, base_every=100, tolerance=0.5)
    assert again.resume(1, weights(1)) and not again.resume(2, weights(2))
    assert again.publish(2, weights(2)).kind == 'base'
