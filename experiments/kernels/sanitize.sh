# compute-sanitizer's three checkers on a reduced set of random cases.
source "$(dirname "$0")/env.sh"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck initcheck; do
  echo "== $tool"
  timeout "${LIMIT:-150}" compute-sanitizer --tool $tool --print-limit 5 --kernel-name regex:zpp \
    python3 experiments/kernels/check.py --jobs 1 --cases "${CASES:-12}" 2>&1 | tail -12
done
