# Sourced by the scripts of the studies of size, from the project's root on a machine with GPUs.
source experiments/kernels/env.sh
export PYTHONPATH="$PWD/experiments:$PYTHONPATH"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export PYTORCH_CUDA_ALLOC_CONF="${ALLOC-expandable_segments:True}"
zpp="python3 -m zpp_lab.cli"

build() { if nvidia-smi > /dev/null 2>&1; then $zpp build; else echo "no GPU: no kernels"; fi; }

say() { echo "== $* ($SECONDS s)"; }

ready() {  # study, overrides: kernels and token files, side by side; a second call finds them
  build > "$out/build.log" 2>&1 &
  OMP_NUM_THREADS=16 $zpp prepare "$@" 2>&1 | tee -a "$out/prepare.log"
  wait
  tail -n 1 "$out/build.log" | cut -c1-200
  say "ready"
}

arm() {  # study, arm, overrides: its run of seed SEED; what it wrote is packed, finished or not
  local study=$1 arm=$2 seed=${SEED:-1} limit
  local run=runs/$study/$arm/seed$seed
  shift 2
  limit=$(within "$LIMIT")
  if [ -f "$run/summary.json" ]; then
    say "$study $arm seed $seed: finished before"
  elif [ "$limit" -lt $((LIMIT * 5 / 6)) ]; then  # the machine would take it away half-way
    say "$study $arm seed $seed: not begun, $limit s are left"
  else
    timeout -k 20 "$limit" $zpp study "$study" --arms "$arm" --alone --seeds "$seed" \
      --dir "runs/$study" "$@" 2>&1 | grep -v "no report" | tail -n 4
    grep -hs "start-up" "$run/log.txt"
    say "$study $arm seed $seed"
  fi
  pack "$study"
}

pack() {  # folder below runs: every small file of its runs, once there are some
  [ -d "runs/$1" ] || return 0
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "runs/$1/gpus.txt" 2> /dev/null
  packed "$out/$1.tar.gz" runs "$1" checkpoints wandb
}
