# What experiments/virtual/README.md reports: bash experiments/virtual/run.sh OUT_FOLDER
# Runs from the project's root on a machine with an NVIDIA GPU; about three minutes. The names in
# capitals make it smaller, for a try without a GPU.
out="${1:?name a folder for the results}"
mkdir -p "$out"
source experiments/kernels/env.sh
big="model=${BIG:-350m} cluster=${CLUSTER:-8x8} data.seq_len=${LENGTH:-1024} train.param_dtype=bf16"
small="model=${SMALL:-10m} cluster=${CLUSTER:-8x8} data.seq_len=${SHORT:-256} train.batch_size=2
  train.param_dtype=bf16 train.reduce_dtype=bf16"
recipes=zero3,zeropp,qsdp,g8_4_hadamard

part() {  # seconds, log, command
  timeout -k 5 "$(within "$1")" "${@:3}" > "$out/$2.log" 2>&1
  echo "$2: exit $?, at $SECONDS s"
  grep -v -i warn "$out/$2.log" | tail -n 12
}

side() {  # runs side by side, lanes of each: the rate of all together
  rm -rf "$out/side"
  local began=$SECONDS pids=() i
  for i in $(seq "$1"); do
    python3 -m zpp_lab.cli train recipe=w4 $small engine.lanes="$2" train.steps="${STEPS:-40}" \
      train.eval_tokens=8192 tracking.wandb=off tracking.telemetry_every=0 seed="$i" \
      run.dir="$out/side/$i" >> "$out/side.log" 2>&1 &
    pids+=($!)
  done
  wait "${pids[@]}"
  python3 - "$out/side" "$1 runs, $2 lanes, ${3:-time slices}" $((SECONDS - began)) <<'PY'
import json, pathlib, sys
rates = []
for path in pathlib.Path(sys.argv[1]).glob("*/metrics.jsonl"):
    at = [json.loads(line)["seconds"] for line in path.read_text().splitlines()]
    half = len(at) // 2
    rates.append((len(at) - 1 - half) / (at[-2] - at[half - 1]))
mean = f"{sum(rates) / len(rates):.2f} each" if rates else "no run"
print(f"{sys.argv[2]}: {len(rates)} ran, {sum(rates):.2f} steps/s together, {mean}, {sys.argv[3]} s")
PY
  rm -rf "$out/side"
}

python3 -m zpp_lab.cli build > "$out/build.log" 2>&1 &
build=$!
python3 -c "from zpp_lab.config.compose import compose; from zpp_lab.data import open_data
print(open_data(compose(['data=stdlib']).data).tokens)" &
part 75 passes python3 -m pytest tests/engines/test_passes.py -q -x -p no:cacheprovider
wait $build
echo "build: exit $?, at $SECONDS s"; tail -n 3 "$out/build.log"
part "${BIG_SECONDS:-80}" 350m python3 experiments/virtual/bench.py --recipes $recipes \
  --steps 2 --out "$out/350m.json" $big train.batch_size=4
part 40 10m python3 experiments/virtual/bench.py --recipes w4 --steps 5 --warm-up 2 \
  --variants engine.graph=false engine.lanes=1 engine.lanes=4 engine.lanes=8 \
  --out "$out/10m.json" $small
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
if command -v nvidia-cuda-mps-control && nvidia-cuda-mps-control -d; then
  side "${MANY:-8}" 4 MPS
  echo quit | timeout 10 nvidia-cuda-mps-control
fi
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
side "${MANY:-8}" 4
echo "done at $SECONDS s"
