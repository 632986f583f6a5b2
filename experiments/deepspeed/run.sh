# What experiments/deepspeed/README.md reports: bash experiments/deepspeed/run.sh OUT [PART...]
# Parts: build check study (all without any). From the project's root, on a machine with four NVIDIA
# GPUs and nvcc; wheels from wheels.sh lie in .whl-ds where DeepSpeed is not installed.
# Smaller: MODEL (of check), ARMS and OVERRIDES (of study). With two or three GPUs both nodes share
# two of them (SHARE: mps, or time-slices): `check` as root, with iproute2 or .iproute. PER_GPU: so
# many runs of `study` share the GPUs, DeepSpeed's too where it all runs under `zpp-lab mps --`.
set -u
out="${1:?name a folder for the results}"
shift
parts="${*:-build check study}"
mkdir -p "$out"
source experiments/kernels/env.sh
gpu=$(nvidia-smi > /dev/null 2>&1 && echo yes)
unpack .whl-ds .site-ds
export PATH="$PWD/.site-ds/bin:$PATH"  # ninja
if [ "$gpu" ]; then  # whatever is set: DeepSpeed cannot read names such as 9.0a
  TORCH_CUDA_ARCH_LIST=$(python3 -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
  export TORCH_CUDA_ARCH_LIST
fi
gpus=${GPUS:-$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')}
if [ -n "${GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((GPUS - 1))); fi
share=""
if [ "$gpu" ] && [ "$gpus" -gt 1 ] && [ "$gpus" -lt 4 ]; then share=${SHARE:-mps}; fi
if [ -d .iproute ]; then export ZPP_LAB_IPROUTE="$PWD/.iproute"; fi
export NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
quiet() { grep -v -i -E "warn|OMP_NUM|\*\*\*\*|return func|^ *$"; }
ranks="torchrun --standalone --nproc-per-node 4"
if [ "$share" ]; then  # nodes that NCCL takes for hosts, so that their ranks may meet on a GPU
  ranks="python3 -m zpp_lab.cli emulate --nodes 2 --gpus-per-node 2 --share-gpus=$share -- python3"
fi
gradient() {  # name, arguments
  timeout -k 5 "$(within "${CHECK:-100}")" $ranks \
    experiments/deepspeed/gradient.py --out "$out/$1.json" ${MODEL:+--model "$MODEL"} "${@:2}" 2>&1 |
    tee -a "$out/check.log" | quiet | tail -n 25
}
for part in $parts; do
  echo "== $part"
  began=$SECONDS
  case $part in
    build)  # DeepSpeed's quantizer and our kernels, side by side
      [ "$gpu" ] || continue
      timeout -k 5 "$(within "${BUILD:-150}")" python3 -c "
from deepspeed.ops.op_builder import QuantizerBuilder; QuantizerBuilder().load()" \
        > "$out/build-deepspeed.log" 2>&1 &
      timeout -k 5 "$(within "${BUILD:-150}")" python3 -m zpp_lab.cli build > "$out/build.log" 2>&1
      wait
      tail -qn 2 "$out/build-deepspeed.log" "$out/build.log" ;;
    check)
      gradient gradient
      if [ "$share" ]; then
        echo "whole-host left out: with two GPUs a rank that sees all of them sees a node"
      else
        gradient whole-host --whole-host
      fi ;;
    study)
      timeout -k 20 "$(within "${STUDY:-500}")" python3 -m zpp_lab.cli study deepspeed \
        --dir runs/deepspeed ${PER_GPU:+--runs-per-gpu "$PER_GPU"} ${ARMS:+--arms "$ARMS" --alone} \
        tracking.wandb=off ${share:+engine.share_gpus=$share} ${OVERRIDES:-} 2>&1 |
        tee "$out/study.log" | quiet | tail -n 40
      packed "$out/deepspeed.tar.gz" runs deepspeed checkpoints ;;
    *) echo "no part $part" ;;
  esac
  echo "== $part: $((SECONDS - began)) s"
done
