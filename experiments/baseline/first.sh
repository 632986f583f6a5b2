# Where the first step goes: bash experiments/baseline/first.sh OUT MODEL RECIPE...
# From the project's root on a machine with four NVIDIA GPUs, or two (GPUS: how many). Each recipe runs twice: the second
# start finds what the first has compiled. PROFILE=1 adds a third, under cProfile.
set -u
out="${1:?name a folder for the results}"
model="${2:?name a model, such as 13b}"
shift 2
mkdir -p "$out"
source experiments/size.sh
build > "$out/build.log" 2>&1
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$(mktemp -d)}"
for recipe in "$@"; do
  for start in cold warm ${PROFILE:+profile}; do
    profile=""
    [ "$start" = profile ] && profile="--profile $out/$model-$recipe.txt"
    timeout -k 5 "$(within "${LIMIT:-150}")" torchrun --standalone --nproc-per-node "$GPUS" \
      experiments/baseline/first.py --out "$out" --name "$model $recipe $start" $profile \
      "model=$model" "recipe=$recipe" $(two "$model") ${OVERRIDES:-} 2>&1 | tee -a "$out/log.txt" |
      grep -E "^$model |Error|error" | cut -c1-300
    say "$model $recipe $start"
  done
done
