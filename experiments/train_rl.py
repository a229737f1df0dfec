"""Asynchronous reinforcement learning of a MoE agent on one machine.

Command:   python experiments/train_rl.py --workdir=runs/quickstart/rl \
             --init=runs/quickstart/sft
Hardware:  2 CPU cores
Result:    WORKDIR/report.html, metrics.jsonl, TensorBoard files; the last
           line of standard output is a JSON object with the results.

Starts a rollout worker (experiments/rollout.py) as a process of its own and
trains on what it writes to the store. Ctrl-C stops cleanly, kill -9 loses at
most a step: the same command resumes.
"""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import program
from absl import flags, logging
from configs import tiny
from rich import console, progress

from swe17_jax.analysis import report, summary
from swe17_jax.core import config as core_config
from swe17_jax.core import metrics, records, safetensors_folder, storage
from swe17_jax.model import config as model_config
from swe17_jax.model import hf
from swe17_jax.train import loop, source, tree_store
from swe17_jax.weights import publisher
from swe17_jax.weights import staged as stages

STARTED = time.monotonic()
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Checkpoints, metrics and report go here.', required=True
)
_INIT = flags.DEFINE_string(
  'init', None, 'Workdir of a finished sft.py.', required=True
)
_STORE = flags.DEFINE_string(
  'store',
  None,
  'Folder or gs:// URL for weights and records; WORKDIR/store by default.',
)
flags.adopt_module_key_flags(program)

WORKER_RESTARTS = 5  # of a worker that dies, before the run gives up
RESTART_S = 1.0  # a worker that dies at once must not spin


class RolloutProcess:
  """The rollout worker as a child that dies with us; restarted if it dies.

  Attributes:
    failed: whether it died too often; then `stop` is set, too.
  """

  def __init__(
    self, arguments: list[str], log: pathlib.Path, *, stop: threading.Event
  ):
    self._arguments, self._log, self._stop = arguments, log, stop
    self._closing = False
    self._lock = threading.Lock()  # of `_closing` and `_process`
    self._process = self._start()
    self.failed = False
    threading.Thread(target=self._supervise, daemon=True).start()

  def _start(self) -> subprocess.Popen:
    program = pathlib.Path(__file__).with_name('rollout.py')
    with self._log.open('ab') as log:
      return subprocess.Popen(
        [sys.executable, str(program), '--with_parent', *self._arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
      )

  def _supervise(self) -> None:
    restarts = 0
    while self._process.wait() and not self._closing:
      if restarts == WORKER_RESTARTS:
        self.failed = True
        self._stop.set()
        return
      restarts += 1
      time.sleep(RESTART_S)
      with self._lock:
        if not self._closing:
          self._process = self._start()

  def close(self) -> None:
    """Ends the child; nothing there needs cleaning, see rollout.py."""
    with self._lock:
      self._closing = True
    self._process.kill()
    self._process.wait()


class ProgressLine:
  """Step, reward, tokens per second and time left, on one line."""

  def __init__(self, steps: int):
    self._bar = progress.Progress(
      progress.TextColumn('step'),
      progress.MofNCompleteColumn(),
      progress.BarColumn(),
      progress.TextColumn('{task.fields[facts]}'),
      progress.TimeRemainingColumn(elapsed_when_finished=True),
      console=console.Console(stderr=True),
    )
    self._line = self._bar.add_task('', total=steps, facts='')
    self._heldout = ''

  def __enter__(self) -> 'ProgressLine':
    self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    self._bar.stop()

  def update(self, step: int, row: Mapping[str, float]) -> None:
    """Shows a finished step."""
    if 'heldout/reward' in row:
      self._heldout = f'held-out {row["heldout/reward"]:.3f}'
    facts = (
      f'reward {row["train/reward"]:.3f} {self._heldout} '
      f'{row["train/tokens_per_s"]:.0f} tokens/s'
    )
    self._bar.update(self._line, completed=step + 1, facts=facts)


def learn(config: tiny.RunConfig) -> None:
  """Trains beside a rollout worker until the end or a signal; reports."""
  workdir, init = pathlib.Path(_WORKDIR.value), pathlib.Path(_INIT.value)
  if not (init / 'done.json').exists():
    sys.exit(
      f'train_rl: --init={init} is no finished cold start; run '
      f'experiments/sft.py --workdir={init}'
    )
  workdir.mkdir(parents=True, exist_ok=True)
  logging.get_absl_handler().use_absl_log_file('train', str(workdir))
  (workdir / 'config.txt').write_text(core_config.render(config) + '\n')
  url = _STORE.value or str(workdir / 'store')
  store = storage.open_store(url)
  stop = threading.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.set())
  groups = source.GroupSource(
    store,
    config.dispatch,
    timeout_s=config.train.group_timeout_s,
    stop=stop,
  )
  earlier_s = summary.wall_s(workdir)
  rollouts = RolloutProcess(
    [
      f'--store={url}',
      f'--model={init / "model"}',
      f'--tasks={init / "tasks.jsonl"}',
      *program.overrides(),
    ],
    workdir / 'rollout.log',
    stop=stop,
  )
  try:
    train(config, groups, init=init, workdir=workdir, store=store)
    groups.wait_for_heldout(config.train.steps)
  except source.Stopped:
    if rollouts.failed:
      sys.exit(
        f'train_rl: the rollout worker died {WORKER_RESTARTS + 1} times; see '
        f'{workdir / "rollout.log"}; the same command resumes'
      )
    print('stopped; the same command resumes', file=sys.stderr)
    return
  finally:
    rollouts.close()
  with metrics.MetricsWriter(workdir) as writer:
    evaluated = loop.last_evaluated(workdir)
    for version, rate in groups.heldout(after=evaluated).items():
      writer.write(version, {'heldout/reward': rate})
  cold_start_s = json.loads((init / 'done.json').read_text())['wall_s']
  wall_s = cold_start_s + earlier_s + time.monotonic() - STARTED
  result = summary.summarize(workdir, wall_s=wall_s)
  page = report.write(workdir, store=store, summary=result)
  print(f'see {page}', file=sys.stderr)
  print(json.dumps(result))


def train(config, groups, *, init, workdir, store) -> None:
  """Runs the main loop from the cold-started model."""
  folder = safetensors_folder.open_folder(init / 'model')
  model = dataclasses.replace(
    model_config.from_hf(folder.config),
    expert_dispatch=config.model.expert_dispatch,
  )

  def initial():
    params = hf.from_hf(folder.read, model, shapes=folder.shapes)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)

  with ProgressLine(config.train.steps) as line:
    loop.run(
      config.train,
      model=model,
      initial=initial,
      groups=groups,
      store=store,
      workdir=workdir,
      on_step=line.update,
    )


if __name__ == '__main__':
  program.run(
    learn,
    errors=(
      safetensors_folder.FolderError,
      model_config.ConfigError,
      hf.HfError,
      stages.DeltaError,
      metrics.MetricsError,
      publisher.PublishError,
      records.RecordError,
      source.SourceError,
      storage.StorageError,
      tree_store.TreeError,
      FloatingPointError,
    ),
  )
