# The runs of conf/study/pretrain_13b.yaml: bash experiments/pretrain_13b/run.sh OUT ARM...
# From the project's root on a machine with four NVIDIA GPUs of 80 GiB or more, or with two of 140
# GiB, where pretrain_13b_x2 runs (GPUS: how many, by default all). Each arm has LIMIT seconds; with
# CALL=590 none begins that has less than NEED of them left, and the same command goes on in the next
# call; experiments/background.sh lets arms outlive calls. OUT/STUDY.tar.gz is written after each, and
# experiments/collect.py puts the archives of several machines together. OVERRIDES: Hydra overrides
# for every arm. STUDY=pretrain_13b_mini tries all of it on a CPU; pretrain_13b_calm wants four GPUs.
# The part `resume` shows that an interrupted run goes on with the same bits, `moved` the same on two
# machines at small size; see the README.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
source experiments/size.sh
STUDY=$(sized "${STUDY:-pretrain_13b}")
LIMIT="${LIMIT:-$((GPUS == 2 ? 420 : 240))}"
NEED="${NEED:-$((GPUS == 2 ? 285 : 200))}"
worst=0
ready "$STUDY" ${OVERRIDES:-}
for part in "$@"; do
  case $part in
    resume | moved) source "experiments/pretrain_13b/$part.sh" ;;
    *) arm "$STUDY" "$part" ${OVERRIDES:-} ;;
  esac
done
exit "$worst"
