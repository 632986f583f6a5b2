# Sourced by the scripts of experiments: headers and packages carried along where they are not
# installed, and how much time is left.
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:${PYTHONPATH:-}"
if [ -d .cutlass ]; then export ZPP_CUTLASS_INCLUDE="$PWD/.cutlass"; fi
if [ -d .whl ]; then
  wheels=$(ls .whl)
  if [ "$(cat .site/.wheels 2> /dev/null)" != "$wheels" ]; then  # once: others may be reading it
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
      --target .site .whl/*.whl && echo "$wheels" > .site/.wheels
  fi
  export PYTHONPATH="$PYTHONPATH:$PWD/.site"
fi
# CALL: seconds that a machine gives to one call, counted from the first script that reads this.
if [ -n "${CALL:-}" ] && [ -z "${CALL_END:-}" ]; then export CALL_END=$(($(date +%s) + CALL)); fi
within() {  # seconds: so many, or what is left of the call less 25 to end and pack; never less than 1
  local left=$((${CALL_END:-$(($(date +%s) + $1 + 25))} - $(date +%s) - 25))
  [ "$left" -lt "$1" ] || left=$1
  [ "$left" -gt 0 ] || left=1
  echo "$left"
}
packed() {  # archive, then what tar takes: written beside and moved, so that it is always whole
  tar czf "$1.part" "${@:2}" && mv "$1.part" "$1"
}
