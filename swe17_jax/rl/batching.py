"""Trajectories become microbatches of packed rows, all of one shape.

Windows are laid into rows of `row_tokens` by first-fit decreasing; windows of
one row are told apart by `segment_ids`. Rows are numbered by content (length,
then order of arrival), so the same trajectories make the same microbatches
on any machine.

Position `t` of a row holds what predicts token `t`: in the arrays below
`targets` is the row shifted left by one, and every per-token field of a
`Window` moves with its target. `tokens[t]` is the input, `targets[t]` the
next token, and `loss_mask[t]` says whether that next token was sampled.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swe17_jax.core import records


class Microbatch(NamedTuple):
  """One forward and backward. B rows of T tokens, N mask entries.

  Attributes:
    tokens: int32 [B, T].
    targets: int32 [B, T], the next token of the same window.
    positions: int32 [B, T], position in its window.
    segment_ids: int32 [B, T], 1, 2, ... in a row; 0 is padding.
    routed_experts: int16 [B, T, L, A]; -1 = not recorded.
    loss_mask: bool [B, T], at positions whose target was sampled.
    advantages: f32 [B, T].
    rollout_logprobs: f32 [B, T].
    mask_ids: int32 [N], kept tokens of all targets, row by row.
    mask_rows: int32 [N], flat position `b * T + t`; B * T is padding.
    singletons: bool [B, T], the target's mask holds one token.
  """

  tokens: np.ndarray
  targets: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  routed_experts: np.ndarray
  loss_mask: np.ndarray
  advantages: np.ndarray
  rollout_logprobs: np.ndarray
  mask_ids: np.ndarray
  mask_rows: np.ndarray
  singletons: np.ndarray


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Shapes of a microbatch."""

  row_tokens: int = 320  # T; no window may be longer
  rows: int = 14  # B, per microbatch
  min_mask_entries: int = 8192  # N grows from here in powers of two

  def __post_init__(self):
    if min(self.row_tokens, self.rows, self.min_mask_entries) < 1:
      raise ValueError(f'{self} must hold positive sizes')


def pack(
  windows: Sequence[records.Window],
  advantages: Sequence[float],
  config: BatchConfig,
) -> list[Microbatch]:
  """Packs windows, each with the advantage of its trajectory.

  Raises:
    ValueError: a window is longer than a row.
  """
  order = sorted(
    range(len(windows)), key=lambda i: (-windows[i].tokens.size, i)
  )
  rows: list[list[int]] = []
  room: list[int] = []
  for index in order:
    length = windows[index].tokens.size
    if length > config.row_tokens:
      raise ValueError(
        f'a window of {length} tokens is longer than row_tokens='
        f'{config.row_tokens}; raise it, or compact earlier'
      )
    for row, free in enumerate(room):
      if length <= free:
        rows[row].append(index)
        room[row] -= length
        break
    else:
      rows.append([index])
      room.append(config.row_tokens - length)
  return [
    _fill(rows[start : start + config.rows], windows, advantages, config)
    for start in range(0, len(rows), config.rows)
  ]


def _fill(rows, windows, advantages, config) -> Microbatch:
  shape = (config.rows, config.row_tokens)
  routed_shape = windows[rows[0][0]].routed_experts.shape[1:]
  out = Microbatch(
    tokens=np.zeros(shape, np.int32),
    targets=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    routed_experts=np.full((*shape, *routed_shape), -1, np.int16),
    loss_mask=np.zeros(shape, bool),
    advantages=np.zeros(shape, np.float32),
    rollout_logprobs=np.zeros(shape, np.float32),
    mask_ids=np.zeros(0, np.int32),
    mask_rows=np.zeros(0, np.int32),
    singletons=np.zeros(shape, bool),
  )
  mask_ids, mask_rows = [], []
  for row, members in enumerate(rows):
    start = 0
    for segment, index in enumerate(members, 1):
      window, length = windows[index], windows[index].tokens.size
      here = slice(start, start + length)
      before = slice(start, start + length - 1)  # predicts tokens 1 ... T - 1
      out.tokens[row, here] = window.tokens
      out.positions[row, here] = np.arange(length)
      out.segment_ids[row, here] = segment
      out.routed_experts[row, here] = window.routed_experts
      out.targets[row, before] = window.tokens[1:]
      out.loss_mask[row, before] = window.loss_mask[1:]
      out.rollout_logprobs[row, before] = window.rollout_logprobs[1:]
      out.advantages[row, before] = advantages[index]
      sizes = window.sampling_mask.sizes()[1:]
      out.singletons[row, before] = sizes == 1
      mask_ids.append(window.sampling_mask.token_ids)
      first = row * config.row_tokens + start
      mask_rows.append(np.repeat(np.arange(length - 1) + first, sizes))
      start += length
  ids, flat = np.concatenate(mask_ids), np.concatenate(mask_rows)
  size = config.min_mask_entries
  while size < ids.size:
    size *= 2
  padding = (0, size - ids.size)
  end = config.rows * config.row_tokens
  return out._replace(
    mask_ids=np.pad(ids, padding).astype(np.int32),
    mask_rows=np.pad(flat, padding, constant_values=end).astype(np.int32),
  )
