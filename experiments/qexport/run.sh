# The study of experiments/qexport at 350M parameters: bash experiments/qexport/run.sh OUT_FOLDER
# Runs from the project's root on a machine with an NVIDIA GPU and 64 GiB of disk. Seeds come one
# after another and leave no checkpoints behind. LIMIT: seconds after which it is asked to stop; the
# same command goes on from there. --seeds 1 takes one seed, --no-folders does without transformers.
out="${1:?name a folder for the results}"
mkdir -p "$out"
python3 -m zpp_lab.cli build > "$out/build.log" 2>&1
PYTHONPATH=. timeout -k 30 "${LIMIT:-7200}" python3 experiments/qexport/run.py \
  experiments/qexport/350m.yaml "$out" "${@:2}" 2>&1 | tee -a "$out/study.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> "$out/study.log"
