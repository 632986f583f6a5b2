# Pretrain, then finetune: bash experiments/finetune_1b/run.sh OUT_FOLDER [OVERRIDES...]
# Runs from the project's root on a machine with NVIDIA GPUs, on each of which one GPU plays the four
# ranks of a run; or with real ranks on four:
#   GPUS=4 bash experiments/finetune_1b/run.sh OUT
# STUDIES: finetune_350m, finetune_1b, finetune_wires (bits on gradients too; sixteen ranks, so without
# GPUS=4), finetune_wires_older and finetune_weights (the same on two GPUs, whose base real ranks
# train; after the latter, before its checkpoints go: finetune_weights/rounded.py), or with _mini
# behind a name its rehearsal (no GPU). PER_GPU: runs that share a GPU, so that one computes while
# another starts, evaluates or saves; `zpp-lab mps -- bash ...` lets them compute side by side.
# LIMIT: seconds after which each study is asked to stop. The same command goes on from there:
# pretraining from its last checkpoint; an arm's run that was cut, about a minute, starts over.
# The archive leaves checkpoints out; `zpp-lab report` builds the report from it on any machine.
set -u
out="${1:?name a folder for the results}"
shift
source experiments/kernels/env.sh
mkdir -p "$out"
settings=(tracking.wandb=off)
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
if [ "${GPUS:-1}" -ge 4 ]; then
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
  settings+=(engine=fsdp engine.ordered=true)
fi
if nvidia-smi > /dev/null 2>&1; then
  python3 -m zpp_lab.cli build > "$out/build.log" 2>&1
  tail -n 2 "$out/build.log"
  settings+=(ops.backend=cuda)
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "$out/machine.log"
fi
for study in ${STUDIES:-finetune_350m finetune_1b}; do
  timeout -k 30 "$(within "${LIMIT:-3600}")" python3 -m zpp_lab.cli study "$study" --dir "runs/$study" \
    --jobs "$((gpus * ${PER_GPU:-1}))" --runs-per-gpu "${PER_GPU:-1}" "${settings[@]}" "$@" 2>&1 | tee "$out/$study.log"
  packed "$out/$study.tar.gz" runs "$study" checkpoints
  echo "$study: $SECONDS s so far"
done
