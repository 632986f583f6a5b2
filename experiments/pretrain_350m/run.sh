# The runs of conf/study/pretrain_350m.yaml: bash experiments/pretrain_350m/run.sh OUT PART...
# A part is ARM[:SEED,...], one run after the other on one GPU; `all`, the arms ARMS with the seeds
# SEEDS, a run on each GPU, or PER_GPU of them; or `faster`, twelve steps of the baseline with each
# setting of TRY. FOLDER: of the runs of `all`, where several calls go on at once. STUDY: another that
# extends it, such as pretrain_350m_quiet.
# From the project's root on a machine with one NVIDIA GPU of 24 GiB or more. Each run has LIMIT
# seconds; OUT/pretrain_350m.tar.gz is written after each, and experiments/collect.py puts the
# archives of several machines together. OVERRIDES make it small enough for a try on a CPU.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
STUDY="${STUDY:-pretrain_350m}"
FOLDER="${FOLDER:-$STUDY}"
LIMIT="${LIMIT:-280}"
ONE_GPU=yes
source experiments/size.sh
ready "$STUDY" ${OVERRIDES:-}
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)

every() {  # the study itself, its archive renewed as runs end
  timeout -k 20 "$(within 31536000)" $zpp study "$STUDY" --arms "$ARMS" --seeds "${SEEDS:-1,2,3}" --alone \
    --jobs "$(((gpus > 0 ? gpus : 1) * ${PER_GPU:-1}))" --runs-per-gpu "${PER_GPU:-1}" \
    --dir "runs/$FOLDER" ${OVERRIDES:-} > "$out/study.log" 2>&1 &
  local pid=$!
  while kill -0 "$pid" 2> /dev/null; do sleep 5; pack "$FOLDER"; done
  wait "$pid"
  tail -n 4 "$out/study.log"
  pack "$FOLDER"
}

faster() {  # twelve steps of the baseline with each setting of TRY, a GPU each where there are two
  local one name device=0
  for one in ${TRY:-engine.compile=false engine.compile=true engine.lanes=2 engine.lanes=4}; do
    name="try_${one//[^a-z0-9]/_}"
    CUDA_VISIBLE_DEVICES=$((gpus > 1 ? device : 0)) $zpp study "$STUDY" --arms zero3 --alone \
      --seeds 1 --dir "runs/$name" ${OVERRIDES:-} train.steps=12 train.warmup_steps=4 \
      train.eval_every=12 "$one" > "$out/$name.log" 2>&1 &
    device=$((device + 1))
    if [ "$device" -ge "$gpus" ]; then wait && device=0; fi
  done
  wait
  for name in runs/try_*; do
    say "$(basename "$name"): $(tail -n 1 "$name/zero3/seed1/log.txt")"
    $zpp export "$name" --steps --out "$out/$(basename "$name").csv"
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
    faster) faster ;;
    *) alone "$part" ;;
  esac
done
