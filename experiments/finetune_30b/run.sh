# The runs of conf/study/finetune_30b.yaml: bash experiments/finetune_30b/run.sh OUT PART...
# From the project's root on a machine with four NVIDIA GPUs of 140 GiB, or with two, where
# finetune_30b_x2 runs (GPUS: how many, by default all). The part `base` comes first on each machine:
# a short pretraining on Python source of BASE_STEPS steps, whose weights (65 GB) stay on its disk.
# The other parts are arms, each within LIMIT seconds and begun when NEED of them are left.
# OUT/STUDY.tar.gz is written after each. OVERRIDES: Hydra overrides for every arm; on four GPUs
# train.optimizer_state=bf16 takes 30 GiB a GPU less.
# STUDY=finetune_30b_mini tries all of it on a CPU.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
STUDY=$(sized "${STUDY:-finetune_30b}")
LIMIT="${LIMIT:-$((GPUS == 2 ? 450 : 240))}"
NEED="${NEED:-$((GPUS == 2 ? 310 : 200))}"
BASE_STEPS="${BASE_STEPS:-$((GPUS == 2 ? 60 : 120))}"
first="runs/${STUDY}_base"

base() {  # pretraining with plain ZeRO-3, of the study's own model and speed settings
  if [ -f "$first/summary.json" ]; then say "base: finished before" && return; fi
  mapfile -t settings < <(python3 - "$STUDY" << 'END'
import sys
from zpp_lab.config.compose import load_study
found = [o for o in load_study(sys.argv[1]).overrides if not o.startswith(("data", "model.start"))]
data = load_study(sys.argv[1].replace("finetune_30b", "pretrain_13b")).overrides
print(*found, *(o for o in data if o.startswith("data")), "recipe=zero3", sep="\n")
END
  )
  OMP_NUM_THREADS=16 $zpp prepare "${STUDY/finetune_30b/pretrain_13b}" 2>&1 | tee -a "$out/prepare.log"
  mkdir -p "$first"
  cp "$(ls -t data_cache/installation-bpe-*/tokenizer.json | head -n 1)" "$first/tokenizer.json"
  wait  # its weights would lie beside the base's
  $zpp prepare "$STUDY" >> "$out/prepare.log" 2>&1 &  # the headers, while the base trains
  timeout -k 20 "$(within "${BASE_LIMIT:-400}")" $zpp train "${settings[@]}" run.dir="$first" \
    train.steps="$BASE_STEPS" train.lr=4e-5 \
    train.warmup_steps=$((BASE_STEPS < 50 ? BASE_STEPS / 2 : 25)) \
    train.eval_every="$BASE_STEPS" train.keep_checkpoints=2 \
    train.checkpoint_weights_only=true 2>&1 | tail -n 4
  packed "$out/base.tar.gz" runs "${STUDY}_base" checkpoints
  say "base"
}

build > "$out/build.log" 2>&1 &
if ! [ -f "$first/summary.json" ]; then warm "$STUDY" ${OVERRIDES:-} > "$out/warm.log" 2>&1 & fi
for part in "$@"; do
  if [ "$part" = base ]; then base; continue; fi
  wait
  if ! [ -f "$first/summary.json" ]; then
    say "$part: not begun, $first has not finished: give the part base first"
    continue
  fi
  start=$(printf '%s\n' "$first"/checkpoints/step-* | tail -n 1)
  arm "$STUDY" "$part" model.start="$start" ${OVERRIDES:-}
done
