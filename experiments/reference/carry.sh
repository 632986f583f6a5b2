# What a GPU machine without a network needs for run.sh, into .queue (not in the repository; name it
# among what is carried there): bash experiments/reference/carry.sh [python] [prose]
# Those texts (python where none is named), kernels for H200 (nvcc 13.0, some minutes), CUTLASS's
# headers to compile them there if these do not serve, and the wheels that such a machine lacks. The
# prose is made where apt is Debian's: it downloads 1 GB into data_cache/debian.
set -euo pipefail
python="${PYTHON:-.venv/bin/python}"
here=experiments/reference
mkdir -p .queue/whl
for text in "${@:-python}"; do
  case $text in python) file=corpus ;; *) file=corpus_$text ;; esac
  [ -f .queue/$file.tar.xz ] || PYTHONPATH="$PWD" $python $here/corpus.py make "$text" .queue
done
PYTHONPATH="$PWD" $python -m zpp_lab.cli build --arch 90a --wheel .queue/whl
headers=$(dirname "$($python -c 'import cutlass_library as c; print(c.__file__)')")
[ -f .queue/cutlass.tar.xz ] || tar cJf .queue/cutlass.tar.xz -C "$headers/source" include
for package in hydra-core omegaconf pydantic pydantic_core annotated-types typing-inspection; do
  ls .queue/whl/"${package//-/_}"-* > /dev/null 2>&1 || $python -m pip -q download --no-deps \
    --only-binary=:all: -d .queue/whl --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    "$(grep -i "^$package==" constraints.txt)"
done
ls .queue/whl/antlr4* > /dev/null 2>&1 || $python -m pip -q wheel --no-deps -w .queue/whl antlr4-python3-runtime==4.9.3
du -sh .queue
