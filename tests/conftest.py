"""What every test needs before its first import of JAX.

The variables are set in the environment, not through `jax.config`: tests of
the packages that have no JAX do not pay for importing it, and programs that
tests start inherit the same eight devices.
"""

import os

from absl import flags

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')


def pytest_configure(config):
  """Registers the markers; lets absl code read flags that nobody parsed."""
  config.addinivalue_line('markers', 'slow: seconds to minutes; --slow')
  config.addinivalue_line('markers', 'tpu: needs a TPU; skips with a reason')
  config.addinivalue_line('markers', 'gpu: needs a GPU; skips with a reason')
  flags.FLAGS.mark_as_parsed()
