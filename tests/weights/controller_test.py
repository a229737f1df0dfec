"""Targets end at the newest version bit for bit, or are fenced, never else."""

import dataclasses
import threading

import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swe17_jax.core import storage
from swe17_jax.weights import controller as controllers
from swe17_jax.weights import delta, publisher
from swe17_jax.weights import manifest as manifests
from swe17_jax.weights import staged as stages


class Crash(RuntimeError):
  """What an engine may raise."""


class MemoryTarget:
  """An engine's weights in memory; verifies, and fails where it is told."""

  def __init__(self):
    self.weight_version = None
    self.held = {}
    self.calls = []
    self.fail = ''  # 'before', 'middle' or 'after' the next change

  def tensors(self):
    return self.held

  def load_base(self, tensors, *, weight_version):
    self.calls.append(('base', weight_version))
    self._maybe_fail('before')
    self.held = dict(tensors)
    self._maybe_fail('after')
    self.weight_version = weight_version

  def apply_delta(self, staged, *, weight_version, tensors_digest):
    self.calls.append(('delta', weight_version))
    self._maybe_fail('before')
    if self.fail == 'middle':
      half = dataclasses.replace(staged, updates=staged.updates[:1])
      half.apply(self.held)
    self._maybe_fail('middle')
    staged.apply(self.held)
    self._maybe_fail('after')
    if delta.digest(self.held) != tensors_digest:
      raise stages.DeltaError(f'version {weight_version}: wrong digest')
    self.weight_version = weight_version

  def _maybe_fail(self, where):
    if self.fail == where:
      self.fail = ''
      raise Crash(where)


class CountingStore(storage.MemoryStore):
  """Counts what is asked for."""

  def __init__(self):
    super().__init__()
    self.lists = 0
    self.reads = []

  def read(self, name):
    self.reads.append(name)
    return super().read(name)

  def list(self, prefix, start_after=''):
    self.lists += 1
    return super().list(prefix, start_after)


NOISE = np.random.default_rng(0).bytes(4000)


def weights(version):
  return {
    'a': np.full(40, version, np.float32),  # dense in every delta
    'b': (np.arange(200) <= version).astype(np.int16),  # sparse
    'c': np.frombuffer(NOISE, np.uint8),  # never changes
  }


class ControllerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.store = CountingStore()
    self.publisher = publisher.Publisher(self.store, base_every=100)
    self.target = MemoryTarget()
    self.controller = controllers.Controller(
      self.store, self.target, poll_s=0.01
    )

  def publish(self, *versions):
    for version in versions:
      self.publisher.publish(version, weights(version))

  def publish_base(self, version):
    publisher.Publisher(self.store, base_every=1).publish(
      version, weights(version)
    )
    self.publisher.resume(version, weights(version))

  def damage(self, version):
    """Replaces a version's blob by one with a bit flipped."""
    name = manifests.read(self.store, version=version).blobs[0].name
    data = bytearray(self.store.read(name))
    data[len(data) // 2] ^= 1
    self.store.delete(name)
    self.store.write_once(name, bytes(data))

  def assert_at(self, version):
    assert self.controller.verified_version == version
    assert delta.digest(self.target.held) == delta.digest(weights(version))

  def test_follows(self):
    assert self.controller.poll_once() == 0  # nothing published yet
    assert self.controller.verified_version is None
    for version in (0, 1, 2):
      self.publish(version)
      assert self.controller.poll_once() == 1
      self.assert_at(version)
      assert self.controller.poll_once() == 0
    self.publish(3, 4, 5)
    assert self.controller.poll_once() == 3
    self.assert_at(5)
    # Three versions at once are one update of the engine.
    assert self.target.calls == [
      *(('base', 0), ('delta', 1), ('delta', 2), ('delta', 5))
    ]
    assert self.controller.versions_applied == 6

  def test_late_start_loads_once(self):
    self.publish(0, 1, 2)
    self.publish_base(3)
    self.publish(4, 5)
    self.store.reads.clear()
    assert self.controller.poll_once() == 3
    assert self.target.calls == [('base', 5)]
    self.assert_at(5)
    # It read nothing older than the newest base.
    assert manifests.name(2) not in self.store.reads

  def test_polls_the_next_name_only(self):
    self.publish(0, 4)  # a version every 4 steps
    self.controller.poll_once()
    self.store.lists, self.store.reads = 0, []
    assert self.controller.poll_once() == 0
    assert self.store.reads == [manifests.name(8)]
    self.publish(8)
    self.store.lists = 0
    assert self.controller.poll_once() == 1
    assert self.store.lists == 0
    self.assert_at(8)

  def test_listing_finds_another_stride(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.publish(7)
    polls = 1
    while not self.controller.poll_once():
      polls += 1
    assert 1 < polls <= 12
    self.assert_at(7)

  def test_gap(self):
    self.publish(0, 1, 2)
    self.controller.poll_once()
    self.publish(3, 4, 5)
    hidden = self.store.read(manifests.name(4))
    self.store.delete(manifests.name(4))
    assert self.controller.poll_once() == 1
    assert self.controller.poll_once() == 0
    self.assert_at(3)
    self.store.write_once(manifests.name(4), hidden)
    assert self.controller.poll_once() == 2
    self.assert_at(5)

  def test_base_bridges_a_gap(self):
    self.publish(0, 1, 2)
    self.controller.poll_once()
    self.publish(3, 4)
    self.store.delete(manifests.name(3))
    self.publish_base(5)
    self.publish(6)
    self.target.calls.clear()
    for _ in range(12):
      self.controller.poll_once()
    assert self.target.calls == [('base', 6)]
    self.assert_at(6)

  @parameterized.product(fail=('before', 'middle', 'after'), late=(1, 3))
  def test_target_fails_in_an_apply(self, fail, late):
    self.publish(0, 1)
    self.controller.poll_once()
    self.publish(*range(2, 2 + late))
    self.target.fail = fail
    with pytest.raises(Crash):
      self.controller.poll_once()
    assert self.controller.verified_version is None  # fenced
    self.target.calls.clear()
    assert self.controller.poll_once() == 2 + late
    assert self.target.calls == [('base', 1 + late)]
    self.assert_at(1 + late)
    # And then it follows deltas again.
    self.publish(2 + late)
    self.controller.poll_once()
    assert self.target.calls[1:] == [('delta', 2 + late)]
    self.assert_at(2 + late)

  def test_target_fails_while_it_is_healed(self):
    self.publish(0)
    for fail in ('before', 'after'):
      self.target.fail = fail
      with pytest.raises(Crash):
        self.controller.poll_once()
      assert self.controller.verified_version is None
    assert self.controller.poll_once() == 1
    self.assert_at(0)

  def test_target_has_other_bytes(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.target.held['b'][77] ^= 4  # a stray write
    self.publish(2)
    with pytest.raises(stages.DeltaError, match='wrong digest'):
      self.controller.poll_once()
    assert self.controller.verified_version is None
    self.controller.poll_once()
    self.assert_at(2)

  def test_fenced_without_a_base(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.publish(2)
    self.store.delete(manifests.name(0))
    self.target.fail = 'middle'
    with pytest.raises(Crash):
      self.controller.poll_once()
    with pytest.raises(controllers.ControllerError, match='publish a base'):
      self.controller.poll_once()
    self.publish_base(3)
    self.controller.poll_once()
    self.assert_at(3)

  def test_damaged_blob_never_reaches_the_target(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.publish(2, 3)
    self.damage(3)
    self.target.calls.clear()
    with pytest.raises(manifests.ManifestError, match='fetch it again'):
      self.controller.poll_once()
    assert self.target.calls == []  # not even version 2, which is sound
    self.assert_at(1)  # and it goes on serving
    self.publish_base(4)
    self.controller.poll_once()
    self.assert_at(4)

  def test_damaged_base(self):
    self.publish(0, 1)
    self.damage(0)
    with pytest.raises(manifests.ManifestError, match='fetch it again'):
      self.controller.poll_once()
    assert self.target.calls == []

  def test_missing_blob_is_an_error(self):
    self.publish(0)
    name = manifests.read(self.store, version=0).blobs[0].name
    self.store.delete(name)
    with pytest.raises(storage.ObjectNotFound, match=name):
      self.controller.poll_once()

  def test_delta_of_another_parent(self):
    """A manifest that lies about its parent is caught before a base load."""
    self.publish(0, 1)
    record = manifests.read(self.store, version=1)
    other = weights(0)
    other['b'][150] = 9
    forged = delta.encode(other, weights(1) | {'b': other['b']})
    blob = manifests.make_blob('delta', version=2, data=forged)
    self.store.write_once(blob.name, forged)
    lie = manifests.Manifest(
      version=2,
      parent_version=1,
      kind='delta',
      codec=record.codec,
      blobs=(blob,),
      parent_digest=record.tensors_digest,
      tensors_digest=delta.digest(other),
      created_by='liar',
      started_at=0,
      committed_at=0,
    )
    self.store.write_once(manifests.name(2), lie.to_bytes())
    with pytest.raises(stages.DeltaError, match='rebuilt from base 0'):
      self.controller.poll_once()
    assert self.target.calls == []

  def test_wrong_parent_version(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.publish(2)
    data = self.store.read(manifests.name(2))
    self.store.delete(manifests.name(2))
    forged = data.replace(b'"parent_version": 1', b'"parent_version": 0')
    self.store.write_once(manifests.name(2), forged)
    with pytest.raises(manifests.ManifestError, match='wrong parent'):
      self.controller.poll_once()
    self.assert_at(1)

  def test_other_codec(self):
    self.publish(0)
    data = self.store.read(manifests.name(0))
    self.store.delete(manifests.name(0))
    forged = data.replace(delta.FORMAT.encode(), b'swe17.delta.9')
    self.store.write_once(manifests.name(0), forged)
    with pytest.raises(manifests.ManifestError, match='same release'):
      self.controller.poll_once()

  def test_target_that_does_not_move(self):
    self.publish(0)
    self.target.load_base = lambda tensors, *, weight_version: None
    with pytest.raises(controllers.ControllerError, match='says version None'):
      self.controller.poll_once()

  def test_restarted_engine_is_loaded_again(self):
    self.publish(0, 1)
    self.controller.poll_once()
    self.target.weight_version, self.target.held = None, {}
    assert self.controller.poll_once() == 2
    self.assert_at(1)

  @given(st.lists(st.sampled_from(
    ['delta', 'base', 'poll', 'poll', 'before', 'middle', 'after', 'restart']
  ), max_size=25))  # fmt: skip
  @example(['delta', 'poll', 'delta', 'base', 'poll', 'delta'])
  @settings(max_examples=60, deadline=None)
  def test_any_history_ends_at_the_newest(self, history):
    self.setUp()
    version = -1
    for event in history:
      if event in ('delta', 'base'):
        version += 1
        (self.publish if event == 'delta' else self.publish_base)(version)
      elif event == 'restart':
        self.target = self.controller._target = MemoryTarget()
      elif event == 'poll':
        self.poll()
      else:
        self.target.fail = event
    for _ in range(3):
      self.poll()
    if version >= 0:
      self.assert_at(version)

  def poll(self):
    """Polls, and checks what may be served whatever came out."""
    try:
      self.controller.poll_once()
    except Crash:
      assert self.controller.verified_version is None
    if self.controller.verified_version is not None:
      self.assert_at(self.controller.verified_version)


class RecordingStop:
  """A threading.Event that keeps the waits and acts after each of them."""

  def __init__(self, *acts):
    self.waits = []
    self._acts = list(acts)

  def is_set(self):
    return not self._acts

  def wait(self, timeout):
    self.waits.append(timeout)
    self._acts.pop(0)()


class RunTest(parameterized.TestCase):
  def test_backs_off_and_recovers(self):
    store = storage.MemoryStore()
    publisher.Publisher(store, base_every=9).publish(0, weights(0))
    target = MemoryTarget()
    controller = controllers.Controller(store, target, poll_s=1.0)
    name = manifests.read(store, version=0).blobs[0].name
    data = store.read(name)
    store.delete(name)
    stop = RecordingStop(
      *[lambda: None] * 7,
      lambda: store.write_once(name, data),
      *[lambda: None] * 2,
    )
    controller.run(stop)
    # 8 errors: 2, 4, ... s up to the bound; then success, which asks again at
    # once; then nothing new.
    assert stop.waits == [2, 4, 8, 16, 32, 60, 60, 60, 0, 1]
    assert controller.errors == 8
    assert controller.verified_version == 0

  def test_thread(self):
    """Publisher and controller at the same time, through real threads."""
    store = storage.MemoryStore()
    target = MemoryTarget()
    arrived, stop = threading.Event(), threading.Event()

    class Watched(controllers.Controller):
      def poll_once(self):
        applied = super().poll_once()
        if self.verified_version == 19:
          arrived.set()
        return applied

    controller = Watched(store, target, poll_s=0.001)
    thread = threading.Thread(target=controller.run, args=(stop,))
    thread.start()
    try:
      pub = publisher.Publisher(store, base_every=6)
      for version in range(20):
        pub.publish(version, weights(version))
      assert arrived.wait(timeout=20)
    finally:
      stop.set()
      thread.join(timeout=20)
    assert not thread.is_alive()
    assert controller.errors == 0
    assert delta.digest(target.held) == delta.digest(weights(19))

  def test_poll_s(self):
    with pytest.raises(ValueError, match='poll_s=0'):
      controllers.Controller(storage.MemoryStore(), MemoryTarget(), poll_s=0)
