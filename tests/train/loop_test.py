"""The main loop: what it records, and that an interruption leaves no trace."""

import collections
import dataclasses
import pathlib
import threading
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from swe17_jax.core import dispatch, metrics, records, storage
from swe17_jax.rl import loss
from swe17_jax.train import checkpoint, loop, source
from swe17_jax.weights import delta, publisher
from swe17_jax.weights import manifest as manifests
from tests import miniature

DISPATCH = dispatch.DispatchConfig(
  groups_per_step=2, group_size=2, max_staleness=1
)
STEPS = miniature.TRAIN.steps


def group(index, *, version, rewards=(0.0, 1.0)):
  rng = np.random.default_rng(index)
  return [
    miniature.trajectory(
      miniature.window(rng, int(rng.integers(4, 16)), version=version),
      group_index=index,
      reward=reward,
    )
    for reward in rewards
  ]


def write_rollouts(store, *, uninformative=()):
  """Writes the groups of all steps; each is a version old, or fresh."""
  for step in range(STEPS):
    for index in DISPATCH.groups_of(step):
      version = max(0, step - index % 2)
      rewards = (1.0, 1.0) if step in uninformative else (0.0, 1.0)
      data = group(index, version=version, rewards=rewards)
      store.write_once(dispatch.train_name(index), records.group_to_bytes(data))


def write_heldout(store, version):
  data = group(0, version=version, rewards=(0.0, version / STEPS))
  store.write_once(dispatch.heldout_name(version), records.group_to_bytes(data))


class Killed(BaseException):
  """What stands for the end of the process."""


class RunTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(miniature.shared_trainers())
    self.store = storage.MemoryStore()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.seen = []

  def run_loop(self, config=miniature.TRAIN, **changes):
    def on_step(step, row):
      self.seen.append((step, dict(row)))

    groups = source.GroupSource(
      self.store, DISPATCH, timeout_s=5.0, stop=threading.Event()
    )
    arguments = {
      'model': miniature.MODEL,
      'initial': miniature.parameters,
      'groups': groups,
      'store': self.store,
      'workdir': self.workdir,
      'on_step': on_step,
    }
    state = loop.run(config, **{**arguments, **changes})
    return miniature.bits(state)

  def rows(self):
    return metrics.read(self.workdir / 'metrics.jsonl')

  def column(self, name):
    """Returns [(step, value)] of a metric, as recorded."""
    return [(row['step'], row[name]) for row in self.rows() if name in row]

  def published(self):
    """Returns the digest of every committed version."""
    return {
      version: manifests.read(self.store, version=version).tensors_digest
      for version in manifests.versions(self.store)
    }

  def straight(self, config=miniature.TRAIN):
    """Runs to the end without a break, in a store of its own."""
    mine, self.store = self.store, storage.MemoryStore()
    write_rollouts(self.store)
    workdir = pathlib.Path(self.create_tempdir().full_path)
    state = self.run_loop(config, workdir=workdir)
    published = self.published()
    self.store, self.seen = mine, []
    return state, published

  def test_every_step_is_recorded_once_and_every_version_published(self):
    write_rollouts(self.store)
    write_heldout(self.store, 0)
    write_heldout(self.store, 2)
    self.run_loop()
    steps = list(range(STEPS))
    self.assertEqual([step for step, _ in self.seen], steps)
    for name in ('train/reward', 'train/grad_norm', 'weights/delta_bytes'):
      self.assertEqual([step for step, _ in self.column(name)], steps, name)
    self.assertEqual(self.column('train/reward')[0], (0, 0.5))
    self.assertEqual(
      self.column('train/staleness_max'), [(0, 0), (1, 1), (2, 1), (3, 1)]
    )
    self.assertEqual(
      self.column('rollout/newest_version'), [(s, s) for s in steps]
    )
    self.assertEqual(self.column('heldout/reward'), [(0, 0.0), (2, 0.25)])
    self.assertEqual(sorted(self.published()), list(range(STEPS + 1)))
    kinds = [manifests.read(self.store, version=v).kind for v in range(3)]
    self.assertEqual(kinds, ['base', 'delta', 'delta'])
    for _, row in self.seen:
      self.assertGreater(row['train/tokens_per_s'], 0)

  def test_what_is_published_is_what_is_trained(self):
    write_rollouts(self.store)
    self.run_loop()
    like = jax.eval_shape(miniature.state)
    state, _ = checkpoint.restore(self.workdir / 'checkpoints', like)
    weights = miniature.trainer().published(state.params)
    digest = delta.digest(loop.host(weights, miniature.MODEL))
    self.assertEqual(self.published()[STEPS], digest)
    self.assertLen(set(self.published().values()), STEPS + 1)

  def test_a_second_run_goes_on_where_the_first_ended(self):
    wanted = self.straight()
    write_rollouts(self.store)
    write_heldout(self.store, 0)
    self.run_loop(dataclasses.replace(miniature.TRAIN, steps=2))
    write_heldout(self.store, 1)  # while no trainer was there
    state = self.run_loop()
    self.assertEqual((state, self.published()), wanted)
    self.assertEqual([step for step, _ in self.seen], list(range(STEPS)))
    for name in ('train/reward', 'train/wall_s', 'weights/delta_bytes'):
      self.assertEqual(
        [step for step, _ in self.column(name)], list(range(STEPS)), name
      )
    self.assertEqual(self.column('heldout/reward'), [(0, 0.0), (1, 0.125)])
    times = [wall_s for _, wall_s in self.column('train/wall_s')]
    self.assertEqual(times, sorted(times))

  def _die_in(self, where):
    """Runs until the third step dies at a place, as by kill -9."""
    calls = collections.Counter()

    def dying(target, name, after):
      real = getattr(target, name)

      def call(*args, **kwargs):
        calls[name] += 1
        if calls[name] == after:
          raise Killed
        return real(*args, **kwargs)

      return mock.patch.object(target, name, call)

    patch = {
      'update': lambda: dying(miniature.trainer(), 'update', 3),
      'metrics': lambda: dying(metrics.MetricsWriter, 'write', 5),
      'save': lambda: dying(checkpoint, 'save', 3),
      'publish': lambda: dying(publisher.Publisher, 'publish', 4),
      'sizes': lambda: dying(metrics.MetricsWriter, 'write', 6),
    }[where]()
    with patch, pytest.raises(Killed):
      self.run_loop()

  @parameterized.parameters('update', 'metrics', 'save', 'publish', 'sizes')
  def test_death_anywhere_leaves_no_gap_and_no_other_bit(self, where):
    wanted = self.straight()
    write_rollouts(self.store)
    self._die_in(where)
    self.assertEqual((self.run_loop(), self.published()), wanted)
    for name in ('train/reward', 'train/step_s', 'train/wall_s'):
      self.assertEqual(
        [step for step, _ in self.column(name)], list(range(STEPS)), name
      )

  def test_a_damaged_checkpoint_costs_a_step(self):
    wanted = self.straight()
    write_rollouts(self.store)
    self.run_loop(dataclasses.replace(miniature.TRAIN, steps=3))
    newest = self.workdir / 'checkpoints' / '00000003'
    (newest / '_CHECKPOINT_METADATA').unlink()
    self.assertEqual((self.run_loop(), self.published()), wanted)
    self.assertEqual(
      [step for step, _ in self.column('train/reward')], list(range(STEPS))
    )

  def test_publish_every_second_version(self):
    config = dataclasses.replace(miniature.TRAIN, publish_every=2)
    (wanted, every), (_, all_versions) = self.straight(config), self.straight()
    self.assertEqual(every, {v: all_versions[v] for v in (0, 2, 4)})
    write_rollouts(self.store)
    self.run_loop(dataclasses.replace(config, steps=2))
    self.assertEqual((self.run_loop(config), self.published()), (wanted, every))
    self.assertEqual(
      [step for step, _ in self.column('weights/delta_bytes')], [1, 3]
    )

  def test_the_last_version_is_always_published(self):
    config = dataclasses.replace(miniature.TRAIN, publish_every=2)
    wanted = self.straight()
    write_rollouts(self.store)
    self.run_loop(dataclasses.replace(config, steps=3))
    self.assertEqual(sorted(self.published()), [0, 2, 3])
    state = self.run_loop(config)  # goes on from between two versions
    self.assertEqual(state, wanted[0])
    self.assertEqual(self.published(), {v: wanted[1][v] for v in (0, 2, 3, 4)})

  def test_a_step_without_signal_changes_no_weight_but_counts(self):
    write_rollouts(self.store, uninformative=(1,))
    self.run_loop()
    versions = self.published()
    self.assertEqual(sorted(versions), list(range(STEPS + 1)))
    self.assertEqual(versions[1], versions[2])
    self.assertNotEqual(versions[2], versions[3])
    self.assertEqual(
      self.column('train/informative_groups'), [(0, 1), (1, 0), (2, 1), (3, 1)]
    )

  def test_a_finished_run_does_nothing_again(self):
    write_rollouts(self.store)
    first = self.run_loop()
    rows = self.rows()
    self.assertEqual(self.run_loop(), first)
    self.assertEqual(self.rows(), rows)

  def test_stopping_keeps_every_finished_step(self):
    wanted = self.straight()
    write_rollouts(self.store)
    stop = threading.Event()
    groups = source.GroupSource(self.store, DISPATCH, timeout_s=5.0, stop=stop)
    with pytest.raises(source.Stopped):
      self.run_loop(
        groups=groups, on_step=lambda step, _: step == 1 and stop.set()
      )
    self.assertEqual([s for s, _ in self.column('train/reward')], [0, 1])
    self.assertEqual((self.run_loop(), self.published()), wanted)

  @parameterized.parameters('steps', 'publish_every', 'base_every')
  def test_a_count_of_zero_is_refused(self, name):
    with pytest.raises(ValueError, match=f'{name}=0'):
      dataclasses.replace(miniature.TRAIN, **{name: 0})


class PackTest(parameterized.TestCase):
  def test_metrics_by_hand(self):
    rng = np.random.default_rng(0)
    old = miniature.window(rng, 8, version=3)
    new = miniature.window(rng, 5, version=5)
    groups = [
      # Two windows of one trajectory share its advantage.
      [
        miniature.trajectory(old, new, reward=1.0),
        miniature.trajectory(new, reward=0.0),
      ],
      [miniature.trajectory(new, reward=1.0)] * 2,
    ]
    (batch,), row = loop.pack(groups, miniature.BATCH, step=5)
    sampled = [int(w.loss_mask.sum()) for w in (old, new)]
    count = sampled[0] + 4 * sampled[1]
    self.assertEqual(row['train/reward'], 0.75)
    self.assertEqual(row['train/informative_groups'], 0.5)
    self.assertEqual(row['train/staleness_max'], 2)
    self.assertAlmostEqual(row['train/staleness'], 2 * sampled[0] / count)
    self.assertEqual(row['rollout/newest_version'], 5)
    self.assertEqual(row['rollout/tokens'], 8 + 4 * 5)
    self.assertEqual(row['rollout/sampled_tokens'], count / 4)
    trained = batch.advantages[batch.loss_mask]
    self.assertEqual(batch.loss_mask.sum(), sampled[0] + 2 * sampled[1])
    self.assertEqual((trained == 0.5).sum(), sampled[0] + sampled[1])
    self.assertEqual((trained == -0.5).sum(), sampled[1])

  def test_nothing_informative_makes_no_batch(self):
    batches, row = loop.pack(
      [group(0, version=0, rewards=(1.0, 1.0))], miniature.BATCH, step=0
    )
    self.assertEqual(batches, [])
    self.assertEqual(row['train/informative_groups'], 0)


class ProbeTest(parameterized.TestCase):
  def windows(self, *versions):
    rng = np.random.default_rng(0)
    return [
      [miniature.trajectory(miniature.window(rng, 6, version=version))]
      for version in versions
    ]

  def probed(self, groups, versions):
    """Returns the version and windows that a probe was made of."""
    calls = []

    class Recorder:
      def probe(self, weights, batch):
        calls.append((weights, batch))
        return loop.steps.Probe(1.0, 0.0, 0.0, 0.0)

    found = loop.probe(
      Recorder(), {v: v for v in versions}, groups, miniature.BATCH
    )
    return found, calls

  def test_the_most_frequent_version_in_memory_is_taken(self):
    groups = self.windows(1, 2, 2, 3, 3, 3)
    _, [(version, batch)] = self.probed(groups, versions=(1, 2))
    self.assertEqual(version, 2)
    wanted = sum(g[0].windows[0].loss_mask.sum() for g in groups[1:3])
    self.assertEqual(batch.loss_mask.sum(), wanted)

  def test_versions_that_are_gone_give_no_metric(self):
    self.assertEqual(self.probed(self.windows(1, 2), versions=(3,)), ({}, []))

  def test_a_window_in_which_nothing_was_sampled_is_passed_over(self):
    rng = np.random.default_rng(0)
    silent = miniature.window(rng, 8, prompt=6).head(5)
    groups = [[miniature.trajectory(silent)], *self.windows(0)]
    _, [(_, batch)] = self.probed(groups, versions=(0,))
    self.assertEqual(batch.segment_ids.max(), 1)

  def test_tokens_after_a_seam_are_left_out(self):
    window = miniature.window(np.random.default_rng(0), 12, prompt=3)
    sampled = np.flatnonzero(window.loss_mask)
    self.assertIs(loop.before_seam(window), window)
    for seam in sampled[1:]:
      versions = window.weight_versions.copy()
      versions[sampled[sampled >= seam]] = 1
      cut = loop.before_seam(
        dataclasses.replace(window, weight_versions=versions)
      )
      self.assertEqual(cut.tokens.size, seam)
      self.assertEqual(set(cut.weight_versions[cut.loss_mask]), {0})


class DiagnosticsTest(parameterized.TestCase):
  def test_means_over_the_trained_tokens(self):
    sums = loss.Sums(
      loss=0.5, tokens=4.0, off_policy_kl=2.0, truncated=1.0, singletons=3.0
    )
    self.assertEqual(
      loop.diagnostics(sums, 7.0),
      {
        'train/offpolicy_kl': 0.5,
        'train/truncated_fraction': 0.25,
        'train/singleton_fraction': 0.75,
        'train/grad_norm': 7.0,
      },
    )

  @parameterized.parameters((np.nan, 1.0), (0.5, np.inf))
  def test_what_is_not_finite_stops_the_run(self, value, norm):
    sums = loss.Sums(value, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(FloatingPointError, match='not finite'):
      loop.diagnostics(sums, norm)
