"""Text to ids and back: nothing is lost and nothing becomes a role."""

import functools
import subprocess
import sys

import hypothesis
import tokenizers
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from swe17_jax.rollout import chat
from tests.rollout.conftest import TEXTS

ROLES = (chat.PAD, chat.USER, chat.AGENT, chat.TOOL, chat.END)


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
  return chat.train_tokenizer(TEXTS, vocab_size=300)


@functools.cache
def _chat() -> chat.Chat:
  return chat.Chat(_tokenizer())


def _special() -> set[int]:
  return {_tokenizer().token_to_id(role) for role in ROLES}


# Any text that UTF-8 can carry, and what looks like a role or a part of one.
_TEXT = st.lists(
  st.one_of(
    st.text(st.characters(exclude_categories=['Cs'])),
    st.sampled_from([*ROLES, '<|', '|>', '<', '|', '<|<|end|>|>', 'end']),
    st.sampled_from(['  return x', '\n12|', ' ', '\n\n', '\t', '\r\n', '\0']),
  ),
  max_size=8,
).map(''.join)


class EncodeTest(parameterized.TestCase):
  @hypothesis.given(_TEXT)
  @hypothesis.settings(deadline=None, max_examples=300)
  def test_round_trip_without_a_role(self, text):
    ids = _chat().encode(text)
    self.assertEqual(_chat().decode(ids), text)
    self.assertFalse(_special() & set(ids))

  @hypothesis.given(_TEXT, _TEXT)
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_roles_stand_where_they_are_put(self, task, observation):
    end = _chat().end_id
    user, agent, tool = map(
      _tokenizer().token_to_id, (chat.USER, chat.AGENT, chat.TOOL)
    )
    opening = _chat().opening(task)
    self.assertEqual(opening, [user, *_chat().encode(task), agent])
    answer = _chat().observation(observation)
    self.assertEqual(answer, [tool, *_chat().encode(observation), agent])
    self.assertEqual(
      _chat().decode([*opening, end]), f'{chat.USER}{task}{chat.AGENT}'
    )

  @parameterized.named_parameters(*((role[2:-2], role) for role in ROLES))
  def test_a_role_word_is_many_tokens(self, role):
    ids = _chat().encode(role)
    self.assertGreater(len(ids), 2)
    self.assertEqual(_chat().decode(ids), role)

  def test_only_a_final_end_is_left_out(self):
    end, ids = _chat().end_id, _chat().encode('test')
    self.assertEqual(_chat().decode([*ids, end]), 'test')
    self.assertEqual(_chat().decode([*ids, end, end]), f'test{chat.END}')
    self.assertEqual(_chat().decode([end, *ids]), f'{chat.END}test')
    self.assertEqual(_chat().decode([]), '')
    self.assertEqual(_chat().decode([end]), '')

  def test_any_ids_decode(self):
    """A model that has learned nothing samples broken UTF-8, too."""
    for token in range(_tokenizer().get_vocab_size()):
      self.assertIsInstance(_chat().decode([token, token]), str)


class TrainTest(absltest.TestCase):
  def test_the_same_texts_give_the_same_tokenizer(self):
    again = chat.train_tokenizer(iter(TEXTS), vocab_size=300)
    self.assertEqual(again.to_str(), _tokenizer().to_str())

  def test_another_process_makes_the_same_tokenizer(self):
    program = (
      'from swe17_jax.rollout import chat\n'
      f'print(chat.train_tokenizer({TEXTS!r}, vocab_size=300).to_str())'
    )
    found = subprocess.run(
      [sys.executable, '-c', program],
      env={'PYTHONPATH': ':'.join(sys.path), 'PYTHONHASHSEED': '7'},
      capture_output=True,
      text=True,
      check=True,
      timeout=60,
    )
    self.assertEqual(found.stdout.strip(), _tokenizer().to_str())

  def test_merges_stay_inside_their_pieces(self):
    """Line numbers, indentation, words and digits; never two of them."""
    tokenizer = chat.train_tokenizer(TEXTS * 50, vocab_size=400)
    one = chat.Chat(tokenizer)
    text = '\n2|  return x - 1\n13|def f(x):'
    pieces = [one.decode([token]) for token in one.encode(text)]
    self.assertEqual(pieces[:6], ['\n2|', '  ', 'return', ' x', ' -', ' 1'])
    self.assertIn('def', pieces)

  def test_a_saved_tokenizer_is_read_back(self):
    path = self.create_tempfile('tokenizer.json').full_path
    _tokenizer().save(path)
    one = chat.Chat.from_file(path)
    self.assertEqual(one.encode(TEXTS[0]), _chat().encode(TEXTS[0]))
    self.assertEqual(one.end_id, _chat().end_id)

  def test_a_tokenizer_without_roles_is_refused(self):
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    with self.assertRaisesRegex(ValueError, 'made by train_tokenizer'):
      chat.Chat(other)


if __name__ == '__main__':
  absltest.main()
