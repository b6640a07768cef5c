#!/usr/bin/env bash
# Sets up what is missing, runs the checkers, then the CPU test suite; arguments are passed on to pytest.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PY="$ROOT/.venv/bin/python"
bash "$ROOT/scripts/setup.sh"
cd "$ROOT"

failed=""
# check NAME MODULE COMMAND...: a checker that is not installed (no network at set-up) is left out.
check() {
    local name=$1 module=$2
    shift 2
    if ! "$PY" -c "import $module" 2>/dev/null; then
        echo "test: $name is not installed, left out"
        return
    fi
    echo "test: $name"
    "$@" || failed="$failed $name"
}
check ruff ruff "$PY" -m ruff check .
check mypy mypy "$PY" -m mypy
check import-linter importlinter "$PY" -c 'from importlinter.cli import lint_imports_command as run; run(["--no-logo"])'

echo "test: pytest"
status=0
workers=()
if "$PY" -c "import xdist" 2>/dev/null; then # a process for each core, each with one thread
    workers=(-n "$(nproc)" --dist worksteal)
    export OMP_NUM_THREADS=1
fi
"$PY" -m pytest -m "not slow and not gpu" "${workers[@]}" "$@" || status=$?
if [ -n "$failed" ]; then
    echo "test: these checkers found faults (above):$failed" >&2
    exit 1
fi
exit "$status"
