"""The trainer's end of the store: waits, names what it misses, refuses."""

import threading

import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.core import dispatch, records, storage
from swe17_jax.train import source
from tests import miniature

CONFIG = dispatch.DispatchConfig(
  groups_per_step=2, group_size=2, max_staleness=1
)


def group(index, *, version, rewards=(0.0, 1.0), stored_index=None):
  rng = np.random.default_rng(index)
  stored_index = index if stored_index is None else stored_index
  return [
    miniature.trajectory(
      miniature.window(rng, 6, version=version),
      group_index=stored_index,
      reward=reward,
    )
    for reward in rewards
  ]


class SourceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.store = storage.MemoryStore()
    self.stop = threading.Event()
    self.now = 0.0

  def source(self, timeout_s=30.0):
    return source.GroupSource(
      self.store, CONFIG, timeout_s=timeout_s, stop=self.stop
    )

  def write(self, index, name=None, **arguments):
    self.store.write_once(
      name or dispatch.train_name(index),
      records.group_to_bytes(group(index, **arguments)),
    )

  def test_the_groups_of_a_step_come_in_order(self):
    for index in (3, 1, 2, 0):  # as they happened to finish
      self.write(index, version=index // 2)
    for step in range(2):
      taken = self.source().take(step)
      indices = [[t.group_index for t in group] for group in taken]
      self.assertEqual(indices, [[2 * step] * 2, [2 * step + 1] * 2])

  def test_it_waits_for_what_is_not_there_yet(self):
    self.write(0, version=0)
    late = threading.Timer(0.1, self.write, [1], {'version': 0})
    late.start()
    self.addCleanup(late.join)
    self.assertLen(self.source().take(0), 2)

  def test_a_timeout_names_the_object(self):
    self.write(0, version=0)

    def clock():
      self.now += 10.0
      return self.now

    groups = source.GroupSource(
      self.store, CONFIG, timeout_s=25.0, stop=self.stop, clock=clock
    )
    with pytest.raises(
      source.SourceError, match='rollouts/train/00000001.npz .* 25.0 s'
    ):
      groups.take(0)

  def test_stop_ends_a_wait(self):
    timer = threading.Timer(0.1, self.stop.set)
    timer.start()
    self.addCleanup(timer.join)
    with pytest.raises(source.Stopped):
      self.source().take(0)
    with pytest.raises(source.Stopped):
      self.source().wait_for_heldout(0)

  def test_stop_comes_before_what_is_there(self):
    self.write(0, version=0)
    self.write(1, version=0)
    self.stop.set()
    with pytest.raises(source.Stopped):
      self.source().take(0)

  @parameterized.named_parameters(
    ('misplaced', {'version': 0, 'stored_index': 1}, 'object 0 .* group 1'),
    ('small', {'version': 0, 'rewards': (1.0,)}, 'group_size=2'),
    ('future', {'version': 5}, 'version 5, which step 0'),
  )
  def test_a_wrong_group_is_refused(self, arguments, message):
    self.write(0, **arguments)
    self.write(1, version=0)
    with pytest.raises(records.RecordError, match=message):
      self.source().take(0)

  def test_a_stale_group_is_refused(self):
    self.write(4, version=0)
    self.write(5, version=1)
    with pytest.raises(records.RecordError, match='version 0 at step 2'):
      self.source().take(2)

  def test_a_damaged_group_is_refused(self):
    data = records.group_to_bytes(group(0, version=0))
    self.store.write_once(dispatch.train_name(0), data[:-30])
    with pytest.raises(records.RecordError, match='not a readable group'):
      self.source().take(0)

  def test_heldout_rates_by_version(self):
    groups = self.source()
    self.assertEqual(groups.heldout(after=-1), {})
    for version, rewards in ((0, (0.0, 0.0)), (4, (0.0, 1.0)), (12, (1.0,))):
      name = dispatch.heldout_name(version)
      self.write(0, name=name, version=version, rewards=rewards)
    self.assertEqual(groups.heldout(after=-1), {0: 0.0, 4: 0.5, 12: 1.0})
    self.assertEqual(groups.heldout(after=0), {4: 0.5, 12: 1.0})
    self.assertEqual(groups.heldout(after=5), {12: 1.0})
    self.assertEqual(groups.heldout(after=12), {})
    self.assertEqual(groups.wait_for_heldout(4), 0.5)
