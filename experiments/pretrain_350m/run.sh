# The runs of conf/study/pretrain_350m.yaml: bash experiments/pretrain_350m/run.sh OUT ARM[:SEED]...
# From the project's root on a machine with one NVIDIA GPU of 24 GiB or more. Each run has LIMIT
# seconds; OUT/pretrain_350m.tar.gz is written after each, and experiments/collect.py puts the
# archives of several machines together. OVERRIDES make it small enough for a try on a CPU.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
STUDY=pretrain_350m
LIMIT="${LIMIT:-280}"
source experiments/size.sh
ready "$STUDY" ${OVERRIDES:-}
for part in "$@"; do
  seeds="${part#*:}"
  [ "$seeds" = "$part" ] && seeds=1
  for SEED in ${seeds//,/ }; do arm "$STUDY" "${part%%:*}" ${OVERRIDES:-}; done
done
