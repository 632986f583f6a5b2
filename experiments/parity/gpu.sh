# All checks of the real engine on one machine with four GPUs: bash experiments/parity/gpu.sh OUT
# Each part has its own time limit, so that one that hangs costs no other its turn.
set -u
out=$1
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
time python3 -m zpp_lab.cli build
part() {  # seconds, output folder, arguments
  timeout -k 5 "$1" torchrun --standalone --nproc-per-node 4 experiments/parity/run.py \
    --out "$out/$2" "${@:3}" 2>&1 | tee "$out/$2.log" | grep -v -i warn | tail -n 25
}
mkdir -p "$out"
part "${TINY:-150}" tiny --parts table --sizes tiny
part "${COST:-90}" cost --parts cost,profile --cost-size 125m
part "${RACE:-130}" race --parts race
[ "${COLLECTIVES:-1}" = 0 ] || timeout -k 5 100 python3 -m zpp_lab.cli bench collectives --nodes 1,2 --mib 16,64,640 \
  --out "$out/collectives.json" 2>&1 | tail -n 60
if [ "${BIG:-0}" -gt 0 ]; then part "$BIG" big --parts table --sizes 125m; fi
