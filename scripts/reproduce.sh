#!/usr/bin/env bash
# What a GPU box can do of the paper's figures (experiments/README.md), in parts for boxes that are lent for minutes:
# `reproduce.sh --part 1/8` to `--part 8/8`, each at most nine minutes, with the same OUT. Points that are there already
# are not measured again, so a part that was ended goes on when it is run again. Builds in place and measures the
# machine's ceilings first; one process a part. TEXT: a text for the experiments on quality, which are else left out.
# More flags go to experiments/reproduce.py: `reproduce.sh --part 1/1 --only stage_times`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/reproduce}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HYBRIDGEN_MACHINE_FILE="${HYBRIDGEN_MACHINE_FILE:-$OUT/machine.json}"
mkdir -p "$OUT"

"$PYTHON" setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log" >&2; exit 1; }
[ -f "$HYBRIDGEN_MACHINE_FILE" ] || "$PYTHON" -m hybridgen.bench link
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$PYTHON" experiments/reproduce.py --out "$OUT" ${TEXT:+--text "$TEXT"} "$@"
