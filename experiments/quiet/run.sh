# What README.md of this folder reports: bash experiments/quiet/run.sh OUT
# From the project's root, on two cores in three quarters of an hour; no GPU.
set -eu
out="${1:?name a folder for the results}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
for study in quiet settled; do
  python3 -m zpp_lab.cli study "experiments/quiet/$study.yaml" --jobs 2 --dir "runs/$study"
  python3 -m zpp_lab.cli export "runs/$study" --steps --out "$out/$study.csv"
done
python3 experiments/quiet/pairs.py "$out/quiet.csv" "$out/settled.csv"
