# What gathers and reductions cost a model, by copies and by kernels that pull, on the GPUs of one
# host (two or more; without any: process groups on the CPU, as a try):
#   bash experiments/collectives/run.sh OUT
# First the bits: rows in several buffers, in real peers' memory, and of a training. Then beside.py, at most 95 s of
# measuring. GPUS: how many ranks (2). TESTS=no leaves the first part out. EXTRA: arguments of beside.py.
set -u
out=${1:?where to write the results}
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
mkdir -p "$out"
small="--mib 1 --bits 4 --calls 2 --warmup 1 --width 128"
if nvidia-smi > /dev/null 2>&1; then
  small=""
  python3 -m zpp_lab.cli build
  if [ "${TESTS:-yes}" = yes ]; then
    timeout -k 10 "$(within 240)" python3 -m pytest -p no:cacheprovider -q \
      tests/ops/test_pulled.py tests/collectives/test_symmetric.py 2>&1 | tee "$out/tests.log"
    for pull in copy kernel; do  # a training, its whole way through FSDP2
      timeout -k 10 "$(within 90)" python3 -m zpp_lab.cli train engine=fsdp engine.transport=peer \
        engine.pull=$pull cluster=1x2 recipe=zeropp engine.gather=flat train.steps=6 \
        train.eval_tokens=4096 tracking.wandb=off run.dir="$out/runs/$pull" 2>&1 |
        tee "$out/$pull.log"
    done
    python3 experiments/same_run.py "$out/runs/copy" "$out/runs/kernel" && echo "the same run"
  fi
fi
timeout -k 10 "$(within 150)" torchrun --standalone --nproc-per-node "${GPUS:-2}" \
  experiments/collectives/beside.py --out "$out" $small ${EXTRA:-} 2>&1 | tee "$out/beside.log"
