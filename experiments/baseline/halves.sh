# A step on four GPUs, from parts that two can hold: bash experiments/baseline/halves.sh OUT MODEL...
# From the project's root on a machine with two NVIDIA GPUs of 140 GiB. MODEL: of conf/model, with an
# even number of layers. 13B and 32.5B leave no room on two GPUs for AdamW's moments, so three parts
# are timed, each rank with as many sequences as on four:
#   all layers, no update            forward and backward
#   half the layers                  here an update is as large for a rank as with all on four GPUs
#   half the layers, no update       what to take off, so that the update alone is left
# halves.py adds them up. ONLY=passes: the first part alone. SETTING: of run.py, one a folder. Each
# part has LIMIT seconds; results are written after each.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
timed() {  # model, layers, more words of the label, options
  local model=$1 layers=$2 label="$2 layers$3"
  shift 3
  timeout -k 5 "$(within "${LIMIT:-120}")" torchrun --standalone --nproc-per-node 2 \
    experiments/baseline/run.py --out "$out" --model "$model" --settings "${SETTING:-keep}" \
    --steps "${STEPS:-10}" --label "$label" "$@" cluster=1x2 model.layers="$layers" \
    ${OVERRIDES:-} 2>&1 | tee -a "$out/log.txt" | grep -E "^$model |Error|error" | cut -c1-400
  say "$model $label"
}
for model in "$@"; do
  all=$(python3 - "$model" << 'END'
import sys
from zpp_lab.config.compose import compose
layers = compose([f"model={sys.argv[1]}"]).model.layers
if layers is None or layers % 2:
    sys.exit(f"{sys.argv[1]} has {layers} layers: take a model with an even number")
print(layers)
END
  ) || exit 2
  timed "$model" "$all" ", no update" --no-update
  if [ "${ONLY:-}" = passes ]; then continue; fi
  timed "$model" "$((all / 2))" ""
  timed "$model" "$((all / 2))" ", no update" --no-update
  python3 experiments/baseline/halves.py "$out/$model.json"
done
