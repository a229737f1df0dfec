"""One sandbox and one generated task set for all tests of the folder."""

import pytest

from swe17_jax.tasks import micro_repair
from swe17_jax.tasks import sandbox as sandbox_lib


@pytest.fixture(scope='session')
def box():
  with sandbox_lib.Sandbox() as sandbox:
    yield sandbox


@pytest.fixture(scope='session')
def tasks(box):
  return micro_repair.generate(seed=0, sandbox=box)
