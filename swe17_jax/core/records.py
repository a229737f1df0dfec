"""The nouns that cross a process border, validated when they are made.

Everything a rollout worker tells the trainer is one of these records. They
are frozen, hold numpy arrays only, and check their own alignment, because a
record that is off by one token trains the wrong token in silence
(SkyRL #1908, Search-R1 #21).

Alignment: in a `Window`, position `t` describes token `t`. `loss_mask[t]`
says that the model sampled token `t`; its log-probability, sampling mask and
`weight_version` stand at `t` too (the logits that produced it are those of
position `t - 1`). `routed_experts[t]` are the experts that token `t` used as
an *input*, so the last token of a window has none.

Format of a group (`group_to_bytes`): a NumPy `.npz` archive (zip, CRC-32 per
member, stored without pickles) with

    meta                        uint8 UTF-8 JSON: format, task_id, ..., turns
    {i}/{j}/tokens              int32[T]      window j of trajectory i
    {i}/{j}/loss_mask           bool[T]
    {i}/{j}/rollout_logprobs    float32[T]
    {i}/{j}/weight_versions     int32[T]      -1 where not sampled
    {i}/{j}/mask_token_ids      int32[N]
    {i}/{j}/mask_offsets        int32[T + 1]
    {i}/{j}/routed_experts      int16[T, L, A]  -1 = not recorded

A group is one object, written once: a reader sees all of it or nothing.

Example:
  >>> mask = SamplingMask.from_lists([[], [3, 5]])
  >>> mask.span(1).tolist()
  [3, 5]
"""

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FORMAT = 'swe17.group.1'

# What reading a damaged zip archive raises; RuntimeError: 'is encrypted'.
_UNREADABLE = (
  *(OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError),
  *(zipfile.BadZipFile, zlib.error),
)


class RecordError(ValueError):
  """A record breaks a rule of its format; it must not reach the trainer."""


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise RecordError(message)


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a task's entry function; both sides are JSON text."""

  arguments: str  # JSON list of positional arguments
  expected: str  # JSON value that the correct program returns


@dataclasses.dataclass(frozen=True)
class Task:
  """A problem for the agent and what judges it.

  `visible` calls may be shown to the agent; `hidden` calls decide. The
  expected values never enter a sandbox: it is handed arguments alone.
  """

  task_id: str
  split: str  # 'train' or 'heldout'
  instruction: str
  files: Mapping[str, str]  # path -> text, as the agent finds them
  entry: str  # name of the function under test
  visible: tuple[Call, ...]
  hidden: tuple[Call, ...]
  metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    _require(
      self.split in ('train', 'heldout'),
      f"Task.split must be 'train' or 'heldout', got {self.split!r}",
    )
    _require(bool(self.hidden), f'task {self.task_id!r} has no hidden calls')


@dataclasses.dataclass(frozen=True)
class SamplingMask:
  """Tokens that survived top-p/top-k at each position, as CSR.

  The kept tokens of position `t` are `token_ids[offsets[t]:offsets[t + 1]]`;
  an empty span means the full vocabulary (DeepSeek-V3.2, arXiv 2512.02556,
  "Keep Sampling Mask"; the layout is vLLM's and SGLang's).
  """

  token_ids: np.ndarray  # int32[N]
  offsets: np.ndarray  # int32[T + 1]

  def __post_init__(self):
    _require(
      self.offsets.ndim == 1
      and self.offsets.size >= 1
      and self.offsets[0] == 0
      and self.offsets[-1] == self.token_ids.size
      and bool((np.diff(self.offsets) >= 0).all()),
      'SamplingMask.offsets must rise from 0 to len(token_ids)='
      f'{self.token_ids.size}, got {self.offsets}',
    )

  def __len__(self) -> int:
    return self.offsets.size - 1

  @classmethod
  def empty(cls, length: int) -> 'SamplingMask':
    """The full vocabulary at each of `length` positions."""
    return cls(np.zeros(0, np.int32), np.zeros(length + 1, np.int32))

  @classmethod
  def from_lists(cls, spans: Sequence[Sequence[int]]) -> 'SamplingMask':
    """Builds the CSR form from one list of token ids per position."""
    sizes = [len(span) for span in spans]
    flat = [token for span in spans for token in span]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return cls(np.asarray(flat, np.int32), offsets)

  def span(self, position: int) -> np.ndarray:
    """Returns the kept token ids of one position."""
    return self.token_ids[self.offsets[position] : self.offsets[position + 1]]

  def head(self, length: int) -> 'SamplingMask':
    """Returns the masks of the first `length` positions."""
    offsets = self.offsets[: length + 1]
    return SamplingMask(self.token_ids[: offsets[-1]], offsets)

  def sizes(self) -> np.ndarray:
    """Returns int32[T], the number of kept tokens (0 = full vocabulary)."""
    return np.diff(self.offsets)

  @classmethod
  def concatenate(cls, masks: Sequence['SamplingMask']) -> 'SamplingMask':
    """Joins masks of consecutive spans of positions."""
    sizes = np.concatenate([mask.sizes() for mask in masks])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return cls(np.concatenate([mask.token_ids for mask in masks]), offsets)


# Arrays of a window and how many axes they have.
_AXES = {
  'tokens': 1,
  'loss_mask': 1,
  'rollout_logprobs': 1,
  'weight_versions': 1,
  'routed_experts': 3,
}


@dataclasses.dataclass(frozen=True)
class Window:
  """The tokens between two compactions of a trajectory; append-only.

  All arrays have one entry per token, see the module docstring.
  """

  tokens: np.ndarray  # int32[T]
  loss_mask: np.ndarray  # bool[T]
  rollout_logprobs: np.ndarray  # float32[T], 0 where not sampled
  weight_versions: np.ndarray  # int32[T], -1 where not sampled
  sampling_mask: SamplingMask  # T positions
  routed_experts: np.ndarray  # int16[T, L, A]

  def __post_init__(self):
    lengths = {'sampling_mask': len(self.sampling_mask)}
    for name, axes in _AXES.items():
      shape = getattr(self, name).shape
      _require(
        len(shape) == axes,
        f'Window.{name} has shape {shape}, must have {axes} axes',
      )
      lengths[name] = shape[0]
    length = self.tokens.size
    for name, size in lengths.items():
      _require(
        size == length,
        f'Window.{name} has {size} entries for {length} tokens; every array '
        'of a window has one entry per token',
      )
    _require(
      not (length and self.loss_mask[0]),
      'the first token of a window cannot be sampled: nothing predicts it',
    )
    sampled = self.loss_mask
    _require(
      bool((self.weight_versions[sampled] >= 0).all()),
      'a sampled token has no weight_version',
    )
    _require(
      bool(np.isfinite(self.rollout_logprobs).all()),
      'rollout_logprobs must be finite',
    )
    sizes = self.sampling_mask.sizes()
    _require(
      not sizes[~sampled].any(),
      'a sampling mask stands at a token that was not sampled',
    )
    masked = sizes > 0
    rows = np.repeat(np.arange(length), sizes)
    found = np.zeros(length, bool)
    found[rows[self.sampling_mask.token_ids == self.tokens[rows]]] = True
    _require(
      bool(found[masked].all()),
      'a sampled token is not in its own sampling mask (positions '
      f'{np.flatnonzero(masked & ~found)[:5].tolist()}); the engine must '
      'return the support that it sampled from',
    )

  def head(self, length: int) -> 'Window':
    """Returns the first `length` tokens as a window of their own."""
    return Window(
      tokens=self.tokens[:length],
      loss_mask=self.loss_mask[:length],
      rollout_logprobs=self.rollout_logprobs[:length],
      weight_versions=self.weight_versions[:length],
      sampling_mask=self.sampling_mask.head(length),
      routed_experts=self.routed_experts[:length],
    )


@dataclasses.dataclass(frozen=True)
class Turn:
  """One model call and what the environment answered."""

  window: int  # index of its window
  start: int  # first sampled token in that window
  stop: int  # one past the last sampled token
  tool: str  # what the agent called: 'test', 'submit', 'malformed', ...
  tool_seconds: float


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the verifier found; an infra error is not a failure."""

  passed: bool
  calls_passed: int
  calls: int
  detail: str = ''
  infra_error: str | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One agent run on one task: windows of tokens, turns and a verdict."""

  task_id: str
  group_index: int  # position of its group in the order of dispatch
  windows: tuple[Window, ...]
  turns: tuple[Turn, ...]
  verdict: Verdict
  reward: float
  finish: str  # 'submit', 'turns', 'tokens', 'abort'
  text: str = ''  # the transcript, for people
  wall_s: float = 0.0

  def __post_init__(self):
    for turn in self.turns:
      _require(
        0 <= turn.window < len(self.windows)
        and 0 < turn.start <= turn.stop
        and turn.stop <= self.windows[turn.window].tokens.size,
        f'{turn} lies outside its window',
      )
    _require(
      bool(np.isfinite(self.reward)), f'reward={self.reward} must be finite'
    )

  @property
  def sampled_tokens(self) -> int:
    """Number of tokens that the model sampled, over all windows."""
    return int(sum(window.loss_mask.sum() for window in self.windows))


_ARRAYS = ('tokens', 'loss_mask', 'rollout_logprobs', 'weight_versions')
_DTYPES = {
  'tokens': np.int32,
  'loss_mask': np.bool_,
  'rollout_logprobs': np.float32,
  'weight_versions': np.int32,
  'mask_token_ids': np.int32,
  'mask_offsets': np.int32,
  'routed_experts': np.int16,
}


def group_to_bytes(group: Sequence[Trajectory]) -> bytes:
  """Serialises the trajectories of one group; the format is above."""
  arrays: dict[str, np.ndarray] = {}
  meta: list[dict[str, Any]] = []
  for i, trajectory in enumerate(group):
    fields = {
      field.name: getattr(trajectory, field.name)
      for field in dataclasses.fields(trajectory)
      if field.name not in ('windows', 'turns', 'verdict')
    }
    fields['verdict'] = dataclasses.asdict(trajectory.verdict)
    fields['turns'] = [dataclasses.asdict(turn) for turn in trajectory.turns]
    fields['windows'] = len(trajectory.windows)
    meta.append(fields)
    for j, window in enumerate(trajectory.windows):
      named = {name: getattr(window, name) for name in _ARRAYS}
      named['mask_token_ids'] = window.sampling_mask.token_ids
      named['mask_offsets'] = window.sampling_mask.offsets
      named['routed_experts'] = window.routed_experts
      for name, array in named.items():
        arrays[f'{i}/{j}/{name}'] = np.asarray(array, _DTYPES[name])
  header = json.dumps({'format': FORMAT, 'trajectories': meta}).encode()
  arrays['meta'] = np.frombuffer(header, np.uint8)
  buffer = io.BytesIO()
  np.savez_compressed(buffer, **arrays)
  return buffer.getvalue()


def group_from_bytes(data: bytes) -> tuple[Trajectory, ...]:
  """Reads what `group_to_bytes` wrote.

  Raises:
    RecordError: the bytes are cut off, damaged, of another format, or their
      arrays do not fit together.
  """
  try:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
      arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays['meta'].tobytes())
  except _UNREADABLE as error:
    raise RecordError(
      f'not a readable group record of {len(data)} bytes ({error}); fetch it '
      'again, and drop it if it stays unreadable'
    ) from error
  _require(
    isinstance(meta, dict) and meta.get('format') == FORMAT,
    f'group record has another format than {FORMAT!r}',
  )
  try:
    return tuple(
      _trajectory(index, fields, arrays)
      for index, fields in enumerate(meta['trajectories'])
    )
  except (KeyError, TypeError) as error:
    raise RecordError(f'group record lacks or misnames {error}') from error


def _trajectory(index, fields, arrays) -> Trajectory:
  windows = tuple(
    _window({name: arrays[f'{index}/{j}/{name}'] for name in _DTYPES})
    for j in range(fields['windows'])
  )
  parts = {
    'windows': windows,
    'turns': tuple(Turn(**turn) for turn in fields['turns']),
    'verdict': Verdict(**fields['verdict']),
  }
  return Trajectory(**{**fields, **parts})


def _window(named) -> Window:
  for name, dtype in _DTYPES.items():
    _require(
      named[name].dtype == dtype,
      f'{name} has dtype {named[name].dtype}, must be {np.dtype(dtype)}',
    )
  ids, offsets = named.pop('mask_token_ids'), named.pop('mask_offsets')
  return Window(sampling_mask=SamplingMask(ids, offsets), **named)
