"""The scripts that time steps and compare the plan, on two ranks over gloo."""

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
def test_the_baseline_step_by_step(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--model", "tiny", "--steps", "1"]
    words += ["--settings", "eager,chunked_loss", *SMALL, "cluster.gpus_per_node=2"]
    said = torchrun("baseline/run.py", *words)
    found = json.loads((tmp_path / "tiny.json").read_text())["results"]
    assert list(found) == ["eager", "chunked_loss"]
    assert all(one["seconds"] > 0 and len(one["times"]) == 1 for one in found.values())
    assert all(0 <= one["waiting"][0] < one["seconds"] for one in found.values())
    assert "tiny eager:" in said


@pytest.mark.slow
def test_the_plan_beside_a_run(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--name", "tiny/w8", "--steps", "1", "model=tiny"]
    words += ["recipe=w8", "cluster=1x2", *SMALL]
    assert "tiny/w8: planned" in torchrun("plan/compare.py", *words)
    found = json.loads((tmp_path / "plan.json").read_text())["results"]["tiny/w8"]
    assert found["peak_gib"] is None
    assert found["planned_gib"] > 0
    assert sum(found["items"].values()) == pytest.approx(found["planned_device_gib"])


@pytest.mark.slow
def test_where_the_first_step_goes(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "model=tiny", "recipe=w8", "cluster=1x2", *SMALL]
    assert "first: first step, backward:" in torchrun("baseline/first.py", *words)
    found = json.loads((tmp_path / "first.json").read_text())["results"]["first"]
    parts = sum(found[f"first step, {p}"] for p in ("forward", "backward", "norm", "update"))
    assert 0 < parts <= found["first step"]
    assert found["graphs"] == 0
    assert found["with telemetry"] > 0


@pytest.mark.slow
def test_a_step_repeats(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--name", "zeropp/cpu", "--times", "3", "model=tiny"]
    words += ["recipe=zeropp", "cluster=1x2", *SMALL]
    assert "zeropp/cpu: 0 of 3 steps differ" in torchrun("repeat/repeat.py", *words)
    found = json.loads((tmp_path / "repeat.json").read_text())["results"]["zeropp/cpu"]
    assert found["differing"] == []
    assert found["norm"] > 0


@pytest.mark.slow
def test_a_step_without_its_update(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--model", "tiny", "--steps", "1", "--settings", "keep"]
    words += [*SMALL, "cluster=1x2", "engine.compile=false"]
    for layers in (2, 1):
        words_of = [*words, f"model.layers={layers}", "--label"]
        torchrun("baseline/run.py", *words_of, f"{layers} layers, no update", "--no-update")
    torchrun("baseline/run.py", *words_of, "1 layers", "--apart")
    found = json.loads((tmp_path / "tiny.json").read_text())["results"]
    halves = loaded("experiments/baseline/halves.py")
    made = halves.parts(found)
    assert made.passes == found["keep 2 layers, no update"]["seconds"]
    assert made.step == pytest.approx(made.passes + made.half - made.half_passes)
    with pytest.raises(ValueError, match=r"'chunked_loss', 'keep'.*; give each its own folder"):
        halves.parts({**found, "chunked_loss 2 layers, no update": {"seconds": 1.0}})
    del found["keep 1 layers"]
    with pytest.raises(ValueError, match=r"\[\(1, False\)\]; run halves.sh again"):
        halves.parts(found)


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
