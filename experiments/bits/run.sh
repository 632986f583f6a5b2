# The runs that experiments/bits/README.md reports: bash experiments/bits/run.sh OUT_FOLDER
# Runs from the project's root on a machine with an NVIDIA GPU; about eight minutes on one H200.
# LIMIT: seconds after which the study is asked to stop; the same command goes on from there.
# The archive leaves checkpoints out; `zpp-lab report` builds the report from it on any machine.
out="${1:?name a folder for the results}"
mkdir -p "$out"
source experiments/kernels/env.sh
python3 -m zpp_lab.cli build > "$out/build.log" 2>&1 &  # the first runs wait for it
timeout -k 30 "$(within "${LIMIT:-3600}")" python3 -m zpp_lab.cli study bits --dir runs/bits \
  ops.backend=cuda tracking.wandb=off "${@:2}" 2>&1 | tee "$out/study.log"
tail -n 3 "$out/build.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> "$out/study.log"
packed "$out/bits.tar.gz" runs bits checkpoints
echo "study and archive: $SECONDS s"
