"""The number of a group decides its step; its step bounds its age."""

import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from swe17_jax.core import dispatch


@st.composite
def configs(draw):
  return dispatch.DispatchConfig(
    groups_per_step=draw(st.integers(1, 5)),
    group_size=2,
    max_staleness=draw(st.integers(0, 4)),
  )


class DispatchTest(parameterized.TestCase):
  def test_by_hand(self):
    config = dispatch.DispatchConfig(
      groups_per_step=4, group_size=2, max_staleness=1
    )
    self.assertEqual(list(config.groups_of(2)), [8, 9, 10, 11])
    self.assertTrue(config.may_start(7, weight_version=0))
    self.assertFalse(config.may_start(8, weight_version=0))
    self.assertTrue(config.may_start(11, weight_version=1))

  @given(configs())
  def test_every_group_belongs_to_exactly_one_step(self, config):
    taken = [i for step in range(20) for i in config.groups_of(step)]
    self.assertEqual(taken, list(range(20 * config.groups_per_step)))

  @settings(max_examples=200, deadline=None)
  @given(configs(), st.integers(1, 3), st.data())
  def test_no_token_gets_too_old_and_nobody_waits_for_ever(
    self, config, publish_every, data
  ):
    """Plays worker, engine and trainer in a drawn order, without clocks.

    A group's first token has the version served at its start, its last one
    that of its end. The worker starts groups in order and may restart, which
    loses those in flight; the engine installs published versions when it
    likes; the trainer steps when its groups are there.
    """
    publish_every = min(publish_every, config.max_staleness + 1)
    steps = 5
    total = steps * config.groups_per_step
    engine = published = step = 0
    running, done = {}, {}

    def startable():
      missing = (i for i in range(total) if i not in done and i not in running)
      index = next(missing, None)
      if index is None:
        return None
      fresh = config.may_start(index, weight_version=engine)
      return index if fresh else None

    while step < steps:
      moves = ['finish'] * bool(running)
      moves += ['start'] * (startable() is not None)
      moves += ['install'] * (engine < published)
      moves += ['train'] * all(i in done for i in config.groups_of(step))
      assert moves, 'everybody waits for somebody'
      move = data.draw(st.sampled_from(moves + ['restart'] * bool(running)))
      if move == 'start':
        running[startable()] = engine
      elif move == 'finish':
        index = data.draw(st.sampled_from(sorted(running)))
        done[index] = (running.pop(index), engine)
      elif move == 'restart':
        running.clear()
      elif move == 'install':
        engine = published
      else:
        for index in config.groups_of(step):
          oldest, newest = done[index]
          assert 0 <= step - newest <= step - oldest <= config.max_staleness
        step += 1
        if step % publish_every == 0:
          published = step

  @parameterized.parameters(
    ({'groups_per_step': 0}, 'groups_per_step=0'),
    ({'group_size': 1}, 'group_size=1'),
    ({'max_staleness': -1}, 'max_staleness=-1'),
  )
  def test_a_config_without_sense_is_refused(self, fields, message):
    with pytest.raises(ValueError, match=message):
      dispatch.DispatchConfig(**fields)

  def test_names_sort_as_numbers(self):
    for name in (dispatch.train_name, dispatch.heldout_name):
      names = [name(i) for i in (0, 2, 10, 9_999, 10_000)]
      self.assertEqual(names, sorted(names))
      self.assertLen(set(names), len(names))
