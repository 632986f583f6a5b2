# The study of experiments/qexport at 350M parameters: bash experiments/qexport/run.sh OUT [ARGUMENTS]
# Runs from the project's root on a machine with an NVIDIA GPU and 64 GiB of disk. Seeds come one
# after another and leave no checkpoints behind. LIMIT: seconds after which it is asked to stop; the
# same command goes on from there. --seeds 1 takes one seed, --no-folders does without transformers.
# STUDY: another YAML file; experiments/qexport/study.yaml needs no GPU. Runs lie in runs/qexport;
# OUT gets the tables and, as an archive, what is small.
set -u
out="${1:?name a folder for the results}"
mkdir -p "$out" runs/qexport
source experiments/kernels/env.sh
if nvidia-smi > /dev/null 2>&1; then python3 -m zpp_lab.cli build > "$out/build.log" 2>&1; fi
timeout -k 30 "$(within "${LIMIT:-7200}")" python3 experiments/qexport/run.py \
  "${STUDY:-experiments/qexport/350m.yaml}" runs/qexport "${@:2}" 2>&1 | tee -a "$out/study.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> "$out/study.log" 2> /dev/null
cp runs/qexport/*.csv "$out/" 2> /dev/null
packed "$out/qexport.tar.gz" runs qexport checkpoints exports
echo "study and archive: $SECONDS s"
