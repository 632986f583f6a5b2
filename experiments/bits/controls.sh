# The controls of the studies whose settings differ from those of `bits`: bash experiments/bits/controls.sh OUT
# WORLD, SCALE: seconds after which that study is asked to stop; the same command goes on from there.
# Both studies run side by side. Smaller, without a GPU: SEEDS, JOBS, OVERRIDES, SIZES.
out="${1:?name a folder for the results}"
mkdir -p "$out"
source experiments/kernels/env.sh
settings=(tracking.wandb=off ${OVERRIDES:-})
if nvidia-smi > /dev/null 2>&1; then
  python3 -m zpp_lab.cli build 2>&1 | tail -n 1
  settings+=(ops.backend=cuda)
fi
study() {  # name, seconds, arms
  timeout -k 20 "$(within "$2")" python3 -m zpp_lab.cli study "$1" --arms "$3" --jobs "${JOBS:-6}" \
    --dir "runs/$1" ${SEEDS:+--seeds "$SEEDS"} "${settings[@]}" > "$out/$1.log" 2>&1
  packed "$out/$1.tar.gz" runs "$1" checkpoints
  tail -n 15 "$out/$1.log"
  echo "$1: $SECONDS s"
}
study world "${WORLD:-600}" zero3_64_global,zero3_reordered,broken &
study scale "${SCALE:-1200}" "${SIZES:-zero3_1*,zero3_3*,zero3_reordered_*,broken_*}" &
wait
