#!/usr/bin/env bash
# Every strategy on OPT-13B with 32k tokens, random weights, at an equal share of the host's tokens fetched: builds in
# place, measures the machine's ceilings, compares and prints one table. Goes on where it ended when it is run again with
# the same OUT. More flags go to `hybridgen.compare`: `gpu_compare.sh --strategies aog,aoc`.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_compare}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HYBRIDGEN_MACHINE_FILE="${HYBRIDGEN_MACHINE_FILE:-$OUT/machine.json}"
mkdir -p "$OUT"

"$PYTHON" setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log" >&2; exit 1; }
[ -f "$HYBRIDGEN_MACHINE_FILE" ] || "$PYTHON" -m hybridgen.bench link
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$PYTHON" -m hybridgen.compare --model opt-13b --seq 32k --keep 0.1 --weights random --gen 24 --rounds 2 \
    --out "$OUT/rows" "$@"
