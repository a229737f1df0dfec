"""Tests of swe17_jax/analysis/heldout.py."""

import math

import numpy as np
from absl.testing import parameterized

from swe17_jax.analysis import heldout
from swe17_jax.core import dispatch, records, storage


def trajectory(
  task_id: str, passed: bool, *, text: str = '', infra: str | None = None
) -> records.Trajectory:
  """A record of 5 tokens, the last three of them sampled in one turn."""
  window = records.Window(
    tokens=np.arange(5, dtype=np.int32),
    loss_mask=np.asarray([0, 0, 1, 1, 1], bool),
    rollout_logprobs=np.zeros(5, np.float32),
    weight_versions=np.asarray([-1, -1, 0, 0, 0], np.int32),
    sampling_mask=records.SamplingMask.empty(5),
    routed_experts=np.zeros((5, 1, 2), np.int16),
  )
  return records.Trajectory(
    task_id=task_id,
    group_index=0,
    windows=(window,),
    turns=(records.Turn(0, 2, 5, 'submit', 0.0),),
    verdict=records.Verdict(passed, 7 if passed else 2, 7, infra_error=infra),
    reward=float(passed),
    finish='submit',
    text=text,
  )


class HeldoutTest(parameterized.TestCase):
  @parameterized.named_parameters(
    # z = 1.96, z^2 = 3.8415. 8 of 10: center (0.8 + 0.19207) / 1.38415 =
    # 0.71674; half 1.96 * sqrt(0.016 + 0.0096036) / 1.38415 = 0.22658.
    ('most', 8, 10, 0.49016, 0.94332),
    # 0 of 10: from 0 to z^2 / (10 + z^2) = 3.8415 / 13.8415.
    ('none', 0, 10, 0.0, 0.27753),
    # All of 10 is the mirror image.
    ('all', 10, 10, 0.72247, 1.0),
    # 1 of 2 is symmetric: half = 1.96 * sqrt(0.125 + 0.24009) / 2.92073.
    ('half', 1, 2, 0.09453, 0.90547),
    ('no_tasks', 0, 0, 0.0, 1.0),
  )
  def test_wilson_interval(self, solved, tasks, low, high):
    interval = heldout.SolveRate(solved, tasks).interval
    np.testing.assert_allclose(interval, (low, high), atol=1e-5)

  def test_the_interval_solves_its_equation(self):
    # Its bounds are the p with |rate - p| = z sqrt(p (1 - p) / n).
    for solved, tasks in ((1, 3), (30, 200), (199, 200)):
      rate = heldout.SolveRate(solved, tasks)
      for p in rate.interval:
        deviation = heldout.Z_95 * math.sqrt(p * (1 - p) / tasks)
        self.assertAlmostEqual(abs(rate.rate - p), deviation, places=12)

  def test_an_infra_error_is_neither_solved_nor_failed(self):
    group = [
      trajectory('f/L1/arith/+ -> -', True),
      trajectory('f/L2/arith/+ -> -', False),
      trajectory('f/L3/arith/+ -> -', False, infra='no sandbox'),
    ]
    self.assertEqual(heldout.solve_rate(group), heldout.SolveRate(1, 2))
    self.assertTrue(math.isnan(heldout.solve_rate(group[2:]).rate))

  def test_reads_versions_in_numerical_order(self):
    store = storage.MemoryStore()
    for version in (10, 0, 9):
      group = [trajectory(f't{version}', True)]
      store.write_once(
        dispatch.heldout_name(version), records.group_to_bytes(group)
      )
    self.assertEqual(heldout.versions(store), [0, 9, 10])
    self.assertEqual(heldout.read(store, 9)[0].task_id, 't9')

  def test_tables_by_function_and_kind(self):
    names = ('b/L1/arith/// -> /', 'a/L1/bool/and -> or', 'b/L2/bool/x -> y')
    before = [trajectory(name, False) for name in names]
    after = [trajectory(n, n != names[2]) for n in names]
    none, one, of_two = (
      heldout.SolveRate(0, 1),
      heldout.SolveRate(1, 1),
      heldout.SolveRate(0, 2),
    )
    half = heldout.SolveRate(1, 2)
    self.assertEqual(
      heldout.solve_table(before, after, key=heldout.function_of),
      [heldout.SolveRow('a', none, one), heldout.SolveRow('b', of_two, half)],
    )
    self.assertEqual(
      heldout.solve_table(before, after, key=heldout.kind_of),
      [
        heldout.SolveRow('arith', none, one),
        heldout.SolveRow('bool', of_two, half),
      ],
    )

  def test_examples_by_outcome_and_function(self):
    results = {  # task -> passed before, passed after
      'a/1': (True, False),
      'a/2': (False, True),
      'a/3': (False, True),
      'b/1': (False, True),
      'b/2': (False, False),
      'c/1': (False, False),
      'c/2': (True, True),
      'd/1': (True, True),
    }
    before = [trajectory(name, r[0]) for name, r in results.items()]
    after = [trajectory(name, r[1]) for name, r in reversed(results.items())]
    found = heldout.pairs(before, after)
    counts = {outcome: len(pairs) for outcome, pairs in found.items()}
    self.assertEqual(
      counts,
      {'learned': 3, 'still failing': 2, 'solved in both': 2, 'lost': 1},
    )
    chosen = [(p.outcome, p.before.task_id) for p in heldout.examples(found)]
    self.assertEqual(
      chosen,
      [
        ('learned', 'a/2'),
        ('learned', 'b/1'),
        ('still failing', 'c/1'),
        ('solved in both', 'd/1'),
      ],
    )

  def test_a_task_that_one_side_could_not_judge_is_no_pair(self):
    before = [trajectory('a/1', False), trajectory('a/2', False, infra='x')]
    after = [trajectory('a/1', True, infra='x'), trajectory('a/2', True)]
    self.assertEqual(sum(map(len, heldout.pairs(before, after).values())), 0)
