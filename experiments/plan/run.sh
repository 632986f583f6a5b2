# The plan of memory against the device: bash experiments/plan/run.sh OUT CASE...
# From the project's root on a machine with four NVIDIA GPUs, or two (GPUS: how many). A case is MODEL/RECIPE[/SETTING]:
# 1_3b/zero3, 13b/zero3, 13b/zero3/recompute, 13b/zeropp, 32_5b/zero3, 32_5b/w8,
# 32_5b/zeropp/bf16 (AdamW's moments in bf16; 8bit likewise) ...
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
build > "$out/build.log" 2>&1
for case in "$@"; do
  IFS=/ read -r model recipe setting <<< "$case/"
  batch=2 keep=false moments=fp32
  [ "$model" = 32_5b ] && batch=1
  case "${setting%/}" in
    "") ;;
    recompute) keep=true ;;
    bf16 | 8bit) moments="${setting%/}" ;;
    *) echo "$case: no setting ${setting%/}; recompute, bf16 or 8bit" >&2; continue ;;
  esac
  timeout -k 5 "$(within "${LIMIT:-120}")" torchrun --standalone --nproc-per-node "$GPUS" \
    experiments/plan/compare.py --out "$out" --name "$case" --steps "${STEPS:-3}" \
    model="$model" recipe="$recipe" model.checkpoint_activations=$keep train.batch_size=$batch \
    train.optimizer_state=$moments \
    cluster=2x2 engine.gather=flat engine.compile=true data.seq_len=2048 \
    train.param_dtype=bf16 train.reduce_dtype=bf16 $(two "$model") \
    ${OVERRIDES:-engine.transport=peer} 2>&1 |
    tee -a "$out/log.txt" | grep -E "planned|Error|error" | cut -c1-400
  say "$case"
done
