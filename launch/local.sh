#!/usr/bin/env bash
# The project on one machine: installs into .venv, then trains or tests.
set -euo pipefail

TEST_EXTRAS='trainer,gcs,test'

usage() {
  printf '%s\n' \
    'usage: bash launch/local.sh train [--workdir=DIR] [--seed=N] [ARGS...]' \
    '       bash launch/local.sh test [--slow] [PYTEST ARGS...]' \
    '' \
    '  train  Cold-starts a tiny model on a few demonstrations, then trains' \
    '         it by reinforcement learning. Run the same command again to' \
    '         resume. The last line of output is JSON.' \
    '         --workdir=DIR  where the run lives (default runs/quickstart)' \
    '         --seed=N       passed to both programs' \
    '         --set path=value  changes the configuration (repeatable)' \
    '         --dry_run      both print their configuration and do nothing' \
    '         ARGS           go to experiments/train_rl.py' \
    '  test   Checks format and lint, then runs the tests that take no longer' \
    '         than seconds; --slow runs all of them.' \
    '' \
    'examples:' \
    '  bash launch/local.sh train' \
    '  bash launch/local.sh train --workdir=runs/other --seed=1' \
    '  bash launch/local.sh test' \
    '  bash launch/local.sh test tests/core -k config' \
    '' \
    'environment:' \
    '  PYTHON         interpreter for a new .venv; 3.11 or later' \
    '  PIP_INDEX_URL  where pip finds packages, where that is not pypi.org'
}

note() { printf 'local.sh: %s\n' "$*" >&2; }

die() {
  note "$*"
  exit 1
}

# Prints the interpreter that a new .venv is made with. Builtins only: it must
# be able to complain on a machine that has nothing.
find_python() {
  local name candidates=(python3.13 python3.12 python3.11 python3)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for name in "${candidates[@]}"; do
    if command -v "$name" >/dev/null && is_recent "$name"; then
      printf '%s\n' "$name"
      return
    fi
  done
  die "no Python 3.11 or later (tried: ${candidates[*]}); install one, or set PYTHON to its path"
}

is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
  local python
  if [ -x "$venv/bin/python" ] || [ -L "$venv/bin/python" ]; then
    is_recent "$venv/bin/python" ||
      die ".venv does not hold a working Python 3.11 or later; remove it (rm -r .venv) and run again"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    "$venv/bin/python" -m ensurepip >/dev/null 2>&1 ||
      die '.venv has no pip and cannot make one; remove it (rm -r .venv) and run again'
    return
  fi
  python=$(find_python)
  note "making .venv with $python"
  "$python" -m venv "$venv" >/dev/null 2>&1 ||
    die "$python -m venv .venv failed; on Debian and Ubuntu: apt-get install python3-venv, then remove .venv and run again"
}

pip_install() {
  "$venv/bin/python" -m pip install --retries 2 "$@" </dev/null >>"$log" 2>&1
}

# Parity tests need torch; on Linux its default build is CUDA, gigabytes of
# it. So the CPU index goes first, then whatever index pip is set up with.
install_torch() {
  "$venv/bin/python" -c 'import torch' 2>/dev/null ||
    log=/dev/null pip_install 'torch>=2.9' --timeout 10 --retries 0 \
      --index-url https://download.pytorch.org/whl/cpu ||
    pip_install 'torch==2.13.0'
}

install_failed() {
  if grep -qE 'ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|Network is unreachable|ProxyError' "$log"; then
    die "no network: pip could not reach a package index; connect, or set PIP_INDEX_URL to a mirror, and run again (pip's log: $log)"
  fi
  die "pip failed: $(grep -m1 '^ERROR' "$log" || tail -n1 "$log") (pip's log: $log)"
}

# Installs the extras $1 once per version of setup.py: a stamp in .venv says
# what was installed, and from where. Two runs at once take turns.
install_extras() {
  is_installed "$1" && return
  take_turn
  make_venv
  if ! is_installed "$1"; then
    log="$venv/install.log"
    : >"$log"
    note "installing swe17_jax[$1]; takes minutes the first time (log: $log)"
    [ "$1" != "$TEST_EXTRAS" ] || install_torch || install_failed
    pip_install -e ".[$1]" || install_failed
    stamp_of "$1" >"$(stamp_file "$1")"
  fi
  exec 9<&-
}

# Whether $1 is installed, or the extras of the tests, which contain the rest.
is_installed() {
  local extras file
  for extras in "$1" "$TEST_EXTRAS"; do
    file=$(stamp_file "$extras")
    if [ -f "$file" ] && [ -x "$venv/bin/python" ] &&
      [ "$(<"$file")" = "$(stamp_of "$extras")" ]; then
      return
    fi
  done
  return 1
}

stamp_file() { printf '%s\n' "$venv/.installed-$1"; }

stamp_of() {
  "$venv/bin/python" -c '
import hashlib, sys
print(hashlib.sha256(open("setup.py", "rb").read()).hexdigest(), *sys.argv[1:])
' "$1" "$root"
}

# Holds a lock on this folder as descriptor 9. Without flock (macOS) runs that
# install at the same time are on their own.
take_turn() {
  exec 9<"$root/launch"
  command -v flock >/dev/null || return 0
  flock -n 9 && return
  note 'waiting for another run to finish installing'
  flock -w 1800 9 || die 'another run has been installing for 30 minutes'
}

advise_bubblewrap() {
  [ "$(uname -s)" = Linux ] && ! command -v bwrap >/dev/null || return 0
  note 'bubblewrap is missing, so sandboxes are weaker; on Debian and Ubuntu: apt-get install bubblewrap (as root)'
}

# Runs a command to its end in a process group of its own; signals that ask
# this script to stop are passed on and then end the script.
run_child() {
  local child status=0 stopped=''
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  trap 'stopped=130; kill -INT -- "-$child" 2>/dev/null || true' INT
  trap 'stopped=143; kill -TERM -- "-$child" 2>/dev/null || true' TERM HUP
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  trap - INT TERM HUP
  [ -z "$stopped" ] || exit "$stopped"
  [ "$status" = 0 ] || exit "$status"
}

train() {
  local workdir=runs/quickstart both=() rest=()
  while [ $# -gt 0 ]; do
    case $1 in
      --workdir=*) workdir=${1#*=} ;;
      --seed=* | --set=* | --dry_run) both+=("$1") ;;
      --workdir | --seed | --set)
        [ $# -gt 1 ] || die "$1 needs a value: $1=..."
        if [ "$1" = --workdir ]; then workdir=$2; else both+=("$1=$2"); fi
        shift
        ;;
      *) rest+=("$1") ;;
    esac
    shift
  done
  [ -n "$workdir" ] || die '--workdir is empty; name a folder'
  install_extras trainer
  advise_bubblewrap
  run_child "$venv/bin/python" experiments/sft.py "--workdir=$workdir/sft" \
    ${both[@]+"${both[@]}"}
  exec "$venv/bin/python" experiments/train_rl.py "--workdir=$workdir/rl" \
    "--init=$workdir/sft" ${both[@]+"${both[@]}"} ${rest[@]+"${rest[@]}"}
}

run_tests() {
  local marks=(-m 'not slow') rest=() argument
  for argument; do
    if [ "$argument" = --slow ]; then marks=(); else rest+=("$argument"); fi
  done
  install_extras "$TEST_EXTRAS"
  advise_bubblewrap
  "$venv/bin/ruff" format --check . ||
    die 'format differs; see how: .venv/bin/ruff format --diff .'
  "$venv/bin/ruff" check .
  exec "$venv/bin/python" -m pytest -q ${marks[@]+"${marks[@]}"} \
    ${rest[@]+"${rest[@]}"}
}

here=${BASH_SOURCE[0]%/*}
[ "$here" != "${BASH_SOURCE[0]}" ] || here=.
root=$(cd "$here/.." && pwd)
cd "$root"
venv="$root/.venv"
log=''

case ${1:-} in
  -h | --help | help) usage ;;
  train | test)
    command=$1
    shift
    case ${1:-} in -h | --help)
      usage
      exit
      ;;
    esac
    if [ "$command" = train ]; then train "$@"; else run_tests "$@"; fi
    ;;
  *)
    usage >&2
    die "unknown command '${1:-}'; the commands are train and test"
    ;;
esac
