# Checks of the real engine on one machine with four GPUs: bash experiments/parity/gpu.sh OUT PART...
# Each part has its own time limit, so that one that hangs costs no other its turn.
set -u
out=$1
shift
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
mkdir -p "$out"
time python3 -m zpp_lab.cli build
ranks="torchrun --standalone --nproc-per-node 4"
quiet() { grep -v -i -E "warn|OMP_NUM|\*\*\*\*|^ *$"; }
run() {  # seconds, folder, arguments of run.py
  timeout -k 5 "$1" $ranks experiments/parity/run.py --out "$out/$2" "${@:3}" 2>&1 |
    tee "$out/$2.log" | quiet | tail -n "${LINES_SHOWN:-40}"
}
for part in "$@"; do
  echo "== $part"
  began=$SECONDS
  case $part in
    pull) timeout -k 5 60 $ranks experiments/collectives/pull.py --out "$out" 2>&1 | quiet ;;
    bench) timeout -k 5 "${BENCH:-90}" python3 -m zpp_lab.cli bench collectives --nodes 1,2 \
      --transports "${TRANSPORTS:-groups,peer}" --mib "${MIB:-1,4,16,64,640}" \
      --bits "${BITS:-8,6,4,2}" --calls "${CALLS:-12}" --out "$out/collectives.json" 2>&1 | quiet ;;
    table) run "${TABLE:-150}" table --parts table --sizes tiny --cases "${CASES:-all}" \
      --transport "${TRANSPORT:-auto}" ;;
    cost) run "${COST:-120}" cost --parts cost --cost-sizes "${SIZES:-125m,1b}" \
      --priced "${PRICED:-auto}" --cost-steps "${STEPS:-24}" --clusters "${CLUSTERS:-}" ;;
    profile) run "${PROFILE:-60}" profile --parts profile --profile-size "${SIZE:-1b-long}" ;;
    race) run "${RACE:-130}" race --parts race ;;
    big) run "${BIG:-120}" big --parts table --sizes 125m ;;
    kills) timeout -k 5 "${KILLS:-120}" python3 experiments/parity/kills.py --out "$out/kills" 2>&1 |
      quiet | cut -c1-600 ;;
    *) echo "no part $part" ;;
  esac
  echo "== $part: $((SECONDS - began)) s"
done
