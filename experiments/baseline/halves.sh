# A step on four GPUs, from parts that two can hold: bash experiments/baseline/halves.sh OUT MODEL...
# From the project's root on a machine with two NVIDIA GPUs of 140 GiB. Models: 13b, 32_5b. A model for four
# GPUs leaves no room on two for AdamW's moments, so three parts are timed, each rank with as many
# sequences as on four:
#   all layers, no update            forward and backward
#   half the layers                  here an update is as large for a rank as with all on four GPUs
#   half the layers, no update       what to take off, so that the update alone is left
# halves.py adds them up. Each part has LIMIT seconds; results are written after each.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
timed() {  # model, layers, label, more words
  local model=$1 layers=$2 label=$3
  shift 3
  timeout -k 5 "$(within "${LIMIT:-120}")" torchrun --standalone --nproc-per-node 2 \
    experiments/baseline/run.py --out "$out" --model "$model" --settings "${SETTING:-keep}" \
    --steps "${STEPS:-10}" --label "$label" "$@" cluster=1x2 model.layers="$layers" \
    ${OVERRIDES:-} 2>&1 | tee -a "$out/log.txt" | grep -E "^$model |Error|error" | cut -c1-400
  say "$model $label"
}
for model in "$@"; do
  case $model in 13b) all=40 ;; 32_5b) all=60 ;; *) all=2 ;; esac
  timed "$model" "$all" "$all layers, no update" --no-update
  timed "$model" "$((all / 2))" "$((all / 2)) layers"
  timed "$model" "$((all / 2))" "$((all / 2)) layers, no update" --no-update
  python3 experiments/baseline/halves.py "$out/$model.json"
done
