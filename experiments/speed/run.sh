# Tokens per second of 1.3B over links of several speeds, on one host with four GPUs, as root:
#   bash experiments/speed/run.sh OUT [PART...]       parts: 2x2 1x4 4x1; without any: 2x2 1x4
# Each part has its own time limit and each arm its own within it; what was measured is kept, and a
# part that runs again replaces its rows. ARMS, LINKS, ROUNDS, STEPS, EXTRA (overrides) change it.
set -u
out=${1:?where to write the results}
shift
[ $# -gt 0 ] || set -- 2x2 1x4
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
if [ -d .iproute ]; then export ZPP_LAB_IPROUTE="$PWD/.iproute"; fi
mkdir -p "$out" runs/speed-logs
[ -e "$out/logs" ] || ln -s "$PWD/runs/speed-logs" "$out/logs"  # a file a rank and session: many
cpu=--cpu
if nvidia-smi > /dev/null 2>&1; then cpu="" && python3 -m zpp_lab.cli build; fi
arms=${ARMS:-fsdp2,fsdp2+node,zeropp}
groups='from torch.distributed.fsdp import FSDPModule as F; exit(not hasattr(F, "set_separate_reduce_scatter_group"))'
if [ -z "${ARMS:-}" ] && python3 -c "$groups"; then arms=$arms,fsdp2+groups; fi
beyond="w4_g84h: recipe=zeropp recipe.name=w4_g84h recipe.weights.bits=4 recipe.grads_intra.bits=8 recipe.grads_inter.bits=4 recipe.grads.hadamard=64"
run() {  # seconds, then arguments of zpp-lab bench step
  local limit
  limit=$(within "$1")
  timeout -k 30 "$limit" python3 -m zpp_lab.cli bench step "${@:2}" --recipes "$arms" --arm "$beyond" \
    --steps "${STEPS:-4}" --rounds "${ROUNDS:-2}" --turn-seconds "${TURN:-6}" \
    --limit "${LIMIT:-90}" --budget "$((limit > 30 ? limit - 20 : limit))" --out "$out" \
    $cpu model=1_3b model.checkpoint_activations=true data.seq_len=2048 \
    train.batch_size=1 ${EXTRA:-} 2>&1 | tee -a "$out/log.txt"
  packed "$out/logs.tar.gz" -C runs speed-logs
}
for part in "$@"; do
  echo "== $part"
  began=$SECONDS
  nodes=${part%x*} gpus=${part#*x}
  if [ "$nodes" = 1 ]; then
    run "${SECONDS_ONE:-150}" --nodes 1 --gpus-per-node "$gpus"
  else
    run "${SECONDS_LINKS:-400}" --nodes "$nodes" --gpus-per-node "$gpus" \
      --link-gbps "${LINKS:-max,50,25,12}"
  fi
  echo "== $part: $((SECONDS - began)) s"
done
if python3 -c "import altair, vl_convert" 2> /dev/null; then
  python3 -m zpp_lab.cli report "$out" > "$out/report.log" && echo "page: $out/report.html"
else
  echo "no page: zpp-lab report $out makes it where the report's packages are installed"
fi
