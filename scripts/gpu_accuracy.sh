#!/usr/bin/env bash
# Quality on one GPU, where it takes minutes: the accuracy table, and perplexity under calibrated queries and quantised
# keys, of SmolLM2 in float32, in three lanes that share GPU and CPUs. The maps that predict queries are fitted first.
# What is in OUT (default build/gpu_accuracy) already is not measured again; nothing runs on after SECONDS.
#   bash scripts/gpu_accuracy.sh MODEL DATA [SECONDS]      (DATA: the tasks' JSONL files, and four texts)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
USAGE="usage: bash scripts/gpu_accuracy.sh MODEL DATA [SECONDS]"
MODEL="${1:?$USAGE}" DATA="${2:?$USAGE}" LIMIT="${3:-540}"
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_accuracy}"
FILE="$OUT/fitted.safetensors"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
TEXTS=(--text "$DATA/wikitext2_raw_test.txt" --text "$DATA/emma.txt")
mapfile -t cpus < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' |
    awk -F- '{for (i = $1; i <= ($2 ? $2 : $1); i++) print i}')
each=$((${#cpus[@]} / 3))
[ "$each" -gt 0 ] || { echo "gpu_accuracy: three CPUs are needed" >&2; exit 1; }
end=$((SECONDS + LIMIT)) failed="" waited=()

limited() { timeout $((end > SECONDS ? end - SECONDS : 1)) "$@"; }
table() { # TASK FLAGS...: a column of the accuracy table
    limited "$PYTHON" experiments/accuracy_table.py --model "$MODEL" --data "$DATA" --calibrated "$FILE" --batch 256 \
        --tasks "$1" --out "$OUT/$1" "${@:2}" || failed="$failed $1"
    date +"$1 %T"
}
perplexity() { # NAME FLAGS...
    [ -f "$OUT/$1.json" ] && return
    limited "$PYTHON" -m hybridgen.evaluate --model "$MODEL" --report "$OUT/$1.part" --dtype float32 \
        --tasks perplexity "${TEXTS[@]}" --batch 20 --gpu-window 128 "${@:2}" || { failed="$failed $1"; return; }
    mv "$OUT/$1.part" "$OUT/$1.json" # it grows until then
}
lane() { # NAME NUMBER: in the background, on its CPUs
    local IFS=, own
    own="${cpus[*]:$2 * each:each}"
    (
        taskset -cp "$own" "$BASHPID"
        "$1"
        [ -z "$failed" ] || { echo "not finished:$failed"; exit 1; }
    ) >>"$OUT/$1.log" 2>&1 &
    waited+=("$!")
}

first() {
    table rte
    table piqa --limit 500
}
second() {
    table openbookqa
    table copa
    table lambada --limit 500
}
third() {
    table perplexity "${TEXTS[@]}" --batch 20
    perplexity quantised --keep-mass 0.95 --also keep=0.1 --also keep=0.1,lookahead=off --also keep=0.1,key-type=int8 \
        --also keep=0.1,sketch=int4,cache.sketch_home=host --also keep=0.1,sketch=int2,cache.sketch_home=host
    perplexity calibrated --set "model.exact_layers=[0]" --keep 0.1 --also lookahead=off --also "predictor=$FILE" \
        --also lookahead=logits --also "lookahead=logits,predictor=$FILE"
    table hellaswag --limit 500
}

date +"start %T"
[ -f "$FILE" ] || limited "$PYTHON" -m hybridgen.calibrate --model "$MODEL" --dtype float32 --out "$FILE" \
    --text "$DATA/vanity_fair.txt" --text "$DATA/wikitext2_raw_valid.txt" --judge-text "$DATA/wikitext2_raw_test.txt" \
    --report "$OUT/calibration.json" 2>&1 | tail -n 4
date +"fitted %T"
lane first 0
lane second 1
lane third 2
status=0
for pid in "${waited[@]}"; do wait "$pid" || status=1; done
date +"end %T"
tail -qn 1 "$OUT"/{first,second,third}.log
exit $status
