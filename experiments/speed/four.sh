#!/bin/bash
# The shapes of four GPUs of one host: OUT=... bash experiments/speed/four.sh [PART...]
# Parts, in this order unless named: links lean one four 13b (deepspeed only when named).
# CALL: seconds that this script may take (default 570). Results as they come: $OUT/four.tar.gz.
set -u
: "${OUT:?a folder for the results}"
[ $# -gt 0 ] || set -- links lean one four 13b
end=$(($(date +%s) + ${CALL:-570}))
mkdir -p "$OUT"
source experiments/kernels/env.sh
if [ -z "${REHEARSE:-}" ]; then kernels "$OUT" || exit 1; fi
[ ! -d .iproute ] || export ZPP_LAB_IPROUTE="$PWD/.iproute"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=1
work=${WORK:-/tmp/four-out}
mkdir -p "$work" "$OUT"
cpu=""
small=()
if [ -n "${REHEARSE:-}" ]; then  # on CPUs over gloo, a tiny model
  cpu=--cpu
  small=(model.dim=32 model.ffn=48 model.vocab_size=64 model.layers=4 model.heads=4 model.kv_heads=4
    data.seq_len=8 train.param_dtype=fp32 train.reduce_dtype=fp32)
fi
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-}
[ -n "$PYTORCH_CUDA_ALLOC_CONF" ] || unset PYTORCH_CUDA_ALLOC_CONF
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/four-inductor}

pack() {  # beside and moved, so always whole
  local new=/tmp/four-$BASHPID.tar.gz code=0
  tar czf "$new" -C "$(dirname "$work")" "$(basename "$work")" 2> /dev/null || code=$?
  if [ "$code" -le 1 ]; then cp "$new" "$OUT/new-$BASHPID" && mv "$OUT/new-$BASHPID" "$OUT/four.tar.gz"; fi
  rm -f "$new"
}
( while sleep 15; do pack; done ) &
packer=$!
trap 'kill $packer 2> /dev/null; wait $packer 2> /dev/null; pack; rm -f "$OUT"/new-*' EXIT
trap 'exit 143' TERM INT

left() { echo $((end - $(date +%s) - 12)); }
bench() {  # most seconds, folder below, arguments of zpp-lab bench step
  local limit=$1 folder=$work/$2 rest began=$SECONDS
  rest=$(left)
  [ -z "$later" ] || rest=$((rest - 65))  # kept for 13b
  shift 2
  [ "$rest" -ge "$limit" ] || limit=$rest
  if [ "$limit" -lt "${NEED:-40}" ]; then echo "== $folder: not begun, $rest s are left" && return; fi
  mkdir -p "$folder"
  echo "== $folder: at most $limit s"
  timeout -k 10 "$limit" python3 -m zpp_lab.cli bench step $cpu --out "$folder" \
    --budget $((limit - 12)) "$@" data.seq_len=2048 "${small[@]}" 2>&1 | tee -a "$work/log.txt"
  echo "== $folder: $((SECONDS - began)) s" | tee -a "$work/log.txt"
  pack
}
graph() { if [ -n "$cpu" ]; then echo "${1%+graph}"; else echo "$1"; fi; }  # words for CPUs have none

off=engine.graph=false
four=engine.blocks_per_unit=4
later=""
case " $* " in *" 13b "*) later=yes ;; esac
for part in "$@"; do
  [ "$part" != 13b ] || later=""
  case $part in
    links)  # 2 x 2 at 50 Gb/s, all arms by turns; plain arms first, as in the page's table
      bench "${LIMIT_LINKS:-215}" links --nodes 2 --gpus-per-node 2 --link-gbps 50 --no-twins \
        --steps 6 --turn-seconds 3 --rounds 3 --limit "${HANG:-45}" \
        --recipes fsdp2,fsdp2+node,hsdp,amsp_node,diff_g84h \
        --arm "amsp_node_4: recipe=amsp_node $four" \
        --arm "diff_g84h_4: recipe=diff_g84h $four" \
        --arm "zeropp_raw: recipe=zeropp recipe.name=zeropp_raw recipe.weights.bits=null recipe.grads.bits=null" \
        --arm "zeropp: recipe=zeropp" \
        --arm "diff2_g82: recipe=diff2_g82" \
        --arm "diff3_g83: recipe=diff2_g82 recipe.name=diff3_g83 recipe.weights_update.bits=3 recipe.grads_inter.bits=3" \
        model=1_3b model.checkpoint_activations=true train.batch_size=1 ;;
    lean)  # the goals' arms in processes of few arms, beside plain arms from a graph
      bench "${LIMIT_LEAN:-125}" lean --nodes 2 --gpus-per-node 2 --link-gbps 50 --no-twins --no-probe \
        --steps 8 --turn-seconds 2.5 --rounds 3 --limit "${HANG:-45}" --no-compute \
        --arm "hsdp+graph: $(graph hsdp+graph)" \
        --arm "fsdp2+node+graph: $(graph fsdp2+node+graph)" \
        --arm "amsp_node: recipe=amsp_node" \
        --arm "diff_g84h: recipe=diff_g84h" \
        --arm "diff_g84h_4: recipe=diff_g84h $four" \
        --arm "diff_g84h_eager: recipe=diff_g84h $off" \
        --arm "diff_g84h_4_eager: recipe=diff_g84h $four $off" \
        --recipes "$(graph compute+graph)" \
        model=1_3b model.checkpoint_activations=true train.batch_size=1 ;;
    one | four)  # NVLink, compiled, one and four sequences a GPU
      sequences=1 most=${LIMIT_NVLINK:-90}
      [ "$part" = one ] || sequences=4 most=${LIMIT_NVLINK:-100}
      bench "$most" "$part" --nodes 1 --gpus-per-node 4 --no-twins --no-compute \
        --steps 7 --turn-seconds 3 --rounds 3 --limit "${HANG:-75}" \
        --arm "fsdp2+graph: $(graph fsdp2+graph)" \
        --arm "fsdp2: fsdp2" \
        --arm "zero3: recipe=zero3" \
        --arm "zeropp: recipe=zeropp" \
        --arm "zero3_eager: recipe=zero3 $off" \
        --arm "zeropp_eager: recipe=zeropp $off" \
        --recipes "" \
        model=1_3b model.checkpoint_activations=true train.batch_size=$sequences engine.compile=true ;;
    13b)  # 16,384 tokens a step; one arm in memory at a time
      bench "${LIMIT_13B:-115}" 13b --nodes 1 --gpus-per-node 4 --no-twins --no-compute --apart \
        --steps 4 --turn-seconds 4 --rounds 3 --limit "${HANG:-75}" --tag 13b \
        --arm "zero3_kept: recipe=zero3 model.checkpoint_activations=false" \
        --arm "zero3: recipe=zero3 model.checkpoint_activations=true" \
        --arm "zeropp_kept: recipe=zeropp model.checkpoint_activations=false" \
        --recipes "" \
        model=13b train.batch_size=2 engine.compile=true ;;
    deepspeed)
      source experiments/kernels/env.sh
      unpack .whl-ds .site-ds
      export PATH="$PWD/.site-ds/bin:$PATH"
      if ! python3 -c "import deepspeed" > /dev/null 2>&1; then echo "no DeepSpeed" && continue; fi
      if [ -z "$cpu" ]; then
        TORCH_CUDA_ARCH_LIST=$(python3 -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
        export TORCH_CUDA_ARCH_LIST
        timeout -k 5 150 python3 -c "
from deepspeed.ops.op_builder import QuantizerBuilder; QuantizerBuilder().load()" >> "$work/log.txt" 2>&1
      fi
      bench "${LIMIT_DEEPSPEED:-150}" deepspeed --nodes 2 --gpus-per-node 2 --link-gbps 50 --no-twins \
        --no-compute --no-probe --steps 6 --turn-seconds 4 --rounds 3 --limit 90 --tag deepspeed \
        --arm "ds_zeropp: engine=deepspeed recipe=zeropp" --recipes "" \
        model=1_3b model.checkpoint_activations=true train.batch_size=1 ;;
    *) echo "no part $part" ;;
  esac
done
