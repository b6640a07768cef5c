#!/usr/bin/env bash
# The GPU tests in N processes at once (default 4), each on its share of the CPUs; a skip counts as a failure.
# Logs go to $OUT, or to build/gpu_tests. Words of pytest's after N choose some of them.
#   bash scripts/gpu_tests.sh [N [-k EXPRESSION ...]]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_tests}"
parts="${1:-4}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

mapfile -t tests < <("$PYTHON" -m pytest tests/gpu -m gpu --collect-only -o addopts= -q "${@:2}" | grep '::')
mapfile -t cpus < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' | awk -F- '{for (i = $1; i <= ($2 ? $2 : $1); i++) print i}')
each=$((${#cpus[@]} / parts))
[ "${#tests[@]}" -gt 0 ] && [ "$each" -gt 0 ] || { echo "gpu_tests: no tests, or fewer CPUs than parts" >&2; exit 1; }

for ((part = 0; part < parts; part++)); do
    mine=()
    for ((test = part; test < ${#tests[@]}; test += parts)); do mine+=("${tests[test]}"); done
    own=$(IFS=,; echo "${cpus[*]:part * each:each}")
    taskset -c "$own" "$PYTHON" -m pytest -m gpu --tb=short "${mine[@]}" >"$OUT/tests.$part.log" 2>&1 &
    waited+=($!)
done
status=0
for ((part = 0; part < parts; part++)); do
    wait "${waited[part]}" || status=1
    tail -n 1 "$OUT/tests.$part.log"
    if grep -qE '[0-9]+ skipped' "$OUT/tests.$part.log"; then status=1; fi
done
cat "$OUT"/tests.*.log | grep -E "^(FAILED|ERROR)" || true
exit $status
