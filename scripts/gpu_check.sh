#!/usr/bin/env bash
# On a box with an NVIDIA GPU and no network: builds in place, runs the GPU tests (gpu_tests.sh), measures the
# machine's ceilings, then OPT-13B at 32k on random weights with and without lookahead, and with the feedback schedule.
# Reports, and the trace of the run with lookahead, go to $OUT, or to build/gpu_check.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_check}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
status=0

"$PYTHON" setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log" >&2; exit 1; }
"$PYTHON" -m hybridgen.info

OUT="$OUT/tests" scripts/gpu_tests.sh || status=1
export HYBRIDGEN_MACHINE_FILE="$OUT/machine.json"
"$PYTHON" -m hybridgen.bench link --report "$OUT/link.json" || status=1
trace="$OUT/opt-13b-32k-select.trace.json"
rm -f "$trace" "$trace.gz" "$OUT"/opt-13b-32k-{select,off,feedback}.json # nothing of an earlier check is read as this one's
run_opt() { # name, more flags
    local name="$1"
    shift
    "$PYTHON" -m hybridgen.run --model opt-13b --seq 32k --weights random \
        --report "$OUT/opt-13b-32k-$name.json" "$@" || status=1
}
run_opt select --gen 16 --schedule fixed --trace "$trace"
run_opt off --gen 16 --schedule fixed --lookahead off
run_opt feedback --gen 48 --schedule feedback
if [ -f "$trace" ] && [ "$(stat -c %s "$trace")" -gt $((8 * 1024 * 1024)) ]; then
    gzip -f "$trace"
    trace="$trace.gz"
fi
echo
"$PYTHON" experiments/read_trace.py "$trace" || status=1

echo
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
"$PYTHON" - "$OUT"/opt-13b-32k-{select,off,feedback}.json <<'EOT' || status=1
import json, sys

reports = [json.load(open(path)) for path in sys.argv[1:]]
median = [report["decode_ms_per_token"]["median"] for report in reports]
print("OPT-13B, 32k, --keep 0.1, median of the decode steps")
print(f"{'run':<28} {'ms/token':>10} {'limit':>8} {'GPU idle':>9}")
names = ("--lookahead select", "--lookahead off", "--schedule feedback, 48")
for name, value, report in zip(names, median, reports):
    limit, idle = report["limit_ms"], report["gpu_idle_fraction"]
    limit, idle = (f"{limit['limit']:.1f}" if limit else "-"), (f"{idle['total']:.2f}" if idle else "-")
    print(f"{name:<28} {value:>10.2f} {limit:>8} {idle:>9}")
print(f"{'off / select':<28} {median[1] / median[0]:>10.2f}")
EOT
exit $status
