# Sourced by resume.sh and moved.sh: a run of STEPS steps of zeropp, and its second half again.
STEPS="${STEPS:-30}"
settings() {  # study, model or mini for the study's own, folder, overrides
  python3 - "$STEPS" "$@" << 'END'
import sys
from zpp_lab.config.compose import load_study
steps, study, model, folder, *more = sys.argv[1:]
found = load_study(study).overrides
if model != "mini":
    found = [f"model={model}" if o.startswith("model=") else o for o in found]
last = [f"train.steps={steps}", f"train.eval_every={steps}", "recipe=zeropp", f"run.dir={folder}"]
print(*found, *last, *more, sep="\n")
END
}
launched() {  # what, settings: one start of its processes
  local what=$1
  shift
  timeout -k 20 "$(within "${RESUME_LIMIT:-400}")" $zpp train "$@" 2>&1 | tee "$out/launch.log" |
    tail -n 2
  grep -hs "start-up" "$out/launch.log"
  say "$what"
}
begin_whole() {  # folder: a run, whose checkpoints lie in the other's folder, behind a link, which
  rm -rf "$1"    # the run's end leaves alone
  mkdir -p "$1/whole" "$1/again/checkpoints"
  ln -s ../again/checkpoints "$1/whole/checkpoints"
}
hand_over() {  # folder: what the second half needs beside the checkpoint
  cp "$1"/whole/{config.yaml,metrics.jsonl,data.json} "$1/again"
}
begun_from() {  # folder, log: from which checkpoint the second half starts
  local begun
  begun=$(ls "$1/again/checkpoints")
  echo "started from ${begun:-the beginning, as there is no checkpoint: this shows nothing}" | tee "$2"
  [ -n "$begun" ] || worst=1
}
compared() {  # folder, log: whether both are the same run; `worst` is what run.sh ends with
  python3 experiments/same_run.py "$1/whole" "$1/again" | tee -a "$2"
  [ "${PIPESTATUS[0]}" = 0 ] || worst=1
}
