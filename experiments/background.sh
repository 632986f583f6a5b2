# Runs that outlive a call: bash experiments/background.sh OUT start LINE... | wait | stop
# For machines that give calls of limited length, overwrite the project's root before each and keep
# processes and the rest of the disk between them.
#   start  copies the project out of the way, begins the LINEs there, one after another in a session
#          of their own, and then waits as below. A line is a command in which the word OUT stands for
#          its folder of results: 'bash experiments/pretrain_13b/run.sh OUT zero3 w6'
#   wait   shows what the lines say until they have ended or the call is nearly over (CALL: its
#          seconds). Then it packs every run, finished or not, as OUT/STUDY.tar.gz, checkpoints left
#          out. Exit code: the lines' own, 75 while they go on
#   stop   ends the lines, then packs
# MACHINE: seconds from `start` on for which the machine will be there; an arm that could not end
# before is not begun. BACKGROUND: another place for the copy, whose runs and token files stay.
# The copy has no .git: ZPP_COMMIT tells its results which commit it is of.
set -u
out="${1:?name a folder for the results}"
what="${2:?start, wait or stop}"
shift 2
mkdir -p "$out"
place="${BACKGROUND:-${HOME:-/root}/.cache/zpp_lab/background}"
source experiments/kernels/env.sh

living() { [ -f "$place/session" ] && kill -0 "$(cat "$place/session")" 2> /dev/null; }

copied() {  # the project as it is now; what it wrote there before stays
  mkdir -p "$place/tree" "$place/out"
  tar c --exclude=./.git --exclude=./shared --exclude=./runs --exclude=./data_cache \
    --exclude=__pycache__ --exclude="./$(realpath --relative-to="$PWD" "$out")" . |
    tar x -C "$place/tree"
}

commit() {  # of the project as it is now, as its own results would name it; nothing without .git
  python3 -c 'from zpp_lab.runs.provenance import commit; print(commit() or "")'
}

begin() {  # lines
  local of
  if living; then echo "lines of a former start go on in $place: wait for them, or stop" >&2; exit 2; fi
  of=$(commit) || { echo "background.sh: nothing begins without knowing its commit" >&2; exit 2; }
  copied
  rm -f "$place/ended" "$place/log.txt"
  printf '%s\n' "$@" | sed "s|\bOUT\b|$place/out|g" > "$place/lines.sh"
  (
    unset CALL CALL_END
    [ -z "${MACHINE:-}" ] || export CALL="$MACHINE" CALL_END=$(($(date +%s) + MACHINE))
    if [ -n "$of" ]; then export ZPP_COMMIT="$of"; else echo "no .git here: results have no commit"; fi
    export PYTHONPATH="$place/tree" ZPP_LINES="$place/lines.sh" ZPP_ENDED="$place/ended"
    cd "$place/tree" && exec setsid bash -c '
      worst=0
      while read -r line; do bash -c "$line" < /dev/null || worst=$?; done < "$ZPP_LINES"
      echo "$worst" > "$ZPP_ENDED"'
  ) > "$place/log.txt" 2>&1 < /dev/null &
  echo "$!" > "$place/session"
}

follow() {  # until the lines or the call have ended
  local end=$(($(date +%s) + $(within "${CALL:-31536000}"))) seen=0 size over
  while :; do
    over=$(if [ -f "$place/ended" ] || ! living || [ "$(date +%s)" -ge "$end" ]; then echo yes; fi)
    size=$(stat -c %s "$place/log.txt" 2> /dev/null || echo 0)
    [ "$size" = "$seen" ] || tail -c "+$((seen + 1))" "$place/log.txt" | head -c $((size - seen))
    seen=$size
    if [ -n "$over" ]; then return; fi
    sleep "${POLL:-2}"
  done
}

keep() {
  local folder
  cp "$place/log.txt" "$out/log.txt" 2> /dev/null
  cp "$place"/out/*.log "$out" 2> /dev/null
  for folder in "$place"/tree/runs/*/; do
    if [ -d "$folder" ]; then
      packed "$out/$(basename "$folder").tar.gz" "$place/tree/runs" "$(basename "$folder")" checkpoints wandb
    fi
  done
}

case $what in
  start) begin "$@" && follow ;;
  wait) follow ;;
  stop)
    living && pkill -TERM --session "$(cat "$place/session")"
    for _ in $(seq 20); do if living; then sleep 1; fi; done ;;
  *) echo "background.sh: $what: start, wait or stop" >&2; exit 2 ;;
esac
keep
if [ -f "$place/ended" ]; then
  echo "== the lines have ended ($(cat "$place/ended"))"
  exit "$(cat "$place/ended")"
fi
if living; then echo "== the lines go on: call this with wait" && exit 75; fi
echo "== the lines are gone without an end" >&2
exit 1
