# What a GPU machine without a network lacks, to be carried there beside the project:
#     bash experiments/carry.sh [PYTHON]     (3.12: the Python of that machine, x86-64)
# Into .whl/ wheels of what runs need and machines for deep learning seldom have, as constraints.txt
# pins them; into .cutlass/ CUTLASS's headers. kernels/env.sh finds both. torch, numpy and tokenizers
# are taken for granted. For emulated nodes see speed/iproute.sh, for DeepSpeed deepspeed/wheels.sh.
set -euo pipefail
python="${1:-3.12}"
pip="${PIP:-.venv/bin/python -m pip} --disable-pip-version-check -q"
packages=(hydra-core omegaconf pydantic pydantic_core annotated-types typing-inspection wandb cwevals
  platformdirs importlib_metadata zipp googleapis-common-protos)
mapfile -t -O "${#packages[@]}" packages < <(sed -n 's/^\(opentelemetry[^=]*\)==.*/\1/p' constraints.txt)
mkdir -p .whl
for package in "${packages[@]}"; do
  pinned=$(grep -i "^${package//[-_]/[-_]}==" constraints.txt || echo "$package")
  $pip download --no-deps --only-binary=:all: -d .whl --python-version "$python" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 "$pinned"
done
$pip wheel --no-deps -w .whl antlr4-python3-runtime==4.9.3  # has no wheel of its own
headers=$(dirname "$(${PYTHON:-.venv/bin/python} -c 'import cutlass_library as c; print(c.__file__)')")
rm -rf .cutlass
cp -r "$headers/source/include" .cutlass
du -sh .whl .cutlass
