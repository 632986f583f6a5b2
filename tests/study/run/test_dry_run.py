"""What a dry run says of a study's runs, and that it leaves nothing behind."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.study.fake_trainer import STEPS, fake_compose
from tests.study.run.test_launch import launch, started, study
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.study.run import launch as launching
from zpp_lab.study.run.progress import duration
from zpp_lab.tools.plan import dry_run
from zpp_lab.tools.plan.dry_run import Machine, predicted_seconds
from zpp_lab.train.memory.forecast import Foreseen, Needed


@pytest.mark.parametrize("machine", [None, Machine("h200")])
def test_runs_bytes_memory_and_predicted_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine | None
) -> None:
    foreseen = Foreseen(1000, Needed(2000, at_least=True))  # the fake study makes no plan
    monkeypatch.setattr(dry_run, "foresee", lambda config: foreseen)
    monkeypatch.setattr(dry_run, "predicted_seconds", lambda *_: 60.0)
    launch(study("zero3", seeds=1), tmp_path)
    before, out = started(tmp_path), io.StringIO()
    console = Console(file=out, width=140)
    what = study("zero3", "a")
    two = launching.Launch(jobs=2)
    found = dry_run.dry_run(what, tmp_path, two, machine, compose=fake_compose, console=console)
    text = out.getvalue()
    assert started(tmp_path) == before
    assert [f.bytes for f in found] == [1000 * STEPS] * 4
    assert [f.state for f in found] == ["finished", *["unfinished"] * 3]
    assert "4 runs, 1 ended already" in text
    assert "≥ 2 kB" in text
    assert text.count(f"train.warmup_steps=20 is more than train.steps={STEPS}: ") == 1
    minutes = STEPS if machine else None
    assert [f.seconds for f in found] == [0, *[minutes and 60 * minutes] * 3]
    if machine:
        assert "at least 6:00 left on h200 with 2 in parallel, without start-up" in text
    assert ("left" in text) == (machine is not None)


def test_predictions_are_the_cost_models() -> None:
    from zpp_lab.tools.plan.cost.machine import load_machine
    from zpp_lab.tools.plan.cost.step import predict

    config = compose(["model=1m", "cluster=2x2", "engine=fsdp", "train.param_dtype=bf16"])
    whole = predict(config, load_machine("h200"), 25.0).step_s
    assert predicted_seconds(config, "h200", 25.0) == whole
    alone = compose(["model=1m", "cluster=2x2", "train.param_dtype=bf16"])
    assert 0 < predicted_seconds(alone, "h200", None) < 4 * whole


def test_gpu_hours_without_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Of runs that start a process a GPU; one of each shape is predicted."""
    asked = []

    def seconds(config: Config, machine: str, link: float | None) -> float:
        asked.append((config.recipe.name, machine, link))
        return 36.0

    monkeypatch.setattr(dry_run, "predicted_seconds", seconds)
    words = ["study", "smoke", "--dry-run", "--dir", str(tmp_path / "s"), "--arms", "zero3,qsdp"]
    assert main([*words, "train.steps=100"]) == 0
    assert "GPU-hours" not in capsys.readouterr().out
    assert main([*words, "train.steps=100", "engine=fsdp", "engine.device=auto"]) == 0
    assert asked == [("zero3", "h200", None)]
    assert "about 24 GPU-hours left on h200" in capsys.readouterr().out  # 6 runs of 4 GPU-hours
    assert main([*words, "train.steps=100", "--machine", "h200"]) == 0
    assert ", 6 GPU-hours" in capsys.readouterr().out  # engine=virtual has one GPU


def test_durations_are_readable() -> None:
    assert [duration(s) for s in (None, 245, 3845, 359_999, 6_640_000)] == [
        *("?", "4:05", "1:04:05", "99:59:59", "1,844 h")
    ]


REFUSED = [
    ("--for 8m --launcher basic", "--for"),
    ("--launcher slrum", "Hydra's launcher 'slrum' cannot start"),
    ("--launcher basic --runs-per-gpu 2", "--runs-per-gpu"),
    ("--arms w5* --alone", "--arms w5*"),
    ("data=text data.path=/no/text", "study smoke, zero3, zero3_reordered, zeropp, qsdp"),
]


@pytest.mark.parametrize(("words", "answer"), REFUSED)
def test_a_dry_run_refuses_what_the_study_refuses(
    words: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching.Queue, "run", lambda *_: pytest.fail("started"))
    command = ["study", "smoke", "--dir", str(tmp_path / "s"), *words.split()]
    told = []
    for more in (["--dry-run"], []):
        assert main([*command, *more]) == 2
        said = capsys.readouterr()
        told.append(said.err)
        assert said.out == ""
        assert more == [] or not (tmp_path / "s").exists()
    assert answer in told[0]
    assert told[0] == told[1]


@pytest.mark.parametrize("words", ["--machine h200", "--launcher basic"])
def test_files_of_runs_elsewhere_need_not_be_here(words: str, tmp_path: Path, capsys) -> None:
    """As the study does with a launcher, whose jobs may see other folders."""
    study_here = ["study", "smoke", "--dry-run", "--dir", str(tmp_path / "s"), "data=text"]
    assert main([*study_here, "data.path=/no/text", "--arms", "zero3", *words.split()]) == 0
    assert "3 runs, 0 ended already" in capsys.readouterr().out
