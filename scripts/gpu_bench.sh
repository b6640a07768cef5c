#!/usr/bin/env bash
# Decode and prefill beside the limits of the machine: builds in place, measures the ceilings, runs the rows of
# experiments/decode_table.py and prints them. In parts, for boxes that are lent for minutes: `gpu_bench.sh 1/2`, then
# `gpu_bench.sh 2/2` with the same OUT; rows that are there already are not run again.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_bench}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HYBRIDGEN_MACHINE_FILE="${HYBRIDGEN_MACHINE_FILE:-$OUT/machine.json}"
mkdir -p "$OUT"

"$PYTHON" setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log" >&2; exit 1; }
[ -f "$HYBRIDGEN_MACHINE_FILE" ] || "$PYTHON" -m hybridgen.bench link
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$PYTHON" experiments/decode_table.py run --out "$OUT/rows" --part "${1:-1/1}"
