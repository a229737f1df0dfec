"""Small correct programs and the arguments of their hidden calls.

Each source is 90-220 characters of plain Python. Expected values are not
written down: `micro_repair` computes them by running the correct program.
"""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Program:
  """A correct function and its calls.

  Attributes:
    source: one function definition, 2-space indentation, ends in a newline.
    arguments: one list of positional, JSON-able arguments per hidden call.
  """

  source: str
  arguments: tuple[list[Any], ...]

  @property
  def name(self) -> str:
    """Name of the function that `source` defines."""
    return self.source.removeprefix('def ').partition('(')[0]

  def calls(self) -> tuple[str, ...]:
    """Canonical JSON of each argument list."""
    return tuple(json.dumps(args, sort_keys=True) for args in self.arguments)


def _parse(text: str) -> tuple[Program, ...]:
  """Reads blocks of a source and, at column 0, a JSON list of its calls."""
  programs = []
  for block in text.strip().split('\n\n'):
    source, _, calls = block.partition('\n[')
    programs.append(Program(source + '\n', tuple(json.loads('[' + calls))))
  return tuple(programs)


_TEXT = """
def binary_search(a, x):
  lo, hi = 0, len(a) - 1
  while lo <= hi:
    m = (lo + hi) // 2
    if a[m] == x:
      return m
    if a[m] < x:
      lo = m + 1
    else:
      hi = m - 1
  return -1
[[[1, 3, 5, 7, 9], 7], [[1, 3, 5, 7, 9], 1], [[1, 3, 5, 7, 9], 9],
 [[1, 3, 5, 7, 9], 4], [[1, 3, 5, 7, 9], 0], [[1, 3, 5, 7, 9], 10], [[2, 4], 4],
 [[2], 2], [[], 3]]

def run_length(s):
  out = []
  for c in s:
    if out and out[-1][0] == c:
      out[-1][1] += 1
    else:
      out.append([c, 1])
  return out
[["aab"], [""], ["a"], ["abc"], ["aaaa"], ["abba"], ["xxyyyx"]]

def bubble_sort(a):
  n = len(a)
  for i in range(n):
    for j in range(n - i - 1):
      if a[j] > a[j + 1]:
        a[j], a[j + 1] = a[j + 1], a[j]
  return a
[[[3, 1, 2]], [[]], [[1]], [[2, 1]], [[5, 4, 3, 2, 1]], [[1, 2, 3]],
 [[4, -1, 4, 0]], [[2, 3, 9, 1, 7, 7]]]

def two_sum(a, t):
  for i in range(len(a)):
    for j in range(i + 1, len(a)):
      if a[i] + a[j] == t:
        return [i, j]
  return []
[[[2, 7, 11], 9], [[3, 3], 6], [[1, 2, 3], 6], [[], 1], [[5], 5],
 [[1, 4, 6, 8], 14], [[0, 4, 3, 0], 0], [[3, 2, 4], 6]]

def power_mod(b, e, m):
  r = 1
  b = b % m
  while e > 0:
    if e % 2 == 1:
      r = r * b % m
    b = b * b % m
    e = e // 2
  return r
[[2, 10, 1000], [3, 0, 7], [5, 1, 7], [7, 3, 5], [10, 5, 9], [2, 6, 13],
 [12, 4, 11]]

def transpose(m):
  out = []
  for j in range(len(m[0])):
    row = []
    for i in range(len(m)):
      row.append(m[i][j])
    out.append(row)
  return out
[[[[1, 2], [3, 4]]], [[[1, 2, 3]]], [[[1], [2], [3]]], [[[7]]],
 [[[1, 2, 3], [4, 5, 6]]], [[[0, 1], [2, 3], [4, 5]]]]

def rotate(a, k):
  n = len(a)
  if n == 0:
    return a
  k = k % n
  return a[n - k:] + a[:n - k]
[[[1, 2, 3], 1], [[1, 2, 3], 0], [[1, 2, 3], 5], [[], 2], [[4], 3],
 [[1, 2, 3, 4], 2], [[1, 2, 3, 4, 5], -1]]

def second_max(a):
  x, y = min(a), min(a)
  for v in a:
    if v > x:
      x, y = v, x
    elif v > y and v < x:
      y = v
  return y
[[[1, 2, 3]], [[3, 2, 1]], [[5, 5]], [[4, 9, 9, 2]], [[7]], [[1, 8, 3, 6]],
 [[-1, -5, -3]]]

def caesar(s, k):
  out = ''
  for c in s:
    if 'a' <= c <= 'z':
      i = ord(c) - 97 + k
      c = chr(i % 26 + 97)
    out += c
  return out
[["abc", 1], ["xyz", 3], ["", 5], ["a b!", 2], ["Hello", -1], ["zoo", 26],
 ["az", 25]]

def merge(a, b):
  out, i, j = [], 0, 0
  while i < len(a) and j < len(b):
    if a[i] <= b[j]:
      out.append(a[i])
      i += 1
    else:
      out.append(b[j])
      j += 1
  return out + a[i:] + b[j:]
[[[1, 3], [2, 4]], [[], [1]], [[1], []], [[1, 2], [3, 4, 5]], [[5, 6], [1, 2]],
 [[1, 1], [1]], [[0, 7, 9], [3, 8]]]

def insert_sorted(a, x):
  i = len(a)
  while i > 0 and a[i - 1] > x:
    i -= 1
  return a[:i] + [x] + a[i:]
[[[1, 3], 2], [[], 5], [[1, 2], 3], [[2, 3], 1], [[2, 4, 6], 4],
 [[1, 5, 7, 9], 6], [[0], 0]]

def lcm(a, b):
  x, y = a, b
  while y != 0:
    x, y = y, x % y
  if x == 0:
    return 0
  return a * b // x
[[4, 6], [3, 5], [0, 0], [7, 7], [1, 9], [10, 4], [12, 18]]

def max_gap(a):
  best = 0
  for i in range(1, len(a)):
    d = abs(a[i] - a[i - 1])
    if d > best:
      best = d
  return best
[[[1, 4]], [[]], [[3]], [[9, 1, 2]], [[2, 2]], [[1, 2, 8]], [[5, 3, 4, 10, 9]]]

def chunks(a, n):
  out = []
  i = 0
  while i < len(a):
    out.append(a[i:i + n])
    i += n
  return out
[[[1, 2, 3], 2], [[], 3], [[1], 1], [[1, 2, 3, 4], 2], [[1, 2, 3, 4, 5], 3],
 [[7, 8], 5]]

def find_sub(s, t):
  n = len(t)
  for i in range(len(s) - n + 1):
    if s[i:i + n] == t:
      return i
  return -1
[["hello", "ll"], ["hello", "x"], ["aaa", "a"], ["abc", "c"], ["abc", "abcd"],
 ["", ""], ["abab", "bab"]]

def hamming(a, b):
  n = abs(len(a) - len(b))
  for x, y in zip(a, b):
    if x != y:
      n += 1
  return n
[["abc", "abd"], ["", ""], ["a", "abc"], ["xyz", "x"], ["same", "same"],
 ["abcd", "dcba"]]

def isqrt(n):
  lo, hi = 0, n + 1
  while hi - lo > 1:
    m = (lo + hi) // 2
    if m * m <= n:
      lo = m
    else:
      hi = m
  return lo
[[0], [1], [2], [3], [4], [8], [9], [15], [26], [100]]

def zip_sum(a, b):
  out = []
  for i in range(max(len(a), len(b))):
    x = a[i] if i < len(a) else 0
    y = b[i] if i < len(b) else 0
    out.append(x + y)
  return out
[[[1, 2], [3, 4]], [[], []], [[1], [2, 3]], [[4, 5, 6], [1]], [[], [7]],
 [[1, 0], [2]]]

def count_pairs(a, k):
  n = 0
  for i in range(len(a)):
    for j in range(i):
      if abs(a[i] - a[j]) == k:
        n += 1
  return n
[[[1, 3, 5], 2], [[], 1], [[2, 2, 2], 0], [[5, 1], 4], [[1, 2, 3, 4], 1],
 [[8, 6, 2], 6], [[1, 9], 3]]

def triangle(a, b, c):
  if a + b <= c or b + c <= a or a + c <= b:
    return 0
  if a == b and b == c:
    return 3
  if a == b or b == c or a == c:
    return 2
  return 1
[[3, 3, 3], [3, 4, 5], [2, 2, 3], [3, 2, 2], [2, 3, 2], [1, 2, 3], [3, 1, 2],
 [1, 3, 2], [1, 1, 5], [5, 1, 1], [1, 5, 1]]
"""

PROGRAMS = _parse(_TEXT)
