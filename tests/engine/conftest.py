"""Engines that tests share; each compiles once."""

import pytest

from swe17_jax.engine import jax_engine
from tests.engine.served import CONFIG, GQA, MLA, SINGLE, copied, random_weights


@pytest.fixture(scope='module', params=[GQA, MLA], ids=['gqa', 'mla'])
def model(request):
  return request.param


@pytest.fixture(scope='module')
def engine(model):
  made = jax_engine.JaxEngine(model, CONFIG)
  made.load_base(copied(random_weights(model, 0)), weight_version=0)
  yield made
  made.close()


@pytest.fixture(scope='module')
def shared():
  made = jax_engine.JaxEngine(GQA, SINGLE)
  yield made
  made.close()


@pytest.fixture
def single(shared):
  """An engine with one slot that serves version 0 of `GQA`."""
  shared.load_base(copied(random_weights(GQA, 0)), weight_version=0)
  return shared


@pytest.fixture
def doomed():
  """As `single`, to be broken."""
  made = jax_engine.JaxEngine(GQA, SINGLE)
  made.load_base(copied(random_weights(GQA, 0)), weight_version=0)
  yield made
  made.close()
