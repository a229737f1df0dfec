"""Tests of launch/local.sh in a small copy of the repository.

Nothing is installed: `.venv/bin/python` is a stub that claims that everything
is there and runs the two programs of the copy, which report their arguments.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / 'launch' / 'local.sh'
BASH = shutil.which('bash')

_STUB = f"""#!{BASH}
if [ "$1" = -c ]; then echo installed; else exec {sys.executable} "$@"; fi
"""

_PROGRAM = """
import os, sys, time
try:
  print(os.path.basename(sys.argv[0]), *sys.argv[1:], flush=True)
  if sys.argv[0].endswith('sft.py') and 'SFT' in os.environ:
    time.sleep(float(os.environ['SFT']))
    sys.exit(7)
except KeyboardInterrupt:
  print('stopped')
"""


class LocalTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.root = pathlib.Path(folder.name)
    for name in ('launch', 'experiments'):
      (self.root / name).mkdir()
    shutil.copy(SCRIPT, self.root / 'launch')
    for name in ('sft.py', 'train_rl.py'):
      (self.root / 'experiments' / name).write_text(_PROGRAM)

  def _make_venv(self):
    binaries = self.root / '.venv' / 'bin'
    binaries.mkdir(parents=True)
    (binaries / 'python').write_text(_STUB)
    (binaries / 'python').chmod(0o755)
    (self.root / '.venv' / '.installed-trainer').write_text('installed\n')

  def _command(self, *arguments):
    return [BASH, str(self.root / 'launch' / 'local.sh'), *arguments]

  def _run(self, *arguments, **environment):
    return subprocess.run(
      self._command(*arguments),
      env=os.environ | environment,
      capture_output=True,
      text=True,
      timeout=20,
      check=False,
    )

  @parameterized.parameters(('--help',), ('train', '--help'), ('test', '-h'))
  def test_help(self, *arguments):
    done = self._run(*arguments)
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertIn('usage: bash launch/local.sh train', done.stdout)

  @parameterized.parameters((), ('frob',))
  def test_a_wrong_command_is_named(self, *arguments):
    done = self._run(*arguments)
    self.assertEqual((done.returncode, done.stdout), (1, ''))
    self.assertIn('the commands are train and test', done.stderr)

  @parameterized.parameters('train', 'test')
  def test_without_python_one_sentence_and_nothing_made(self, command):
    done = self._run(command, PATH='', PYTHON='')
    self.assertEqual((done.returncode, done.stdout), (1, ''))
    self.assertRegex(done.stderr, r'^local.sh: no Python 3.11 or later .*\n$')
    self.assertFalse((self.root / '.venv').exists())

  def test_a_python_that_is_too_old_is_named(self):
    old = self.root / 'old python'
    old.write_text(f'#!{BASH}\nexit 1\n')
    old.chmod(0o755)
    done = self._run('train', PYTHON=str(old))
    self.assertRegex(done.stderr, r'no Python 3.11 .*old python\)')

  def test_who_gets_which_argument(self):
    self._make_venv()
    done = self._run(
      *('train', '--set', 'a.b=c d', '--workdir', 'w', '--seed=3'),
      *('--dry_run', '--note=x'),
    )
    self.assertEqual(
      done.stdout,
      'sft.py --workdir=w/sft --set=a.b=c d --seed=3 --dry_run\n'
      'train_rl.py --workdir=w/rl --init=w/sft --set=a.b=c d --seed=3 '
      '--dry_run --note=x\n',
    )
    self.assertEqual(done.returncode, 0)

  def test_a_failed_cold_start_ends_the_run_with_its_status(self):
    self._make_venv()
    done = self._run('train', SFT='0')
    self.assertEqual(done.returncode, 7)
    self.assertEqual(done.stdout, 'sft.py --workdir=runs/quickstart/sft\n')

  @parameterized.parameters(
    (signal.SIGINT, 130, 'stopped'), (signal.SIGTERM, 143, '')
  )
  def test_a_signal_ends_the_child_and_starts_nothing_more(
    self, number, status, last
  ):
    self._make_venv()
    running = subprocess.Popen(
      self._command('train'),
      env=os.environ | {'SFT': '60'},
      stdout=subprocess.PIPE,
      text=True,
    )
    self.assertIn('sft.py', running.stdout.readline())
    running.send_signal(number)
    # The pipe ends once no process holds it: the child is gone, too.
    rest, _ = running.communicate(timeout=20)
    self.assertEqual(running.returncode, status)
    self.assertEqual(rest.strip(), last)


if __name__ == '__main__':
  absltest.main()
