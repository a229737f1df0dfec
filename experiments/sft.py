"""Cold start: a tiny model learns the agent's format from demonstrations.

Command:   python experiments/sft.py --workdir=runs/quickstart/sft
Hardware:  2 CPU cores
Result:    WORKDIR/model, a Hugging Face folder (config.json, tokenizer.json,
           model.safetensors) that train_rl.py and engines start from, and
           WORKDIR/tasks.jsonl, the task set. It still fails most tasks.

A second call with the same flags resumes, or ends at once when it is done.
"""

import json
import pathlib
import time

import program
from absl import flags, logging
from configs import tiny
from rich import console, progress

from swe17_jax.core import safetensors_folder
from swe17_jax.model import config as model_config
from swe17_jax.model import hf
from swe17_jax.rollout import chat, demonstrations, harness
from swe17_jax.tasks import dataset, micro_repair, sandbox
from swe17_jax.train import cold_start, tree_store

STARTED = time.monotonic()
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where the model, tasks and checkpoints go.', required=True
)
flags.adopt_module_key_flags(program)


def start(config: tiny.RunConfig) -> None:
  """Makes tasks, demonstrations and the model in the workdir."""
  workdir = pathlib.Path(_WORKDIR.value)
  if (workdir / 'done.json').exists():
    logging.info('%s is done already', workdir)
    return
  workdir.mkdir(parents=True, exist_ok=True)
  logging.get_absl_handler().use_absl_log_file('sft', str(workdir))
  screen = console.Console(stderr=True)
  with sandbox.Sandbox() as box, screen.status('making tasks'):
    # The task set is the same whatever the seed of a run.
    tasks = micro_repair.generate(seed=0, sandbox=box)
    dataset.save(tasks, workdir / 'tasks.jsonl')
    tokenizer = chat.train_tokenizer(
      [harness.task_text(task) for task in tasks if task.split == 'train'],
      vocab_size=config.model.vocab_size,
    )
    runs = demonstrations.record(
      demonstrations.choose(
        tasks, count=config.cold_start.demonstrations, seed=program.SEED.value
      ),
      chat=chat.Chat(tokenizer),
      sandbox=box,
      config=config.harness,
      routed_shape=(
        config.model.moe_layers,
        config.model.num_experts_per_tok,
      ),
      seed=program.SEED.value,
    )
  with progress.Progress(
    *progress.Progress.get_default_columns(),
    progress.TextColumn('loss {task.fields[loss]:.3f}'),
    console=screen,
  ) as bar:
    line = bar.add_task(
      'cold start', total=config.cold_start.steps, loss=float('nan')
    )
    params = cold_start.run(
      config.cold_start,
      model=config.model,
      windows=[window for run in runs for window in run.windows],
      workdir=workdir,
      seed=program.SEED.value,
      on_step=lambda step, loss: bar.update(
        line, completed=step + 1, loss=loss
      ),
    )
  safetensors_folder.write_folder(
    workdir / 'model',
    model_config.to_hf(config.model),
    hf.to_hf(params, config.model),
  )
  tokenizer.save(str(workdir / 'model' / 'tokenizer.json'))
  done = {'wall_s': time.monotonic() - STARTED}
  (workdir / 'done.json').write_text(json.dumps(done))


if __name__ == '__main__':
  program.run(
    start,
    errors=(
      demonstrations.DemonstrationError,
      harness.HarnessError,
      sandbox.SandboxError,
      tree_store.TreeError,
    ),
  )
