# Checks of the real engine on one machine with four GPUs: bash experiments/parity/gpu.sh OUT PART...
# Each part has its own time limit, so that one that hangs costs no other its turn. OUT/log.txt has
# what every part said, to its end; the screen the last lines. Without GPUs it runs over gloo: make
# it small with TABLE_SIZE, RACE_ARGS, SIZE, SIZES, KILL_ARGS; links with LINK_ARGS=--cpu.
set -u
out=$1
shift
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
mkdir -p "$out"
gpu=$(nvidia-smi > /dev/null 2>&1 && echo yes)
if [ "$gpu" ]; then time python3 -m zpp_lab.cli build; fi
ranks=${RANKS:-4}
gpus=${GPUS:-$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')}
if [ "$gpus" -eq 0 ] || [ "$gpus" -ge "$ranks" ]; then
  launch=(torchrun --standalone --nproc-per-node "$ranks")
else  # ranks share a GPU, and NCCL takes each for a host of its own
  export NCCL_SOCKET_IFNAME==lo NCCL_NET=Socket MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-29511}
  launch=(bash -c 'for i in $(seq 0 $(($0 - 1))); do
    RANK=$i GROUP_RANK=$i WORLD_SIZE=$0 GROUP_WORLD_SIZE=$0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
      NCCL_HOSTID=node$i python3 "$@" & done
    code=0; for i in $(jobs -p); do wait $i || code=1; done; exit $code' "$ranks")
fi
shown() { tee -a "$out/log.txt" | grep -v -i -E "warn|OMP_NUM|\*\*\*\*|^ *$" | tail -n "${LINES_SHOWN:-40}" | cut -c1-600; }
limited() {  # seconds, command: into the log, and its end to the screen
  timeout -k 5 "$(within "$1")" "${@:2}" 2>&1 | shown
}
run() {  # seconds, arguments of run.py
  limited "$1" "${launch[@]}" experiments/parity/run.py --out "$out" "${@:2}"
}
for part in "$@"; do
  echo "== $part" | tee -a "$out/log.txt"
  began=$SECONDS
  case $part in
    bench) limited "${BENCH:-90}" python3 experiments/collectives/bench.py --nodes 1,2 \
      --transports "${TRANSPORTS:-groups,peer}" --mib "${MIB:-1,4,16,64,640}" \
      --bits "${BITS:-8,6,4,2}" --calls "${CALLS:-12}" --out "$out/collectives.json" ;;
    table) run "${TABLE:-150}" --parts table --sizes "${TABLE_SIZE:-tiny}" \
      --cases "${CASES:-all}" --transport "${TRANSPORT:-auto}" ${TABLE_ARGS:-} ;;
    cost) run "${COST:-120}" --parts cost --cost-sizes "${SIZES:-125m,1b}" \
      --priced "${PRICED:-auto}" --cost-steps "${STEPS:-24}" --clusters "${CLUSTERS:-}" ;;
    profile) run "${PROFILE:-60}" --parts profile --profile-size "${SIZE:-1b-long}" ;;
    race) run "${RACE:-190}" --parts race ${RACE_ARGS:-} ;;
    big) mkdir -p "$out/big"
      limited "${BIG:-120}" "${launch[@]}" experiments/parity/run.py --out "$out/big" --parts table \
        --sizes 125m --cases "${CASES:-all}" --transport "${TRANSPORT:-auto}" ${BIG_ARGS:-} ;;
    kills) limited "${KILLS:-150}" python3 experiments/parity/kills.py --out "$out" \
      ${KILL_ARGS:-} ;;
    links)  # two GPUs, root; iproute2 comes from ../speed/iproute.sh where it is not installed
      if [ -z "${ZPP_LAB_IPROUTE:-}" ] && [ -d .iproute ]; then
        export ZPP_LAB_IPROUTE="$PWD/.iproute"
      fi
      limited "${LINKS:-420}" python3 experiments/parity/links.py --out "$out" ${LINK_ARGS:-} ;;
    kernels)  # the tests that need a GPU and have not been run on one with all else
      for tests in "tests/codecs/kernels/test_kernels.py -k beside" tests/cuda/test_adamw.py \
        "tests/cuda/test_compile.py -k bindings"; do  # the kernels' own build was the first line
        limited "${TESTS:-120}" python3 -m pytest -q -p no:hydra_pytest -p no:cacheprovider $tests
      done ;;
    update) limited "${UPDATE:-150}" python3 -m tests.engines.optim.gpu_update \
      --millions "${MILLIONS:-1024}" ;;
    *) echo "no part $part" ;;
  esac
  echo "== $part: $((SECONDS - began)) s"
done
