# The runs of conf/study/pretrain_13b.yaml: bash experiments/pretrain_13b/run.sh OUT ARM...
# From the project's root on a machine with four NVIDIA GPUs of 80 GiB or more. Each arm has LIMIT
# seconds; with CALL=590 none begins that this machine would not let end, and the same command goes
# on in the next call. OUT/pretrain_13b.tar.gz is written after each, and experiments/collect.py puts the
# archives of several machines together. STUDY=pretrain_13b_mini tries all of it on a CPU.
# The part `resume` shows that an interrupted run goes on with the same bits; see the README.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
STUDY="${STUDY:-pretrain_13b}"
LIMIT="${LIMIT:-240}"
source experiments/size.sh
ready "$STUDY"
for part in "$@"; do
  case $part in
    resume) source experiments/pretrain_13b/resume.sh ;;
    *) arm "$STUDY" "$part" ;;
  esac
done
