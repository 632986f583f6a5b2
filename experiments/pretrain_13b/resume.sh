# Sourced by run.sh: one run of STEPS steps that saves a checkpoint half-way and goes on to its end,
# then new processes that start from that checkpoint and must repeat the second half to the bit. The
# checkpoint lies on this machine's disk: 12 bytes a parameter, with moments of 8 bits 6 (on two GPUs
# MODEL=13b: 78 GB; on four MODEL=6_7b: 81 GB, 13b: 156 GB). OVERRIDES: Hydra overrides for both.
case $STUDY:$GPUS in *_mini:*) MODEL=mini ;; *:2) MODEL="${MODEL:-13b}" ;; *) MODEL="${MODEL:-6_7b}" ;; esac
STEPS="${STEPS:-30}"
settings() {  # folder
  python3 - "$STUDY" "$1" "$STEPS" "$MODEL" ${OVERRIDES:-} << 'END'
import sys
from zpp_lab.compose import load_study
study, folder, steps, model, *more = sys.argv[1:]
found = load_study(study).overrides
if model != "mini":
    found = [f"model={model}" if o.startswith("model=") else o for o in found]
last = [f"train.steps={steps}", f"train.eval_every={steps}", "recipe=zeropp", f"run.dir={folder}"]
print(*found, *last, *more, sep="\n")
END
}
resumed() {  # what, settings: one start of its processes
  local what=$1
  shift
  timeout -k 20 "$(within "${RESUME_LIMIT:-400}")" $zpp train "$@" 2>&1 | tee "$out/launch.log" |
    tail -n 2
  grep -hs "start-up" "$out/launch.log"
  say "resume: $what"
}
# The whole run's checkpoints lie in the other's folder, behind a link, which its end leaves alone.
rm -rf runs/resume
mkdir -p runs/resume/whole runs/resume/again/checkpoints
ln -s ../again/checkpoints runs/resume/whole/checkpoints
mapfile -t whole < <(settings runs/resume/whole)
mapfile -t again < <(settings runs/resume/again)
resumed "the whole run" "${whole[@]}" train.checkpoint_every=$((STEPS / 2))
du -sh runs/resume/again/checkpoints/* | tail -n 1
cp runs/resume/whole/{config.yaml,metrics.jsonl,data.json} runs/resume/again
begun=$(ls runs/resume/again/checkpoints)
resumed "its second half again" "${again[@]}"
echo "started from ${begun:-the beginning, as there is no checkpoint}" | tee "$out/resume.log"
python3 experiments/same_run.py runs/resume/whole runs/resume/again | tee -a "$out/resume.log"
pack resume
