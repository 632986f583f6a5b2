# compute-sanitizer's three checkers on a reduced set of random cases.
source "$(dirname "$0")/env.sh"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck initcheck; do
  echo "== $tool"
  only=(--kernel-name kernel_substring=zpp)
  if [ $tool = initcheck ]; then only=(); fi  # it must see who else writes
  timeout "${LIMIT:-150}" compute-sanitizer --tool $tool --print-limit 5 "${only[@]}" \
    python3 experiments/kernels/check.py --jobs 1 --cases "${CASES:-60}" 2>&1 | tail -12
done
