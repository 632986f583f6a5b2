#!/bin/bash
# The first minutes with zpp_lab, to read or to run: in a fresh clone, bash examples/first_minutes.sh
# It takes nine minutes on two free cores, six of them `make study`. Needs make and
# Python 3.11 to 3.13, no GPU. Everything stays in the clone; it may be run again.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s\n' "$*"; }

step "1. install, and train the first study: 61 small runs"
make study ${PYTHON:+PYTHON="$PYTHON"}
. .venv/bin/activate

step "2. read its verdicts: runs/first/report.html, the same as text in report.md"
sed -n '/^## Answer/,/^###/p' runs/first/report.md | grep -v '^#'
sed -n '/^## Arms/,/^## /p' runs/first/report.md | sed '/^\*Every two/,$d' | grep '^|' | cut -d '|' -f 2-4

step "3. an arm of your own: the study's name again, so what has finished is not repeated"
cat > mine.yaml << 'END'
extends: first
name: first
arms:
  - name: w4_64
    describe: 4-bit weights in blocks of 64
    overrides: [recipe=w4, recipe.name=w4_64, recipe.weights.block_size=64]
END
zpp-lab study mine.yaml

step "4. a quantizer of your own: a copy of examples/quantizer"
mkdir -p my_quantizer && cp -r examples/quantizer/. my_quantizer
pip install -q pytest -e ./my_quantizer
python -m pytest my_quantizer
zpp-lab study my_quantizer/quantile.yaml

step "5. text of your own: a folder (here these pages), in any study"
mkdir -p my_text
for page in *.md experiments/*/*.md; do cp "$page" "my_text/${page//\//_}"; done
zpp-lab study smoke --arms zero3,w4 --seeds 1,2 --dir runs/my_text data=text data.path=my_text

step "6. records of your own: JSON lines, of which the loss counts the completions"
python -c 'import json
for i in range(2000): print(json.dumps({"prompt": f"{i} plus 1?", "completion": f" {i + 1}\n"}))' > mine.jsonl
zpp-lab train data=jsonl data.path=mine.jsonl data.heldout_every=5 recipe=w4 run.dir=runs/my_records

step "7. all of it in pandas"
python - << 'END'
import zpp_lab
study = zpp_lab.load("runs/first")
print(study.verdicts[["arm", "verdict", "gap", "low", "high"]].to_string())
print(len(study.runs), "runs,", len(study.steps), "steps; the last losses of arms:")
print(study.steps.groupby("arm").heldout_loss.last().to_string())
END
