"""A GPU machine often has torch and little else: without wandb, statistics and charts a study
runs to its end, and only the report asks for what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HIDE = """
import importlib.machinery as machinery
NAMES = {names!r}
own = machinery.PathFinder.find_spec

@classmethod
def find_spec(cls, name, *args, **kwargs):
    return None if name.split(".")[0] in NAMES else own(name, *args, **kwargs)

machinery.PathFinder.find_spec = find_spec
"""
EXTRAS = ("wandb", "wandb_workspaces", "matplotlib", "altair", "great_tables", "pandas")
EXTRAS += ("scipy", "statsmodels", "vl_convert")
SMALL = [
    "model.dim=32", "model.ffn=64", "model.layers=1", "data.seq_len=32", "data.max_bytes=200000",
    "train.steps=2", "train.eval_tokens=1024", "engine.device=cpu", "engine.threads=1",
]  # fmt: skip


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python, and of its children, that find none of the EXTRAS."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE.format(names=EXTRAS))
    checkout = str(Path(__file__).parents[2])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return kept | {"PYTHONPATH": f"{hidden}{os.pathsep}{checkout}", "OMP_NUM_THREADS": "1"}


def command(bare: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zpp_lab.cli", *words],
        cwd=cwd, env=bare, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_study_runs_to_its_end_and_the_report_says_what_it_needs(
    tmp_path: Path, bare: dict[str, str]
) -> None:
    arms = [{"name": name, "overrides": [f"recipe={name}"]} for name in ("zero3", "w4")]
    study = {"name": "bare", "question": "?", "seeds": [1], "arms": arms, "overrides": SMALL}
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(study))
    done = command(bare, tmp_path, "study", "bare.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs finished" in done.stdout
    assert "pip install 'zpp_lab[report]'" in done.stderr
    assert len(list(tmp_path.glob("runs/bare/*/seed1/summary.json"))) == 2
    asked = command(bare, tmp_path, "report", "runs/bare")
    assert asked.returncode == 2
    assert "zpp_lab[report]" in asked.stderr
    assert "Traceback" not in asked.stderr
    refused = command(bare, tmp_path, "sync", "runs/bare")
    assert refused.returncode == 2
    assert "pip install wandb" in refused.stderr
