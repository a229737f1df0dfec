"""A rollout worker with the embedded engine: samples until the run ends.

Command:   python experiments/rollout.py --store=DIR_OR_URL --model=DIR \
             --tasks=FILE
Hardware:  1 CPU core

It shares nothing with the trainer but the store: it takes weights from there
(`weights/`) and leaves records there (`rollouts/`). train_rl.py starts one on
its own machine; any number of restarts is harmless.
"""

import asyncio
import dataclasses
import os
import pathlib
import signal
import sys
import threading

import program
from absl import flags, logging
from configs import tiny

from swe17_jax.core import safetensors_folder, storage
from swe17_jax.engine import jax_engine
from swe17_jax.model import config as model_config
from swe17_jax.rollout import chat, worker
from swe17_jax.tasks import dataset, sandbox
from swe17_jax.weights import controller

_STORE = flags.DEFINE_string(
  'store', None, 'Folder or gs:// URL of the run.', required=True
)
_MODEL = flags.DEFINE_string(
  'model', None, 'Folder with config.json and tokenizer.json.', required=True
)
_TASKS = flags.DEFINE_string('tasks', None, 'Task set (JSONL).', required=True)
_WITH_PARENT = flags.DEFINE_bool(
  'with_parent', False, 'Stop when standard input closes (the parent died).'
)
flags.adopt_module_key_flags(program)


def sample(config: tiny.RunConfig) -> None:
  """Samples every group of the run."""
  if _WITH_PARENT.value:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
  folder = safetensors_folder.open_folder(pathlib.Path(_MODEL.value))
  store = storage.open_store(_STORE.value)
  model = dataclasses.replace(
    model_config.from_hf(folder.config),
    expert_dispatch=config.model.expert_dispatch,
  )
  engine = jax_engine.JaxEngine(model, config.engine)
  weights = controller.Controller(store, engine, poll_s=0.05)
  stop = threading.Event()
  watcher = threading.Thread(target=weights.run, args=(stop,))
  watcher.start()
  try:
    with sandbox.Sandbox() as box:
      asyncio.run(
        worker.Worker(
          config.worker,
          dispatch_config=config.dispatch,
          harness_config=config.harness,
          engine=engine,
          chat=chat.Chat.from_file(
            pathlib.Path(_MODEL.value) / 'tokenizer.json'
          ),
          sandbox=box,
          store=store,
          tasks=dataset.load(pathlib.Path(_TASKS.value)),
          steps=config.train.steps,
          seed=program.SEED.value,
        ).run()
      )
  finally:
    stop.set()
    watcher.join()
    engine.close()
  logging.info('rollouts are complete; %d programs', engine.compilations())


def _die_with_parent() -> None:
  os.read(sys.stdin.fileno(), 1)  # returns when the parent's end closes
  os._exit(1)  # nothing here needs cleaning: records are written once


if __name__ == '__main__':
  program.run(
    sample,
    errors=(
      safetensors_folder.FolderError,
      model_config.ConfigError,
      dataset.DatasetError,
      sandbox.SandboxError,
      storage.StorageError,
    ),
  )
