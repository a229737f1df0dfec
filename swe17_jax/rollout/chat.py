"""Text to token ids and back, for the agent of the quickstart.

A conversation is a list of parts, each opened by a role token; what the agent
writes ends with `<|end|>`, its stop token:

    <|user|>task<|agent|>...<|end|><|tool|>observation<|agent|>...<|end|>

Later turns are appended to the recorded ids: what the model wrote is never
decoded and encoded again, since another split of the same text would be
another action (token drift).

The tokenizer is a byte-level BPE of the `tokenizers` library, trained on the
task set's own text; it can encode anything.
"""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

PAD, USER, AGENT, TOOL, END = (
  '<|pad|>',
  '<|user|>',
  '<|agent|>',
  '<|tool|>',
  '<|end|>',
)
# Line numbers, line breaks with indentation, words with the space before
# them, single digits, and operators are the pieces that merges stay inside.
_PIECES = r'\n\d+\||\n *| ?[A-Za-z_]+| ?\d| ?[^\sA-Za-z_\d]+|\s+'


def train_tokenizer(
  texts: Iterable[str], *, vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains a byte-level BPE; the same texts give the same tokenizer."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_PIECES), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[PAD, USER, AGENT, TOOL, END],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  return tokenizer


class Chat:
  """Renders the parts of a conversation with one tokenizer."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    self._tokenizer = tokenizer
    ids = {name: tokenizer.token_to_id(name) for name in (USER, AGENT, TOOL)}
    self.end_id = tokenizer.token_to_id(END)
    if None in (*ids.values(), self.end_id):
      raise ValueError(
        f'the tokenizer lacks one of {USER}, {AGENT}, {TOOL}, {END}; was it '
        'made by train_tokenizer?'
      )
    self._role = ids

  @classmethod
  def from_file(cls, path: str) -> 'Chat':
    """Reads a `tokenizer.json`."""
    return cls(tokenizers.Tokenizer.from_file(str(path)))

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text; role words in it stay plain text."""
    # Splitting at '<|' keeps text from becoming a special token.
    pieces = text.split('<|')
    ids = list(self._tokenizer.encode(pieces[0]).ids)
    for piece in pieces[1:]:
      ids += self._tokenizer.encode('<').ids
      ids += self._tokenizer.encode('|' + piece).ids
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, without the final end token."""
    ids = [int(i) for i in ids]
    if ids and ids[-1] == self.end_id:
      ids = ids[:-1]
    return self._tokenizer.decode(ids, skip_special_tokens=False)

  def opening(self, task: str) -> list[int]:
    """Returns the prompt of the first turn."""
    return [self._role[USER], *self.encode(task), self._role[AGENT]]

  def observation(self, text: str) -> list[int]:
    """Returns what follows a turn of the agent and asks for the next."""
    return [self._role[TOOL], *self.encode(text), self._role[AGENT]]
