# Everything that experiments/kernels/README.md reports: bash experiments/kernels/run.sh OUT_FOLDER
# Runs from the project's root on a machine with an NVIDIA GPU and nvcc; about four minutes.
out="${1:?name a folder for the results}"
source experiments/kernels/env.sh
python3 -c "from zpp_lab.ops import build; build.main(['--arch', 'local'])" 2>&1 | tail -20
timeout 150 python3 -m pytest tests/ops -x -q > "$out/pytest.log" 2>&1
echo "pytest: exit $?"
timeout 150 python3 experiments/kernels/check.py --cases 10000 > "$out/check.log" 2>&1
tail -5 "$out/check.log"
timeout 280 python3 -m zpp_lab.bench.kernels --mib 64 512 --full --peers --out "$out" > "$out/bench.log" 2>&1
grep -v " 64M\|512M" "$out/bench.log" | cut -c1-250 | tail -40
LIMIT=60 bash experiments/kernels/sanitize.sh > "$out/sanitize.log" 2>&1
cut -c1-200 "$out/sanitize.log" | tail -20
