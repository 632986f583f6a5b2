"""The scripts that time steps: a step repeats, and one without its update changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.experiments.scripts import loaded
from zpp_lab.engines.optim.build import guarded_step

ROOT = Path(__file__).parents[2]
SMALL = ["engine.device=cpu", "data.seq_len=32", "engine.threads=1", "engine.compile=false"]


def torchrun(script: str, *words: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "experiments")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "experiments" / script), *words]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_step_repeats(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--name", "zeropp/cpu", "--times", "3", "model=tiny"]
    words += ["recipe=zeropp", "cluster=1x2", *SMALL]
    assert "zeropp/cpu: 0 of 3 steps differ" in torchrun("repeat/repeat.py", *words)
    found = json.loads((tmp_path / "repeat.json").read_text())["results"]["zeropp/cpu"]
    assert found["differing"] == []
    assert found["norm"] > 0


def test_no_update_leaves_weights_and_makes_no_moments() -> None:
    run = loaded("experiments/baseline/run.py")
    engine = SimpleNamespace(optimizer=one_step_from())
    weight = engine.optimizer.param_groups[0]["params"][0]
    before = weight.detach().clone()
    run.changes("keep", no_update=True)(engine)
    guarded_step(engine.optimizer, torch.tensor(True))
    assert torch.equal(weight, before)
    assert not engine.optimizer.state
    del engine.optimizer.step
    guarded_step(engine.optimizer, torch.tensor(True))
    assert not torch.equal(weight, before)


def one_step_from() -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.AdamW([weight], lr=0.1, foreach=True)
