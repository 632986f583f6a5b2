# What README.md of this folder reports: bash experiments/edges/run.sh OUT
# From the project's root, on two cores in a quarter of an hour; no GPU.
set -eu
out="${1:?name a folder for the results}"
mkdir -p "$out"
here=experiments/edges
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
zpp="python3 -m zpp_lab.cli"
$zpp study $here/edges.yaml --jobs 2 --dir runs/edges
$zpp study $here/edges.yaml --jobs 2 --dir runs/edges_slow --arms zero3,w4 --no-report train.lr=3.3e-4
mapfile -t settings < <(python3 -c "
from zpp_lab.config.compose import load_study
print(*load_study('$here/edges.yaml').overrides, sep='\n')")
$zpp train "${settings[@]}" recipe=w4 train.checkpoint_every=22 train.keep_checkpoints=2 \
  run.piece_steps=22 run.dir=runs/edges_look || [ $? = 75 ]
python3 $here/look.py runs/edges_look --out "$out/look.json"
for study in edges edges_slow; do
  $zpp export runs/$study --steps --out "$out/$study.csv"
done
