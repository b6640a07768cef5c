#!/usr/bin/env bash
# Quality on one GPU, what needs no more than minutes there: the accuracy table and perplexity under calibrated queries
# and quantised keys, of SmolLM2 in float32, several processes at once, each on its share of the CPUs; beside them PIQA and
# RTE in bfloat16 on two cores of the CPU. What ended before SECONDS were over lies in $OUT (default build/gpu_accuracy).
#   bash scripts/gpu_accuracy.sh MODEL DATA CALIBRATED [SECONDS]      (DATA: the tasks' JSONL files, and two texts)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
MODEL="${1:?usage: bash scripts/gpu_accuracy.sh MODEL DATA CALIBRATED [SECONDS]}" DATA="$2" FILE="$3" SECONDS_LEFT="${4:-520}"
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_accuracy}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
TEXTS=(--text "$DATA/wikitext2_raw_test.txt" --text "$DATA/emma.txt")
mapfile -t cpus < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' | awk -F- '{for (i = $1; i <= ($2 ? $2 : $1); i++) print i}')
each=$(((${#cpus[@]} - 2) / 5))
[ "$each" -gt 0 ] || { echo "gpu_accuracy: seven CPUs are needed" >&2; exit 1; }
end=$((SECONDS + SECONDS_LEFT))
part=0

limited() { timeout $((end > SECONDS ? end - SECONDS : 1)) "$@"; }
table() { # TASK FLAGS...: rows of the accuracy table
    limited "$PYTHON" experiments/accuracy_table.py --model "$MODEL" --data "$DATA" --calibrated "$FILE" --batch 256 \
        --tasks "$1" --out "$OUT/$1" "${@:2}"
}
perplexity() { # NAME FLAGS...
    limited "$PYTHON" -m hybridgen.evaluate --model "$MODEL" --dtype float32 --tasks perplexity "${TEXTS[@]}" --batch 20 \
        --gpu-window 128 --report "$OUT/$1.json" "${@:2}"
}
aside() { # NAME CPUS FUNCTION: in the background, on its CPUs
    (taskset -cp "$2" "$BASHPID" >"$OUT/$1.log" && "$3" >>"$OUT/$1.log" 2>&1 && date +"$1 done %T" || echo "$1 did not end") &
}
share() { local IFS=,; echo "${cpus[*]:$((each * part)):each}"; }

first() { table piqa --limit 500; table copa; }
second() { table rte; }
third() { table lambada --limit 500; table openbookqa; }
fourth() {
    perplexity calibrated --set "model.exact_layers=[0]" --keep 0.1 --also keep=0.1,lookahead=off \
        --also "keep=0.1,predictor=$FILE" --also keep=0.1,lookahead=logits \
        --also "keep=0.1,lookahead=logits,predictor=$FILE"
}
fifth() {
    perplexity quantised --keep-mass 0.95 --also keep=0.1 --also keep=0.1,lookahead=off --also keep=0.1,key-type=int8 \
        --also keep=0.1,sketch=int4,cache.sketch_home=host --also keep=0.1,sketch=int2,cache.sketch_home=host
    table perplexity "${TEXTS[@]}" --batch 20
}
on_cpu() { # the time that PIQA takes is in the log
    for task in piqa rte; do
        limited "$PYTHON" -m hybridgen.evaluate --model "$MODEL" --device cpu --dtype bfloat16 --strategy full --tasks "$task" \
            --data "$DATA" --report "$OUT/$task-bf16.json"
        date +"$task %T"
    done
}

date +"start %T"
for work in first second third fourth fifth; do
    aside "$work" "$(share)" "$work"
    part=$((part + 1))
done
aside on_cpu "${cpus[-2]},${cpus[-1]}" on_cpu
wait
