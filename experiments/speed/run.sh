# Tokens per second over links of several speeds, on one host with four GPUs or fewer, as root:
#   bash experiments/speed/run.sh OUT [PART...]
# Parts (without any: 2x2 1x4, or 1x2 on two GPUs), each a call of its own where a machine's time is short:
#   2x2 1x4 4x1  1.3B, emulated nodes x GPUs; 1x4 (1x2 on two GPUs) is NVLink alone
#   twins        two whole GPUs as 2 x 1 nodes: plain FSDP2 in its ways (fsdp2+node keeps weights until
#                backward is done, where a node has one GPU), quantized arms and their raw twins
#   studies      the recipes of the studies (w8, w4, g8_4_hadamard) on 2x2, for their loss beside speed
#   blocks       2x2 with one block a unit and with several (BLOCKS="1 4"), in OUT/blocks
#   calibrate    no bench of steps: OUT/machine.json for `zpp-lab plan --machine` and check_cost.py
#   rollouts     no bench: generation beside training on 2x1, at ROLLED="12 25", in OUT/rollouts-GBPS.json
#   deepspeed    its ZeRO-3 and ZeRO++ on 2x2, as more rows of the same table
#   compiled     1x4 with engine.compile=true, in OUT/compiled; compiled_links on 2x2
#   sockets      which NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD serve zeropp best, in OUT/sockets
#   13b 32_5b    zero3 beside zeropp on NVLink, one arm at a time; on fewer than four GPUs with AdamW's
#                moments in 8 bits, at 32.5B in host memory
# Each part has its own time limit and each arm its own within it; what was measured is kept, slow links
# first, and a part that runs again replaces its rows. Where each call has an OUT of its own, join.py
# makes one table. ARMS, OWN, LINKS, ROUNDS, STEPS, EXTRA (overrides), TAG change it.
# With fewer GPUs than a part has ranks its nodes share them (SHARE: mps, or time-slices), and parts
# on NVLink take those that there are. GPUS: how many, if not all.
set -u
out=${1:?where to write the results}
shift
source experiments/kernels/env.sh
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=4
if [ -d .iproute ]; then export ZPP_LAB_IPROUTE="$PWD/.iproute"; fi
mkdir -p "$out" runs/speed-logs
cpu=--cpu
if nvidia-smi > /dev/null 2>&1; then
  cpu=""
  kernels "$out" || exit 1
fi
gpus=${GPUS:-$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')}
if [ -n "${GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((GPUS - 1))); fi
inside=4  # GPUs of the parts on NVLink
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt 4 ]; then inside=$gpus; fi
[ $# -gt 0 ] || set -- 2x2 "1x$inside"
shared() {  # nodes, GPUs a node: the option that lets nodes share, where GPUs are few
  if [ -z "$cpu" ] && [ "$gpus" -gt 0 ] && [ "$gpus" -lt $(($1 * $2)) ] && [ "$1" -gt 1 ]; then
    echo "--share-gpus=${SHARE:-mps}"
  fi
}
few() { [ "$inside" -lt 4 ] && echo "$@"; }  # words for fewer GPUs than four
groups='from torch.distributed.fsdp import FSDPModule as F; exit(not hasattr(F, "set_separate_reduce_scatter_group"))'
ours=fsdp2,fsdp2+node,zeropp
if python3 -c "$groups"; then ours=$ours,fsdp2+groups; fi
w4_g84h="w4_g84h: recipe=zeropp recipe.name=w4_g84h recipe.weights.bits=4 recipe.grads_intra.bits=8 recipe.grads_inter.bits=4 recipe.grads.hadamard=64"
diff_g84h="diff_g84h: recipe=g8_4_hadamard recipe.name=diff_g84h recipe.sharding.weights=node recipe.sharding.update=differences recipe.weights_update.bits=4"
diff2_g82="diff2_g82: recipe=diff2_g82"
diff2_g84="diff2_g84: recipe=diff2_g82 recipe.name=diff2_g84 recipe.grads_inter.codec=block recipe.grads_inter.bits=4 recipe.grads_inter.block_size=256 recipe.grads_inter.scale_dtype=fp32"
# OWN: more arms, by default the first two. Words, and behind a semicolon NAME: OVERRIDES. A word is
# one of those above, the last three also with _whole behind the name (whole weights on every GPU),
# or a recipe's name. Raw twins and plain FSDP2 come by themselves.
if [ "$*" = twins ]; then usual="diff_g84h zeropp"; else usual="w4_g84h diff_g84h"; fi
own=()
IFS=";" read -r -a pieces <<< "${OWN-$usual}"
for piece in "${pieces[@]}"; do
  case $piece in *:*) own+=(--arm "${piece# }") && continue ;; esac
  for arm in $piece; do
    case $arm in
      w4_g84h | diff_g84h | diff2_g82 | diff2_g84) own+=(--arm "${!arm}") ;;
      diff_g84h_whole | diff2_g82_whole | diff2_g84_whole)
        of=${arm%_whole}
        own+=(--arm "$arm:${!of#*:} recipe.name=$arm recipe.sharding.weights=none") ;;
      *) own+=(--arm "$arm") ;;
    esac
  done
done
links=${LINKS:-12,25,50,max}

stopped=""
trap 'stopped=yes; kill $(jobs -p) 2> /dev/null' TERM INT  # bash heeds them while it waits, not before
bench() {  # seconds, model, folder, arguments of zpp-lab bench step
  local limit model=$2 folder=$3
  limit=$(within "$1")
  shift 3
  case $model:$part in 13b:* | 32_5b:* | *:twins) local -x PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ;; esac
  mkdir -p "$folder"
  [ -e "$folder/logs" ] || ln -s "$PWD/runs/speed-logs" "$folder/logs"  # a file a rank and session
  timeout -k 30 "$limit" python3 -m zpp_lab.cli bench step $cpu --steps "${STEPS:-4}" \
    --rounds "${ROUNDS:-3}" --turn-seconds "${TURN:-6}" --limit "${LIMIT:-90}" \
    --budget "$((limit > 30 ? limit - 20 : limit))" --out "$folder" "model=${MODEL:-$model}" \
    model.checkpoint_activations=true data.seq_len=2048 train.batch_size=1 "$@" ${EXTRA:-} \
    > >(tee -a "$out/log.txt") 2>&1 &
  wait "$!"
  [ -z "$stopped" ] || wait "$!"  # it removes its nodes
  rm -f "$folder/logs"  # a link has no place among results
  packed "$out/logs.tar.gz" runs speed-logs
}

deepspeed_there() {
  unpack .whl-ds .site-ds
  export PATH="$PWD/.site-ds/bin:$PATH"
  if ! python3 -c "import deepspeed" > /dev/null 2>&1; then
    echo "no DeepSpeed: see experiments/deepspeed/wheels.sh"
    return 1
  fi
  [ -n "$cpu" ] && return
  TORCH_CUDA_ARCH_LIST=$(python3 -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
  export TORCH_CUDA_ARCH_LIST
  timeout -k 5 "$(within 200)" python3 -c "
from deepspeed.ops.op_builder import QuantizerBuilder; QuantizerBuilder().load()" >> "$out/log.txt" 2>&1
}

sockets() {  # folder of pairs: their rows as one table, threads and sockets first
  local table pair head="threads,sockets_per_thread,"
  for table in "$1"/*/results.csv; do
    pair=$(basename "$(dirname "$table")")
    if [ "$head" ]; then echo "$head$(head -n 1 "$table")"; fi
    head=""
    tail -n +2 "$table" | sed "s/^/${pair/x/,},/"
  done
}

page() {  # folder
  if python3 -c "import altair, vl_convert" 2> /dev/null; then
    python3 -m zpp_lab.cli report "$1" > "$1/report.log" && echo "page: $1/report.html"
  else
    echo "no page: zpp-lab report $1 makes it where the report's packages are installed"
  fi
}

for part in "$@"; do
  if [ "$stopped" ]; then echo "== $part: not begun, stopped" && continue; fi
  if [ "$(within 9999)" -lt "${NEED:-45}" ]; then echo "== $part: not begun, the call is over" && continue; fi
  echo "== $part"
  began=$SECONDS
  case $part in
    1x*)
      bench "${SECONDS_ONE:-150}" 1_3b "$out" --nodes 1 --gpus-per-node "${part#1x}" \
        --recipes "${ARMS:-$ours}" --arm "$w4_g84h" ;;
    *x*)
      bench "${SECONDS_LINKS:-400}" 1_3b "$out" --nodes "${part%x*}" --gpus-per-node "${part#*x}" \
        ${TAG:+--tag "$TAG"} $(shared "${part%x*}" "${part#*x}") --link-gbps "$links" --recipes "${ARMS:-$ours}" "${own[@]}" ;;
    twins)  # as few steps as let seven arms take three turns at four speeds within five minutes
      STEPS=${STEPS:-2} TURN=${TURN:-3} bench "${SECONDS_LINKS:-290}" 1_3b "$out" --nodes 2 \
        --gpus-per-node 1 ${TAG:+--tag "$TAG"} $(shared 2 1) --link-gbps "$links" \
        --recipes "${ARMS:-fsdp2,fsdp2+node,hsdp}" "${own[@]}" ;;
    blocks)  # by turns in the same processes: calls of their own would compare the host's moods
      arms=()
      for each in ${BLOCKS:-1 4}; do
        for arm in "fsdp2+node: fsdp2+node" "zeropp: recipe=zeropp" "$diff_g84h"; do
          arms+=(--arm "${arm%%:*}_$each:${arm#*:} engine.blocks_per_unit=$each")
        done
      done
      bench "${SECONDS_LINKS:-300}" 1_3b "$out/blocks" --nodes 2 --gpus-per-node 2 $(shared 2 2) \
        --tag blocks --link-gbps "$links" --recipes "${ARMS:-}" "${arms[@]}"
      page "$out/blocks" ;;
    studies)
      bench "${SECONDS_LINKS:-300}" 1_3b "$out" --nodes 2 --gpus-per-node 2 $(shared 2 2) \
        --tag studies --link-gbps "$links" --recipes "${ARMS:-w8,w4,g8_4_hadamard}" ;;
    deepspeed)
      deepspeed_there && bench "${SECONDS_LINKS:-500}" 1_3b "$out" --nodes 2 --gpus-per-node 2 \
        $(shared 2 2) --tag deepspeed --link-gbps "$links" --recipes "${ARMS:-}" \
        --arm "ds_zero3: engine=deepspeed recipe=zero3" \
        --arm "ds_zeropp: engine=deepspeed recipe=zeropp" ;;
    compiled)
      LIMIT=${LIMIT:-200} bench "${SECONDS_ONE:-500}" 1_3b "$out/compiled" --nodes 1 \
        --gpus-per-node "$inside" \
        --recipes "${ARMS:-fsdp2,zero3,zeropp}" --arm "$w4_g84h" engine.compile=true
      page "$out/compiled" ;;
    compiled_links)  # each arm in processes of its own, as compiled code is shared
      LIMIT=${LIMIT:-200} bench "${SECONDS_COMPILED:-200}" 1_3b "$out/compiled" --nodes 2 \
        --gpus-per-node 2 $(shared 2 2) --link-gbps "${LINKS:-50,max}" \
        --recipes "${ARMS:-fsdp2,zeropp}" "${own[@]}" --no-compute \
        engine.compile=true
      page "$out/compiled" ;;
    sockets)
      for pair in ${PAIRS:-1x1 2x2 4x4 8x2 2x8}; do
        export NCCL_SOCKET_NTHREADS=${pair%x*} NCCL_NSOCKS_PERTHREAD=${pair#*x}
        ROUNDS=1 bench "${SECONDS_ONE:-100}" 1_3b "runs/speed-sockets/$pair" --nodes 2 \
          --gpus-per-node 2 $(shared 2 2) --link-gbps "${LINKS:-max,50}" \
          --recipes "${ARMS:-zeropp}" --no-compute --no-probe --no-twins
        sockets runs/speed-sockets > "$out/sockets.csv"
        packed "$out/sockets.tar.gz" runs speed-sockets logs
      done
      unset NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD ;;
    13b)  # no room for a floor beside it
      LIMIT=${LIMIT:-200} bench "${SECONDS_ONE:-300}" 13b "$out" --apart --no-compute --tag 13b --nodes 1 \
        --gpus-per-node "$inside" \
        --recipes "${ARMS:-zero3,zeropp}" train.batch_size=2 $(few train.optimizer_state=8bit) ;;
    32_5b)
      LIMIT=${LIMIT:-200} bench "${SECONDS_ONE:-300}" 32_5b "$out" --apart --no-compute --tag 32_5b --nodes 1 \
        --gpus-per-node "$inside" --recipes "${ARMS:-zero3,zeropp}" \
        $(few train.optimizer_state=8bit train.optimizer_place=host) ;;
    calibrate)  # whole GPUs of one host; the share of a link's speed that payloads get, as before
      efficiency=$(sed -n 's/.*"efficiency": \([0-9.]*\).*/\1/p' conf/machine/h200.json)
      timeout -k 5 "$(within "${SECONDS_CALIBRATE:-240}")" python3 -m zpp_lab.cli bench calibrate \
        ${cpu:+--cpu --tiny} --efficiency "$efficiency" --out "$out/machine.json" 2>&1 | tee -a "$out/log.txt" ;;
    rollouts)
      for gbps in ${ROLLED:-12 25}; do
        timeout -k 5 "$(within "${SECONDS_ROLLOUTS:-280}")" python3 -m zpp_lab.cli emulate --nodes 2 \
          --gpus-per-node 1 --link-gbps "$gbps" $(shared 2 1) -- python3 experiments/speed/rollouts.py \
          --out "$out/rollouts-$gbps.json" --gbps "$gbps" --rounds "${ROUNDS:-3}" ${EXTRA:-} 2>&1 |
          tee -a "$out/log.txt"
      done ;;
    *) echo "no part $part" ;;
  esac
  echo "== $part: $((SECONDS - began)) s"
done
if [ -f "$out/results.csv" ]; then page "$out"; fi
