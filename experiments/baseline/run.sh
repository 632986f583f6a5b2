# Plain ZeRO-3 step by step: bash experiments/baseline/run.sh OUT MODEL[:SETTING,...]...
# From the project's root on a machine with four NVIDIA GPUs, or two (GPUS: how many). Models: 1_3b, 13b, 32_5b. Each has
# LIMIT seconds; results are written after every setting, so a limit costs the last ones only.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
for part in "$@"; do
  model="${part%%:*}"
  settings="${part#*:}"
  [ "$settings" = "$part" ] && settings=eager,fused_adamw,flash,compile,chunked_loss,keep,deterministic
  timeout -k 5 "$(within "${LIMIT:-180}")" torchrun --standalone --nproc-per-node "$GPUS" \
    experiments/baseline/run.py --out "$out" --model "$model" --settings "$settings" \
    --steps "${STEPS:-6}" $(two "$model") ${OVERRIDES:-} 2>&1 | tee -a "$out/log.txt" | grep -E "^$model |Error|error" |
    cut -c1-400
  say "$model"
done
