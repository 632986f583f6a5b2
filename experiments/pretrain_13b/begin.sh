# The first steps of 13B's width in several ways: bash experiments/pretrain_13b/begin.sh OUT WAY...
# A way is EMBEDDING_STD:HEAD_STD:RATE[:MICRO_STEPS]; RATE is what the learning rate grows by in a step. A
# model of LAYERS blocks (20 of the 40, so that it fits a GPU of 140 GiB) trains STEPS steps on one
# GPU with the study's sequences, two ways at a time where there are two GPUs. More micro-steps
# change only the order of sums. OUT/WAY.csv has a row a step. With CALL no way begins that could not end.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
ONE_GPU=yes
source experiments/size.sh
LAYERS="${LAYERS:-20}" STEPS="${STEPS:-24}"
ready pretrain_13b_x2 ${OVERRIDES:-}
mapfile -t settings < <(python3 -c "
from zpp_lab.config.compose import load_study
print(*load_study('pretrain_13b_x2').overrides, sep='\n')")
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)

begin() {  # way, GPU
  local embedding head rate micro name="way_${1//[:.]/_}"
  IFS=: read -r embedding head rate micro <<< "$1"
  micro=${micro:-1}
  CUDA_VISIBLE_DEVICES=$2 timeout "$(within 200)" $zpp train "${settings[@]}" recipe=zero3 \
    cluster=1x2 cluster.gpus_per_node=1 model.layers="$LAYERS" model.embedding_std="$embedding" model.head_std="$head" \
    train.steps="$STEPS" train.warmup_steps="$STEPS" train.eval_every="$STEPS" \
    train.lr="$(python3 -c "print($rate * $STEPS)")" train.batch_size=$((8 / micro)) \
    train.micro_steps="$micro" run.dir="runs/$name" ${OVERRIDES:-} > "$out/$name.log" 2>&1
  python3 - "runs/$name/metrics.jsonl" > "$out/$name.csv" << 'END'
import json, sys
keys = ("step", "loss", "heldout_loss", "grad_norm", "lr", "seconds")
print(*keys, sep=",")
for row in map(json.loads, open(sys.argv[1])):
    print(*(row.get(k, "") for k in keys), sep=",")
END
  say "$1: $(cut -d, -f 2 "$out/$name.csv" | cut -c 1-5 | tail -n +2 | paste -sd ' ')"
}

turn() {  # GPU: every gpus-th way
  local at="$1"
  shift
  for way in "$@"; do
    if [ "$at" = 0 ] && [ "$(within 999)" -ge "${NEED:-60}" ]; then begin "$way" "$gpu"; fi
    at=$(((at + gpus - 1) % gpus))
  done
}

[ "$gpus" -gt 0 ] || gpus=1
for ((gpu = 0; gpu < gpus; gpu++)); do turn "$gpu" "$@" & done
wait
