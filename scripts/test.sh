#!/usr/bin/env bash
# Set up, check style and types, run the tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/test.sh [--full] [pytest arguments]

Sets up .venv with the test tools, then runs ruff, mypy and pytest in the project root. With pytest arguments (paths,
-k, -x, ...) only pytest runs. Tests marked `full` (the long forms) and `gpu` are left out. Without pytest arguments two
processes share the tests out; servers start one at a time.

  --full        run the tests marked `full` too
  -h, --help    this text

On a machine with a CUDA GPU: scripts/test.sh -m gpu tests/gpu
USAGE
}

checks=yes
for arg in "$@"; do
    case $arg in
        -h | --help)
            usage
            exit 0
            ;;
        --full) ;;
        *) checks=no ;;
    esac
done
setup test
cd "$ROOT"
if [[ $checks == yes ]]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
fi
workers=()
if [[ $checks == yes ]]; then
    workers=(-n 2 --no-loadscope-reorder)
    # Threads that spin while they wait would take the other process's core.
    export OMP_WAIT_POLICY=PASSIVE
fi
# tests/conftest.py leaves out `full` and `gpu`, and knows --full.
exec "$PYTHON" -m pytest "${workers[@]}" "$@"
