#!/usr/bin/env bash
# Quality on one GPU, where it takes minutes: the accuracy table, and perplexity under calibrated queries and quantised
# keys, of SmolLM2 in float32, in two lanes that share GPU and CPUs; beside them PIQA and RTE in bfloat16 on two cores.
# What is in OUT (default build/gpu_accuracy) already is not measured again; nothing runs on after SECONDS.
#   bash scripts/gpu_accuracy.sh MODEL DATA CALIBRATED [SECONDS]      (DATA: the tasks' JSONL files, and two texts)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
MODEL="${1:?usage: bash scripts/gpu_accuracy.sh MODEL DATA CALIBRATED [SECONDS]}" DATA="$2" FILE="$3" LIMIT="${4:-540}"
PYTHON="${HYBRIDGEN_PYTHON:-python3}"
OUT="${OUT:-build/gpu_accuracy}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
TEXTS=(--text "$DATA/wikitext2_raw_test.txt" --text "$DATA/emma.txt")
mapfile -t cpus < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' |
    awk -F- '{for (i = $1; i <= ($2 ? $2 : $1); i++) print i}')
each=$(((${#cpus[@]} - 2) / 2))
[ "$each" -gt 0 ] || { echo "gpu_accuracy: four CPUs are needed" >&2; exit 1; }
end=$((SECONDS + LIMIT))

limited() { timeout $((end > SECONDS ? end - SECONDS : 1)) "$@"; }
table() { # TASK FLAGS...: a column of the accuracy table
    limited "$PYTHON" experiments/accuracy_table.py --model "$MODEL" --data "$DATA" --calibrated "$FILE" --batch 256 \
        --tasks "$1" --out "$OUT/$1" "${@:2}"
}
evaluate() { # NAME FLAGS...
    [ -f "$OUT/$1.json" ] && return
    limited "$PYTHON" -m hybridgen.evaluate --model "$MODEL" --report "$OUT/$1.part" "${@:2}"
    mv "$OUT/$1.part" "$OUT/$1.json" # it grows until then
}
perplexity() { # NAME FLAGS...
    evaluate "$1" --dtype float32 --tasks perplexity "${TEXTS[@]}" --batch 20 --gpu-window 128 "${@:2}"
}
lane() { # NAME CPUS: in the background, on its CPUs
    (
        taskset -cp "$2" "$BASHPID"
        "$1"
        date +"%T"
    ) >>"$OUT/$1.log" 2>&1 &
}

first() {
    table rte
    table copa
    table perplexity "${TEXTS[@]}" --batch 20
    perplexity calibrated --set "model.exact_layers=[0]" --keep 0.1 --also lookahead=off --also "predictor=$FILE" \
        --also lookahead=logits --also "lookahead=logits,predictor=$FILE"
}
second() {
    table piqa --limit 500
    table openbookqa
    table lambada --limit 500
    perplexity quantised --keep-mass 0.95 --also keep=0.1 --also keep=0.1,lookahead=off --also keep=0.1,key-type=int8 \
        --also keep=0.1,sketch=int4,cache.sketch_home=host --also keep=0.1,sketch=int2,cache.sketch_home=host
}
on_cpu() { # how long each took is in the log
    for task in piqa rte; do
        evaluate "$task-bf16" --device cpu --dtype bfloat16 --strategy full --tasks "$task" --data "$DATA"
        date +"$task %T"
    done
}

date +"start %T"
cpus_of() { local IFS=,; echo "${cpus[*]:$1:$2}"; }
lane first "$(cpus_of 0 "$each")"
lane second "$(cpus_of "$each" "$each")"
lane on_cpu "$(cpus_of $((2 * each)) 2)"
wait
ls "$OUT"
