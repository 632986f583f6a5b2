# Sourced by run.sh: one run of STEPS steps in one go, and one that stops half-way with a checkpoint
# and goes on in new processes. Their lines must be equal but for times. The checkpoint lies on this
# machine's disk: 12 bytes a parameter (MODEL=13b: 156 GB, 6_7b: 81 GB, 1_3b: 16 GB), and there must
# be room for one: the study keeps none once a run has finished. OVERRIDES: Hydra overrides for all
# three launches.
case $STUDY in *_mini) MODEL=mini ;; *) MODEL="${MODEL:-13b}" ;; esac
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
mapfile -t whole < <(settings "runs/resume/whole")
mapfile -t cut < <(settings "runs/resume/cut")
timeout -k 20 "$(within "${RESUME_LIMIT:-400}")" $zpp train "${whole[@]}" 2>&1 | tail -n 2
say "resume: whole"
timeout -k 20 "$(within "${RESUME_LIMIT:-400}")" $zpp train "${cut[@]}" run.piece_steps=$((STEPS / 2)) 2>&1 | tail -n 2
say "resume: first piece"
du -sh runs/resume/cut/checkpoints/* | tail -n 1
wc -l runs/resume/cut/metrics.jsonl
timeout -k 20 "$(within "${RESUME_LIMIT:-400}")" $zpp train "${cut[@]}" 2>&1 | tail -n 2
say "resume: second piece"
python3 experiments/same_run.py runs/resume/whole runs/resume/cut | tee "$out/resume.log"
pack resume
