# Sourced by the scripts of the studies of size, from the project's root on a machine with GPUs.
source experiments/kernels/env.sh
export PYTHONPATH="$PWD/experiments:$PYTHONPATH"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export PYTORCH_CUDA_ALLOC_CONF="${ALLOC-expandable_segments:True}"
# Compiled blocks are found again by the next run on this machine; a few workers a rank, as a block
# has a dozen kernels and all ranks compile at once.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/zpp_lab/inductor}"
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-8}"
zpp="python3 -m zpp_lab.cli"
# GPUS: what nvidia-smi counts, 4 without it. On two GPUs a study's twin of that size runs. Scripts
# whose runs take one GPU each say so by ONE_GPU=yes, since any number is right for them.
GPUS="${GPUS:-$(nvidia-smi --list-gpus 2> /dev/null | wc -l)}"
if [ "$GPUS" = 0 ]; then GPUS=4; fi
case ${ONE_GPU:-}$GPUS in 2 | 4 | yes*) ;; *) echo "GPUS=$GPUS: these studies are for 2 or 4" >&2; exit 2 ;; esac

sized() {  # study → the one for so many GPUs
  case $GPUS:$1 in
    4:* | *_x2*) echo "$1" ;;
    *_mini) echo "${1%_mini}_x${GPUS}_mini" ;;
    *) echo "${1}_x$GPUS" ;;
  esac
}

two() {  # model → settings for two GPUs, none for four: as many tokens a step, and what fits
  case $GPUS:$1 in
    4:*) ;;
    *:32_5b)
      echo "cluster=2x1 train.batch_size=2 train.optimizer_state=8bit train.optimizer_place=host" ;;
    *:13b) echo "cluster=2x1 train.batch_size=4 train.optimizer_state=8bit" ;;
    *) echo "cluster=2x1 train.batch_size=4" ;;
  esac
}

build() { if nvidia-smi > /dev/null 2>&1; then $zpp build; else echo "no GPU: no kernels"; fi; }

say() { echo "== $* ($SECONDS s)"; }

warm() {  # study, overrides: its blocks compiled, by a step of a model that has one of them
  local settings mark="$TORCHINDUCTOR_CACHE_DIR/warm-$1"
  if [ -f "$mark" ] || ! nvidia-smi > /dev/null 2>&1; then return; fi
  mapfile -t settings < <(python3 - "$@" << 'END'
import sys
from zpp_lab.config.compose import load_study
print(*load_study(sys.argv[1]).overrides, *sys.argv[2:], sep="\n")
END
  )
  timeout -k 5 "$(within 120)" $zpp train "${settings[@]}" recipe=zero3 model.layers=1 train.steps=1 \
    train.warmup_steps=1 train.eval_tokens=2048 data=stdlib data.tokenizer=bytes \
    data.tokenizer_path=null data.end_token=null data.suffixes=[.py] data.max_bytes=20000000 \
    data.path=null model.start=null \
    run.dir="$(mktemp -d)" 2>&1 | grep -E "start-up|rror"
  if [ "${PIPESTATUS[0]}" = 0 ]; then touch "$mark"; fi
}

ready() {  # study, overrides: kernels, token files and blocks, side by side; later calls find them
  build > "$out/build.log" 2>&1 &
  warm "$@" > "$out/warm.log" 2>&1 &
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
  elif [ "$limit" -lt "${NEED:-$((LIMIT * 5 / 6))}" ]; then  # it would be taken away half-way
    say "$study $arm seed $seed: not begun, $limit s are left"
  else
    timeout -k 20 "$limit" $zpp study "$study" --arms "$arm" --alone --seeds "$seed" \
      --dir "runs/$study" --no-report "$@" 2>&1 | tail -n 4
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
