"""A study that is killed again and again ends with the results of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.small_runs import corpus
from zpp_lab.runs.reader import last_step
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.table import results_csv

KILLS, STEPS, RUNS = 6, 80, 4
CHILD = """
import sys
from pathlib import Path
from zpp_lab.config.compose import load_study
from zpp_lab.study import Launch, run_study
sys.exit(run_study(load_study(sys.argv[1]), Path(sys.argv[2]), Launch(jobs=2)).exit_code)
"""


def write_study(folder: Path) -> Path:
    settings = {
        "data": "text",
        "data.path": corpus(folder),
        "data.cache_dir": folder / "cache",
        "data.seq_len": 16,
        "data.heldout_every": 2,
        "model.dim": 16,
        "model.layers": 1,
        "model.heads": 2,
        "model.kv_heads": 2,
        "model.ffn": 24,
        "train.steps": STEPS,
        "train.batch_size": 2,
        "train.eval_every": 20,
        "train.eval_tokens": 256,
        "train.checkpoint_every": 7,
        "tracking.wandb": "off",
        "engine.device": "cpu",
    }
    study = {
        "name": "killed",
        "question": "Does it go on?",
        "seeds": [1, 2],
        "overrides": [f"{key}={value}" for key, value in settings.items()],
        "arms": [
            {"name": "zero3", "role": "baseline", "overrides": ["recipe=zero3"]},
            {"name": "qsdp", "overrides": ["recipe=qsdp"]},  # its noise must go on as well
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


def start(study: Path, root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(study), str(root)]
    top = Path(__file__).parents[3]
    return subprocess.Popen(
        command, cwd=top, stdout=subprocess.DEVNULL, start_new_session=True, env={**os.environ}
    )


def done(root: Path) -> int:
    """Steps of all runs so far."""
    return sum(last_step(path.parent) for path in root.glob("*/*/metrics.jsonl"))


def kill_at(process: subprocess.Popen[bytes], root: Path, steps: int, more: float) -> bool:
    """SIGKILL the whole group `more` seconds after the study has done `steps` steps."""
    deadline = time.monotonic() + 240
    while done(root) < steps and process.poll() is None:
        assert time.monotonic() < deadline, f"no {steps} steps in four minutes"
        time.sleep(0.002)
    time.sleep(more)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def table(root: Path) -> str:
    return results_csv(read_result(root))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_random_moments_change_no_byte_of_the_results(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    assert start(study, tmp_path / "calm").wait(1200) == 0
    moments, stormy, kills = random.Random(5), tmp_path / "stormy", 0
    for _ in range(KILLS):
        steps = done(stormy) + moments.randrange(40)  # of 320
        kills += kill_at(start(study, stormy), stormy, steps, moments.uniform(0, 0.1))
    assert kills == KILLS
    assert start(study, stormy).wait(1200) == 0
    assert table(stormy) == table(tmp_path / "calm")
    assert table(stormy).count("finished") == RUNS
    assert not list(stormy.rglob("failure.json"))
