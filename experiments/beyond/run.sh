# Steps of models larger than the GPU, beside DeepSpeed's ZeRO-Offload and FSDP2's CPUOffloadPolicy:
#   CALL=600 bash experiments/beyond/run.sh OUT [PART...]
# Parts (6_7b without any), each a call where a machine's time is short: build 6_7b 13b 32_5b largest
#   largest_over largest_by_unit largest_deepspeed; 32_5b takes two GPUs
# One GPU; wheels from ../deepspeed/wheels.sh lie in .whl-ds where DeepSpeed is not installed. Each
# part writes OUT/PART.json. GPU_GIB: what every arm may allocate there; HOST_GIB: what the machine
# may have in use before an arm is stopped. STEPS, ROUNDS, LIMIT (seconds of an arm), EXTRA
# (overrides), SIZE (layers of `largest`), MACHINE (a file of `zpp-lab bench calibrate`, which
# predicts seconds), and ARMS in place of a part's own.
set -u
out=${1:?where to write the results}
shift
source experiments/kernels/env.sh
unpack .whl-ds .site-ds
export PATH="$PWD/.site-ds/bin:$PATH"  # ninja
export CUDA_DEVICE_MAX_CONNECTIONS=32  # as `zpp-lab train` has it
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}" NCCL_NVLS_ENABLE=0
# registering pages that eight threads touched takes a third of the time of torch's usual pinning
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8
mkdir -p "$out" runs/beyond
built=${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}
mkdir -p "$built"
find "$built" -name lock -delete  # of a build that was killed, for which later ones would wait
small=()
if nvidia-smi > /dev/null 2>&1; then
  TORCH_CUDA_ARCH_LIST=$(python3 -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
  export TORCH_CUDA_ARCH_LIST
  timeout -k 5 "$(within 200)" python3 -c "
from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()" \
    > runs/beyond/cpu_adam.log 2>&1 &
  kernels "$out" || exit 1
  wait
  tail -qn 1 runs/beyond/cpu_adam.log
  echo "built: $SECONDS s"
else  # a rehearsal
  small=(engine.device=cpu model=tiny data.seq_len=64 train.batch_size=2)
fi
[ $# -gt 0 ] || set -- 6_7b
arms() {  # part, arms, overrides
  local name=$1 list=${ARMS:-$2}
  shift 2
  python3 experiments/beyond/arms.py --out "$out/$name.json" --arms "$list" --steps "${STEPS:-4}" \
    --rounds "${ROUNDS:-1}" --gpu-gib "${GPU_GIB:-78.5}" --host-gib "${HOST_GIB:-124}" \
    --machine "${MACHINE:-}" --limit "${LIMIT:-180}" --until "${CALL_END:-$(($(date +%s) + 3600))}" "$@" "${small[@]}" ${EXTRA:-}
}
for part in "$@"; do
  echo "== $part"
  began=$SECONDS
  case $part in
    6_7b)  # peers last: they take longest
      arms "$part" compute,auto,ours,auto_8bit,deepspeed,fsdp2,compute model=6_7b ;;
    13b)  # peers take less where they do not pin, and still more than 128 GiB
      arms "$part" compute,auto_8bit,ours_8bit,deepspeed_unpinned,fsdp2_unpinned,compute \
        model=13b ;;
    32_5b)  # compute alone has no room with 78.5 GiB beside its gradients: all of a GPU
      GPU_GIB=0 arms 32_5b_compute compute model=32_5b
      HOST_GIB=${HOST_GIB:-240} arms "$part" auto_8bit --plan-gib 77 --plan-host-gib 256 \
        model=32_5b cluster.gpus_per_node=2 ;;
    largest)  # 13b's width
      arms "$part" compute,auto_8bit --plan-gib 79.1 --plan-host-gib 128 model=13b \
        "model.layers=${SIZE:-76}" ;;
    largest_over)  # a tenth more, which is refused
      arms "$part" auto_8bit --plan-gib 79.1 --plan-host-gib 128 model=13b "model.layers=${SIZE:-84}" ;;
    largest_by_unit)
      arms "$part" compute,by_unit model=32_5b "model.layers=${SIZE:-50}" ;;
    largest_deepspeed)  # 6_7b's width
      arms "$part" deepspeed_unpinned model=6_7b "model.layers=${SIZE:-36}" ;;
    build) ;;  # all that the others build first
    *) echo "no part $part" ;;
  esac
  packed "$out/logs.tar.gz" runs beyond
  echo "== $part: $((SECONDS - began)) s"
done
