# Does the same step repeat? bash experiments/repeat/run.sh OUT CASE...
# From the project's root on a machine with two NVIDIA GPUs or four. A case is
# RECIPE/PLACE[/SLACK]: where AdamW's moments lie (gpu or host), and how many GiB of each GPU are left
# beyond a step's tensors once it has been filled: zero3/host/1, zero3/host, w4/host/1, zero3/gpu ...
# The model has the width of 32.5B and LAYERS of its blocks. TIMES: repetitions a case.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
build > "$out/build.log" 2>&1
for case in "$@"; do
  IFS=/ read -r recipe place slack <<< "$case"
  timeout -k 5 "$(within "${LIMIT:-150}")" torchrun --standalone --nproc-per-node "$GPUS" \
    experiments/repeat/repeat.py --out "$out" --name "$case" --times "${TIMES:-100}" \
    ${slack:+--slack "$slack"} model="${MODEL:-32_5b}" model.layers="${LAYERS:-6}" recipe="$recipe" \
    cluster=2x2 data.seq_len=2048 train.param_dtype=bf16 train.reduce_dtype=bf16 \
    engine.gather=flat engine.transport=peer engine.compile=true \
    $(two "${MODEL:-32_5b}") train.optimizer_state=8bit train.optimizer_place="${place/gpu/device}" ${OVERRIDES:-} 2>&1 |
    tee -a "$out/log.txt" | grep -E "differ|Error|error" | cut -c1-600
  say "$case"
done
