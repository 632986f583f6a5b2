# Everything that experiments/kernels/README.md reports: bash experiments/kernels/run.sh OUT_FOLDER
# Runs from the project's root on a machine with an NVIDIA GPU and nvcc (or a wheel of the kernels in
# .whl); about three minutes.
out="${1:?name a folder for the results}"
mkdir -p "$out"
source experiments/kernels/env.sh
start=$SECONDS
say() { echo "[$((SECONDS - start)) s] $*"; }
python3 -c "from zpp_lab.codecs.kernels import build; build.main([])" 2>&1 | tail -20
say built
timeout "$(within 120)" python3 experiments/kernels/check.py --cases "${CASES:-10000}" \
  --start ${STARTS:-1000} --seconds 100 > "$out/check.log" 2>&1
tail -3 "$out/check.log" | cut -c1-400
say compared
OMP_NUM_THREADS=8 timeout "$(within 150)" python3 -m pytest tests/codecs/kernels -q -p no:hydra_pytest > "$out/pytest.log" 2>&1 &
LIMIT=$(within 60) bash experiments/kernels/sanitize.sh > "$out/sanitize.log" 2>&1
wait
tail -3 "$out/pytest.log" | cut -c1-400
cut -c1-200 "$out/sanitize.log"
say checked
timeout "$(within "${BENCH_LIMIT:-280}")" python3 experiments/kernels/bench.py --mib ${SIZES:-64 512} \
  ${BENCH:-} --peers --out "$out" > "$out/bench.log" 2>&1
grep -v "64M\|512M" "$out/bench.log" | cut -c1-250 | tail -40
say measured
LIMIT=$(within 40) bash experiments/kernels/counters.sh > "$out/counters.csv"
wc -l "$out/counters.csv"
say counted
