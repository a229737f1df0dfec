"""One sandbox and one tokenizer for all tests of the folder."""

import pytest

from swe17_jax.rollout import chat as chats
from swe17_jax.tasks import sandbox as sandbox_lib

TEXTS = (
  'Fix the bug.\n1|def f(x):\n2|  return x - 1\n',
  '# line 2 looks wrong\nedit 2|  return x + 1\ntest\nsubmit',
  'f(1) gave 0, expected 2 edited error: no such line ok',
)


@pytest.fixture(scope='session')
def box():
  with sandbox_lib.Sandbox() as sandbox:
    yield sandbox


@pytest.fixture(scope='session')
def chat():
  return chats.Chat(chats.train_tokenizer(TEXTS, vocab_size=300))
