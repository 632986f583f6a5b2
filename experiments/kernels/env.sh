# Sourced by the scripts beside it: headers and packages carried along where they are not installed.
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
if [ -d .cutlass ]; then export ZPP_CUTLASS_INCLUDE="$PWD/.cutlass"; fi
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target .site .whl/*.whl && export PYTHONPATH="$PYTHONPATH:$PWD/.site"
fi
