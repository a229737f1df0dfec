"""A version is whole or invisible, whenever and however the publisher dies."""

import threading

import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.core import storage
from swe17_jax.weights import delta, publisher
from swe17_jax.weights import manifest as manifests


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
    data = store.read(link.blobs[0].name)
    link.blobs[0].check(data)
    staged = delta.decode(data, tensors)
    if link.kind == 'base':
      tensors = staged.tensors()
    else:
      staged.apply(tensors)
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
    with pytest.raises(delta.DeltaError, match="only one has .'extra'"):
      pub.publish(1, weights(1) | {'extra': np.zeros(1, np.float32)})
    assert pub.snapshot_version == 0

  def test_base_every(self):
    with pytest.raises(ValueError, match='base_every=0'):
      publisher.Publisher(storage.MemoryStore(), base_every=0)
