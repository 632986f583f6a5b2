"""What look.py says of the sequences of a step, on a small run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zpp_lab.cli.main import main
from zpp_lab.runs.reader import read_metrics

ROOT = Path(__file__).parents[2]


def test_losses_of_its_sequences_make_the_next_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["model=tiny", "cluster=1x2", "data=stdlib", "data.tokenizer=bytes", "data.seq_len=32"]
    words += ["data.max_bytes=200000", f"data.cache_dir={tmp_path}", "train.batch_size=2"]
    words += ["train.steps=3", "train.checkpoint_every=2", "train.keep_checkpoints=5"]
    assert main(["train", "recipe=w4", *words, "tracking.wandb=off", f"run.dir={run}"]) == 0
    shutil.rmtree(next(run.glob("checkpoints/step-*3")))
    done = subprocess.run(
        [sys.executable, ROOT / "experiments" / "edges" / "look.py", run, "--out", tmp_path / "l"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "l").read_text())
    assert (found["run"], found["step"]) == ("run", 3)
    assert len(found["sequences"]) == 2 * 2 * 4  # weights, dtypes, sequences
    own = [s for s in found["sequences"] if (s["weights"], s["dtype"]) == ("wire", "float32")]
    step = read_metrics(run)[2]
    assert sum(s["loss"] for s in own) / 4 == pytest.approx(step["loss"], rel=1e-5)
    assert all(s["norm"] > 0 and len(s["gradients"]) == len(s["rms"]) == 2 for s in own)
