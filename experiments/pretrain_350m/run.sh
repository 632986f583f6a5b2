# The runs of conf/study/pretrain_350m.yaml: bash experiments/pretrain_350m/run.sh OUT PART...
# A part is ARM[:SEED,...], one run after the other on one GPU; `all`, the arms ARMS with the seeds
# SEEDS, a run on each GPU; or `compiled`, twelve steps with compiled blocks and twelve without.
# From the project's root on a machine with one NVIDIA GPU of 24 GiB or more. Each run has LIMIT
# seconds; OUT/pretrain_350m.tar.gz is written after each, and experiments/collect.py puts the
# archives of several machines together. OVERRIDES make it small enough for a try on a CPU.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
STUDY=pretrain_350m
LIMIT="${LIMIT:-280}"
source experiments/size.sh
ready "$STUDY" ${OVERRIDES:-}
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)

every() {  # the study itself, its archive renewed as runs end
  $zpp study "$STUDY" --arms "$ARMS" --seeds "${SEEDS:-1,2,3}" --alone \
    --jobs "$((gpus > 0 ? gpus : 1))" --dir "runs/$STUDY" ${OVERRIDES:-} > "$out/study.log" 2>&1 &
  local pid=$!
  while kill -0 "$pid" 2> /dev/null; do sleep 5; pack "$STUDY"; done
  wait "$pid"
  tail -n 4 "$out/study.log"
  pack "$STUDY"
}

compiled() {  # true and false: a GPU each where there are two
  local one device=0
  for one in true false; do
    CUDA_VISIBLE_DEVICES=$((gpus > 1 ? device : 0)) $zpp study "$STUDY" --arms zero3 --alone \
      --seeds 1 --dir "runs/compile_$one" ${OVERRIDES:-} train.steps=12 train.warmup_steps=4 \
      train.eval_every=12 engine.compile="$one" > "$out/compile_$one.log" 2>&1 &
    device=$((device + 1))
    [ "$gpus" -gt 1 ] || wait
  done
  wait
  for one in true false; do
    say "engine.compile=$one: $(tail -n 1 runs/compile_$one/zero3/seed1/log.txt)"
    pack "compile_$one"
  done
}

alone() {  # ARM[:SEED,...]
  local seeds="${1#*:}"
  [ "$seeds" = "$1" ] && seeds=1
  for SEED in ${seeds//,/ }; do arm "$STUDY" "${1%%:*}" ${OVERRIDES:-}; done
}

for part in "$@"; do
  case $part in
    all) every ;;
    compiled) compiled ;;
    *) alone "$part" ;;
  esac
done
