# Sourced by the scripts of the studies of size, from the project's root on a machine with GPUs.
source experiments/kernels/env.sh
export PYTHONPATH="$PWD/experiments:$PYTHONPATH"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
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

arm() {  # study, arm, overrides: one arm within LIMIT seconds; what it wrote is packed either way
  local study=$1 arm=$2
  shift 2
  timeout -k 20 "$LIMIT" $zpp study "$study" --arms "$arm" --alone --seeds "${SEEDS:-1}" \
    --dir "runs/$study" "$@" 2>&1 | grep -v "no report" | tail -n 4
  for log in runs/"$study"/"$arm"/seed*/log.txt; do grep -h "start-up" "$log"; done
  pack "$study"
  say "$study $arm"
}

pack() {  # folder below runs: every small file of its runs
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "runs/$1/gpus.txt" 2> /dev/null
  # beside its place and then renamed: a call that is cut here leaves the archive before
  tar czf "$out/.$1.tmp" --exclude=checkpoints --exclude=wandb -C runs "$1" &&
    mv "$out/.$1.tmp" "$out/$1.tar.gz"
}
