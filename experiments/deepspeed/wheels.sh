# DeepSpeed and what it needs, as wheels for a GPU machine without a network (Python 3.12, x86-64):
#     bash experiments/deepspeed/wheels.sh [FOLDER]
# torch, numpy, packaging and pydantic are there already; nothing of CUDA is fetched.
set -euo pipefail
out="${1:-.whl-ds}"
pip="${PIP:-.venv/bin/python -m pip}"
mkdir -p "$out"
DS_BUILD_OPS=0 $pip wheel -q --no-build-isolation --no-deps -w "$out" deepspeed==0.19.8
for package in einops hjson msgpack ninja psutil py-cpuinfo tqdm; do
  $pip download -q --no-deps --only-binary=:all: -d "$out" --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux_2_12_x86_64 \
    "$package"
done
ls -l "$out"
