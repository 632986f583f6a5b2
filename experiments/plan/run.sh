# The plan of memory against the device: bash experiments/plan/run.sh OUT CASE...
# From the project's root on a machine with four NVIDIA GPUs. A case is MODEL/RECIPE[/SETTING]:
# 1_3b/zero3, 13b/zero3, 13b/zero3/recompute, 13b/zeropp, 32_5b/zero3, 32_5b/w8 ...
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
build > "$out/build.log" 2>&1
for case in "$@"; do
  IFS=/ read -r model recipe setting <<< "$case/"
  batch=2 keep=false
  [ "$model" = 32_5b ] && batch=1
  [ "${setting%/}" = recompute ] && keep=true
  timeout -k 5 "$(within "${LIMIT:-120}")" torchrun --standalone --nproc-per-node "${RANKS:-4}" \
    experiments/plan/compare.py --out "$out" --name "$case" --steps "${STEPS:-3}" \
    model="$model" recipe="$recipe" model.checkpoint_activations=$keep train.batch_size=$batch \
    cluster="${CLUSTER:-2x2}" engine.gather=flat engine.compile=true data.seq_len=2048 \
    train.param_dtype=bf16 train.reduce_dtype=bf16 ${OVERRIDES:-engine.transport=peer} 2>&1 |
    tee -a "$out/log.txt" | grep -E "planned|Error|error" | cut -c1-400
  say "$case"
done
