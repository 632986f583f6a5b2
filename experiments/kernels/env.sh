# Sourced by the scripts of experiments: headers and packages carried along where they are not
# installed (../carry.sh fetches them, or ../reference/carry.sh with compiled kernels), and how much
# time is left.
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
unset PYTHONDONTWRITEBYTECODE  # each process would compile what it imports anew
if [ -d .cutlass ]; then export ZPP_CUTLASS_INCLUDE="$PWD/.cutlass"; fi
unpack() {  # folder of wheels, site folder: into it what fits here and cannot be imported yet
  [ -d "$1" ] || return 0
  export PYTHONPATH="$PYTHONPATH:$PWD/$2"
  local wheels
  wheels=$(python3 experiments/wheels.py "$1" "$2") || return 0  # nothing is missing
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --disable-pip-version-check --target "$2" $wheels
}
unpack .whl .site
unpack .queue/whl .site
if [ ! -d .cutlass ] && [ -d .queue ]; then
  export ZPP_CUTLASS_INCLUDE="$PWD/.site/cutlass/include"
fi
kernels() {  # folder: those of .queue/whl where they serve, else compiled here and kept there
  mkdir -p .site/cutlass
  if [ -f .queue/cutlass.tar.xz ]; then tar xJf .queue/cutlass.tar.xz -C .site/cutlass; fi
  python3 experiments/reference/kernels.py "$1" && return
  rm -rf .site/zpp_lab_kernels*
  python3 experiments/reference/kernels.py "$1"
}
# CALL: seconds that a machine gives to one call, counted from the first script that reads this.
if [ -n "${CALL:-}" ] && [ -z "${CALL_END:-}" ]; then export CALL_END=$(($(date +%s) + CALL)); fi
within() {  # seconds: so many, or what is left of the call less 25 to end and pack; never less than 1
  local left=$((${CALL_END:-$(($(date +%s) + $1 + 25))} - $(date +%s) - 25))
  [ "$left" -lt "$1" ] || left=$1
  [ "$left" -gt 0 ] || left=1
  echo "$left"
}
packed() {  # archive, parent, folder in it, names to leave out: beside and moved, so always whole
  # Runs may write meanwhile: a metrics.jsonl is cut where it was long then (tar: 1), which readers
  # take for a run that was killed. Summaries go first, so that who has one is whole.
  local to=$1 parent=$2 name=$3 code=0 more
  shift 3
  more=("${@/#/--exclude=}")
  (cd "$parent" && find "$name" -name summary.json -print0) |
    tar cf "$to.part" -C "$parent" --null --no-recursion -T - || code=$?
  tar rf "$to.part" "${more[@]}" --exclude=summary.json --warning=no-file-changed \
    --warning=no-file-removed --warning=no-file-shrank -C "$parent" "$name" || code=$?
  if [ "$code" -le 1 ] && gzip -f "$to.part"; then
    mv "$to.part.gz" "$to"
  else
    rm -f "$to.part" "$to.part.gz"
    echo "$to was not renewed" >&2
    return 1
  fi
}
