#!/usr/bin/env bash
# On a box with an NVIDIA GPU and no network: builds in place, runs the GPU tests (a skip is a failure),
# then OPT-13B at 32k on random weights with and without lookahead. Reports, and the trace of the run with lookahead,
# go to $OUT, or to build/gpu_check.
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
trace="$OUT/opt-13b-32k-select.trace.json"
rm -f "$trace" "$trace.gz" "$OUT"/opt-13b-32k-{select,off}.json # nothing of an earlier check is read as this one's
for lookahead in select off; do
    more=()
    if [ "$lookahead" = select ]; then more=(--trace "$trace"); fi
    "$PYTHON" -m hybridgen.run --model opt-13b --seq 32k --gen 16 --weights random --lookahead "$lookahead" \
        --report "$OUT/opt-13b-32k-$lookahead.json" ${more[@]+"${more[@]}"} || status=1
done
if [ -f "$trace" ] && [ "$(stat -c %s "$trace")" -gt $((8 * 1024 * 1024)) ]; then
    gzip -f "$trace"
    trace="$trace.gz"
fi
echo
"$PYTHON" experiments/read_trace.py "$trace" || status=1

echo
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$PYTHON" - "$OUT"/opt-13b-32k-{select,off}.json <<'EOT' || status=1
import json, sys

median = [json.load(open(path))["decode_ms_per_token"]["median"] for path in sys.argv[1:]]
print("OPT-13B, 32k, --keep 0.1, median of the decode steps")
print(f"{'--lookahead':<16} {'ms/token':>10}")
for name, value in zip(("select", "off"), median):
    print(f"{name:<16} {value:>10.2f}")
print(f"{'off / select':<16} {median[1] / median[0]:>10.2f}")
EOT
exit $status
