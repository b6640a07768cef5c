#!/usr/bin/env bash
# On a box with an NVIDIA GPU and no network: builds in place, runs the GPU tests (a skip is a failure),
# then OPT-13B at 32k on random weights with and without lookahead. Reports go to $OUT, or to build/gpu_check.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_check}"
mkdir -p "$OUT"
status=0

"$PYTHON" setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log" >&2; exit 1; }
"$PYTHON" -m hybridgen.info

"$PYTHON" -m pytest tests/gpu -m gpu 2>&1 | tee "$OUT/tests.log" || status=1
if grep -qE '[0-9]+ skipped' "$OUT/tests.log"; then
    echo "gpu_check: tests were skipped, which counts as a failure here" >&2
    status=1
fi
for lookahead in select off; do
    "$PYTHON" -m hybridgen.run --model opt-13b --seq 32k --gen 16 --weights random --lookahead "$lookahead" \
        --report "$OUT/opt-13b-32k-$lookahead.json" || status=1
done
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
exit $status
