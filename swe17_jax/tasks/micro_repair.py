"""The quickstart's tasks: a small function with one wrong line.

A bug is one edit at the text offsets of one AST node, so the rest of the
source keeps its formatting. A bug is kept when the sandbox shows that at
least one hidden call fails. Nothing here draws random numbers: order and
split come from SHA-256 of the seed and the bug, so they are the same on
every machine and every Python.

The held-out tasks are (function, bug) pairs that training never sees, of
functions that it does see; where a line has several bugs, at least one of
them is in training.

Example:
  >>> with sandbox.Sandbox() as box:
  ...   tasks = generate(seed=0, sandbox=box)
"""

import ast
import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

from swe17_jax.core import records
from swe17_jax.tasks import micro_functions
from swe17_jax.tasks import sandbox as sandbox_lib

INSTRUCTION = 'Fix the bug.'
BUGS_PER_FUNCTION = 60  # at most, so that no function dominates
HELDOUT_FRACTION = 0.25
_COMPARE = {
  ast.Lt: ('<', ('<=', '>')),
  ast.LtE: ('<=', ('<', '>=')),
  ast.Gt: ('>', ('>=', '<')),
  ast.GtE: ('>=', ('>', '<=')),
  ast.Eq: ('==', ('!=', '>=')),
  ast.NotEq: ('!=', ('==', '<')),
  ast.In: ('in', ('not in',)),
}
_ARITHMETIC = {
  ast.Add: ('+', ('-', '*')),
  ast.Sub: ('-', ('+',)),
  ast.Mult: ('*', ('+', '-')),
  ast.FloorDiv: ('//', ('/', '%')),
  ast.Mod: ('%', ('//', '*')),
}


@dataclasses.dataclass(frozen=True)
class Bug:
  """One edit of one line.

  Attributes:
    line: 1-based.
    kind: family of the edit, such as 'compare'.
    change: 'old -> new', the edited text alone.
    original: the correct line.
    buggy: the wrong line.
    source: the whole program with the wrong line.
  """

  line: int
  kind: str
  change: str
  original: str
  buggy: str
  source: str


def generate(
  *, seed: int, sandbox: sandbox_lib.Sandbox
) -> tuple[records.Task, ...]:
  """Returns all tasks, grouped by function; a pure function of the seed.

  Raises:
    SandboxError: the sandbox does not work.
    ValueError: a correct program fails its own calls.
  """
  tasks: list[records.Task] = []
  for program in micro_functions.PROGRAMS:
    tasks.extend(_program_tasks(program, seed, sandbox))
  return tuple(tasks)


def _program_tasks(program, seed, sandbox) -> list[records.Task]:
  name, calls = program.name, program.calls()
  [gold] = sandbox.run([sandbox_lib.Job(program.source, name, calls)])
  if None in gold.outputs:
    raise ValueError(f'{name} fails its own calls: {gold.error}')
  hidden = tuple(map(records.Call, calls, gold.outputs))
  kept: list[tuple[Bug, records.Call]] = []
  for bug in _interleave(mutate(program.source), f'{seed}/{name}'):
    if len(kept) == BUGS_PER_FUNCTION:
      break
    [result] = sandbox.run([sandbox_lib.Job(bug.source, name, calls)])
    if result.outputs != gold.outputs:
      shown = hidden[_shown(result.outputs, gold.outputs)]
      kept.append((bug, shown))
  heldout = _heldout([bug for bug, _ in kept], f'{seed}/{name}/split')
  names = collections.Counter()
  tasks = []
  for bug, shown in kept:
    task_id = f'{name}/L{bug.line}/{bug.kind}/{bug.change}'
    names[task_id] += 1
    if names[task_id] > 1:  # the same edit at another place of the line
      task_id += f' #{names[task_id]}'
    split = 'heldout' if bug in heldout else 'train'
    tasks.append(_task(task_id, split, name, bug, shown, hidden))
  return tasks


def _task(task_id, split, name, bug, shown, hidden) -> records.Task:
  return records.Task(
    task_id=task_id,
    split=split,
    instruction=INSTRUCTION,
    files={'solution.py': bug.source},
    entry=name,
    visible=(shown,),
    hidden=hidden,
    metadata={
      'function': name,
      'line': str(bug.line),
      'kind': bug.kind,
      'original': bug.original,
      'buggy': bug.buggy,
    },
  )


def _shown(outputs: Sequence[str | None], expected: Sequence[str]) -> int:
  """Index of the failing call to show: a wrong value before no value."""
  pairs = enumerate(zip(outputs, expected))
  failing = [i for i, (output, value) in pairs if output != value]
  wrong = [i for i in failing if outputs[i] is not None]
  return (wrong or failing)[0]


def _order(salt: str, bug: Bug) -> str:
  key = f'{salt}/{bug.line}/{bug.buggy}'
  return hashlib.sha256(key.encode()).hexdigest()


def _interleave(bugs: Sequence[Bug], salt: str) -> list[Bug]:
  """Orders bugs so that every prefix is spread over lines and kinds.

  Wrong variables are the most numerous by far, so they wait twice as long.
  """
  ordered = sorted(bugs, key=lambda bug: _order(salt, bug))
  seen = collections.Counter()
  ranks = {}
  for bug in ordered:
    place = (bug.line, bug.kind)
    seen[place] += 2 if bug.kind == 'variable' else 1
    ranks[bug] = (seen[place], _order(salt, bug))
  return sorted(ordered, key=ranks.__getitem__)


def _heldout(bugs: Sequence[Bug], salt: str) -> set[Bug]:
  """Picks the held-out bugs.

  One bug of each line stays in training, and so does a wrong line that two
  bugs share, so that training shows no held-out line of its function.
  """
  ordered = sorted(bugs, key=lambda bug: _order(salt, bug))
  left = collections.Counter(bug.line for bug in ordered)
  same = collections.Counter(bug.buggy for bug in ordered)
  wanted = round(HELDOUT_FRACTION * len(ordered))
  chosen: set[Bug] = set()
  for bug in ordered:
    free = left[bug.line] > 1 and same[bug.buggy] == 1
    if len(chosen) < wanted and free:
      chosen.add(bug)
      left[bug.line] -= 1
  return chosen


def mutate(source: str) -> tuple[Bug, ...]:
  """Returns every one-line edit of a program that still parses, once each."""
  lines = source.splitlines()
  bugs: dict[str, Bug] = {}
  for kind, line, start, stop, new in _edits(source):
    old = lines[line - 1]
    buggy = old[:start] + new + old[stop:]
    text = '\n'.join([*lines[: line - 1], buggy, *lines[line:]]) + '\n'
    if buggy == old or text in bugs or not _parses(text):
      continue
    change = f'{old[start:stop].strip()} -> {new.strip()}'
    bugs[text] = Bug(line, kind, change, old, buggy, text)
  return tuple(bugs.values())


def _parses(text: str) -> bool:
  try:
    compile(text, 'solution.py', 'exec')
  except SyntaxError:
    return False
  return True


Edit = tuple[str, int, int, int, str]  # kind, line, start, stop, new text


def _edits(source: str) -> Iterator[Edit]:
  """Yields edits in the order of the tree; offsets are within the line."""
  tree = ast.parse(source)
  lines = source.splitlines()
  names = sorted(
    {
      node.arg if isinstance(node, ast.arg) else node.id
      for node in ast.walk(tree)
      if isinstance(node, ast.arg)
      or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
  )
  for node in ast.walk(tree):
    yield from _operator_edits(node, lines)
    yield from _flow_edits(node, lines)
    yield from _value_edits(node, lines, names)
    yield from _bound_edits(node, lines)


def _text(node: ast.AST, lines: Sequence[str]) -> str:
  return lines[node.lineno - 1][node.col_offset : node.end_col_offset]


def _replace(kind: str, node: ast.AST, new: str) -> Edit:
  return kind, node.lineno, node.col_offset, node.end_col_offset, new


def _between(kind, left, right, lines, old, news) -> Iterator[Edit]:
  """Edits of the operator `old` between two nodes of one line."""
  at = lines[left.lineno - 1].index(old, left.end_col_offset)
  for new in news:
    yield kind, left.lineno, at, at + len(old), new


def _operator_edits(node, lines) -> Iterator[Edit]:
  """Wrong comparison, arithmetic, assignment or boolean operator."""
  if isinstance(node, ast.Compare):
    places = [node.left, *node.comparators]
    for left, right, op in zip(places, places[1:], node.ops):
      if type(op) in _COMPARE:
        pair = _COMPARE[type(op)]
        yield from _between('compare', left, right, lines, *pair)
  elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
    pair = _ARITHMETIC[type(node.op)]
    yield from _between('arith', node.left, node.right, lines, *pair)
  elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
    old, news = _ARITHMETIC[type(node.op)]
    news = [*(f'{new}=' for new in news), '=']
    yield from _between(
      'assign', node.target, node.value, lines, f'{old}=', news
    )
  elif isinstance(node, ast.BoolOp):
    old, new = ('and', 'or') if isinstance(node.op, ast.And) else ('or', 'and')
    for left, right in zip(node.values, node.values[1:]):
      yield from _between('bool', left, right, lines, old, [new])


def _flow_edits(node, lines) -> Iterator[Edit]:
  """Negated condition, break and continue, True and False."""
  if isinstance(node, ast.If | ast.While):
    test = node.test
    plain = isinstance(test, ast.Compare) and isinstance(
      test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE
    )
    if plain or isinstance(test, ast.Name):
      yield _replace('negate', test, f'not {_text(test, lines)}')
  elif isinstance(node, ast.Break):
    yield _replace('flow', node, 'continue')
  elif isinstance(node, ast.Continue):
    yield _replace('flow', node, 'break')


def _value_edits(node, lines, names) -> Iterator[Edit]:
  """Wrong constant, wrong variable, swapped or lost function."""
  if isinstance(node, ast.Constant):
    if isinstance(node.value, bool):
      yield _replace('constant', node, str(not node.value))
    elif isinstance(node.value, int):
      yield _replace('constant', node, str(node.value + 1))
      if node.value:
        yield _replace('constant', node, str(node.value - 1))
  elif isinstance(node, ast.Name) and node.id in names:
    if isinstance(node.ctx, ast.Load):
      for name in names:
        yield _replace('variable', node, name)
  elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    other = {'min': 'max', 'max': 'min'}.get(node.func.id)
    texts = [_text(argument, lines) for argument in node.args]
    if other:
      yield _replace('call', node.func, other)
    elif node.func.id == 'abs':
      yield _replace('call', node, texts[0])
    elif len(texts) == 2:
      new = f'{node.func.id}({texts[1]}, {texts[0]})'
      yield _replace('call', node, new)


def _bound_edits(node, lines) -> Iterator[Edit]:
  """Off by one in range() and slices; a lost `+ 1` or `- 1`."""
  bounds: list[ast.AST | None] = []
  if isinstance(node, ast.Slice):
    bounds = [node.lower, node.upper]
  elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    bounds = list(node.args) if node.func.id == 'range' else []
  for bound in bounds:
    if isinstance(bound, ast.Name | ast.Call | ast.BinOp):
      for tail in (' + 1', ' - 1'):
        yield _replace('bound', bound, _text(bound, lines) + tail)
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
    if isinstance(node.right, ast.Constant) and node.right.value == 1:
      yield _replace('bound', node, _text(node.left, lines))
