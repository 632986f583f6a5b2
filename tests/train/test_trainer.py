"""A run end to end: what it writes, how it resumes, what it does with mistakes."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.engines.fsdp_world import forks
from tests.small_runs import contents, newest, small, tear
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import wires_among
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.tools.export.model import run_config as read_config
from zpp_lab.train.evaluation import DivergedError
from zpp_lab.train.trainer import run


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """The newest one's files."""
    return contents(newest(folder))


def without_times(folder: Path) -> list[dict]:
    return [unmeasured(line) for line in read(folder / "metrics.jsonl")]


def test_what_a_run_writes(tmp_path: Path) -> None:
    config = small(tmp_path, "recipe=zeropp", "recipe.weights.block_size=16")
    summary = run(config)
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "heldout_loss" in line] == [4, 8, 12]
    assert [line["step"] for line in lines if "telemetry" in line] == [1, 4, 8, 12]
    assert lines[-1]["tokens"] == 12 * 4 * 2 * 16
    for wire in wires_among():
        total = {hop: sum(line["bytes"][wire][hop] for line in lines) for hop in ("intra", "inter")}
        assert summary["bytes"][wire] == total
    assert summary["bytes"]["weights_backward"]["inter"] == 0
    assert summary["heldout_loss"] == lines[-1]["heldout_loss"] < lines[3]["heldout_loss"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert run(config) == summary, "a finished run is not repeated"


def test_the_second_readout_is_of_the_last_steps(tmp_path: Path) -> None:
    config = small(tmp_path, "train.readout_steps=5", "run.piece_steps=9")
    run(config)
    summary = run(config)  # goes on: two of the five were made before
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert summary["readout_steps"] == 5
    assert summary["readout_loss"] == pytest.approx(sum(r["loss"] for r in lines[-5:]) / 5)
    with pytest.raises(ValueError, match=r"readout_steps: .*5.*6"):
        run(small(tmp_path, "train.readout_steps=6"))
    with pytest.raises(ValueError, match=r"readout_steps=13.*train\.steps=12"):
        small(tmp_path, "train.readout_steps=13")


PARTS = (
    *("recipe=qsdp", "cluster=1x4", "cluster.tp=2", "model.vocab_size=512"),
    *("recipe.acts.bits=4", "recipe.acts.rounding=stochastic"),
)


STAGES = (
    *("recipe=zero3", "recipe.stage=2", "cluster=1x4", "cluster.pp=2", "train.micro_steps=2"),
    "model.layers=2",
    *("recipe.acts_pipe.bits=4", "recipe.acts_pipe.rounding=stochastic", "recipe.grads.bits=8"),
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("recipe=qsdp",), id="whole"),
        pytest.param(PARTS, id="tensor parts", marks=pytest.mark.slow),
        pytest.param(STAGES, id="stages", marks=pytest.mark.slow),
    ],
)
def test_resume_equals_an_undisturbed_run(settings: tuple[str, ...], tmp_path: Path) -> None:
    whole = small(tmp_path, *settings, f"run.dir={tmp_path / 'whole'}")
    run(whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "cut" / ".failure.json.99999999.tmp").write_text("{")  # a kill while it was written
    tear(newest(tmp_path / "cut"))  # the one before it is used
    written = tmp_path / "cut" / "config.yaml"  # by a version without this setting
    older = [line for line in written.read_text().splitlines() if "bpe_every" not in line]
    written.write_text("\n".join(older))
    run(small(tmp_path, *settings, f"run.dir={tmp_path / 'cut'}"))
    assert last_checkpoint(tmp_path / "cut") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("cut", "whole")]
    assert names[0] == names[1]


@pytest.mark.parametrize(("last", "enough"), [(30, 2), pytest.param(60, 4, marks=pytest.mark.slow)])
def test_kills_change_no_bit(tmp_path: Path, last: int, enough: int) -> None:
    steps, rng = f"train.steps={last}", random.Random(0)
    run(small(tmp_path, steps, "recipe=zeropp", f"run.dir={tmp_path / 'whole'}"))
    killed = small(tmp_path, steps, "recipe=zeropp", f"run.dir={tmp_path / 'killed'}")
    context = forks()
    kills = 0
    while kills < enough:
        process = context.Process(target=_run_quietly, args=(killed,))
        process.start()
        _wait_for_progress(tmp_path / "killed", process)
        time.sleep(rng.uniform(0.0, 0.25))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if (tmp_path / "killed" / "summary.json").exists():
            shutil.rmtree(tmp_path / "killed")  # it got through: kill it again from the start
    run(killed)
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")


def _run_quietly(config: Config) -> None:
    run(config)


def _wait_for_progress(folder: Path, process) -> None:
    """Until the run has written something new, so that kills fall all along the run."""
    path = folder / "metrics.jsonl"
    before = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + 30
    while process.is_alive() and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size != before:
            return
        time.sleep(0.005)


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(small(tmp_path, "train.steps=2"))
    with pytest.raises(ValueError, match=r"train\.lr: .*0\.003.*0\.1"):
        run(small(tmp_path, "train.steps=2", "train.lr=0.1"))


ENDED = {"summary.json": True, "config.yaml": True, "data.json": False, "commits.json": False}
QUICK = {"summary.json": "{[", "config.yaml": "\0[", "data.json": "\0", "commits.json": "{"}


@pytest.mark.parametrize(
    ("name", "ended", "text"),
    [
        pytest.param(n, e, t, marks=() if t[0] in QUICK[n] else pytest.mark.slow)
        for n, e in ENDED.items()
        for t in ("{", "[1]", "\0")
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, ended: bool, text: str) -> None:
    """Never a traceback, nor a start from step 0 that drops what there is."""
    config = small(tmp_path, "train.steps=2", "train.keep_checkpoints=1")
    run(config)
    folder = tmp_path / "run"
    if not ended:
        (folder / "summary.json").unlink()
    (folder / name).write_text(text)
    before = (folder / "metrics.jsonl").read_bytes()
    fix = "move its folder away" if name == "config.yaml" else "delete it"
    with pytest.raises(ValueError, match=rf"{name} .*{fix}"):
        run(config)
    (folder / name).unlink()
    if name == "config.yaml":  # nothing tells whose the rest is
        with pytest.raises(ValueError, match=r"config\.yaml"):
            run(config)
    assert (folder / "metrics.jsonl").read_bytes() == before
    if name != "config.yaml":
        assert run(config)["steps"] == 2


def test_a_checkpoint_without_memory_to_read_it_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one that this user may not read: starting over would drop the steps that it has."""
    config = small(tmp_path, "train.steps=3", "train.keep_checkpoints=1")
    run(config)
    folder = tmp_path / "run"
    (folder / "summary.json").unlink()
    for error in (torch.OutOfMemoryError("full"), PermissionError(13, "may not be read")):
        with monkeypatch.context() as patch:
            patch.setattr("zpp_lab.runs.checkpoint.read.Saved.state", raiser(error))
            with pytest.raises(type(error)):
                run(config)
    assert "damaged" not in capsys.readouterr().err
    tear(newest(folder))
    with pytest.raises(ValueError, match=r"run\.resume=false"):
        run(config)
    assert capsys.readouterr().err.count("is damaged") == 1
    assert run(small(tmp_path, "train.steps=3", "run.resume=false"))["steps"] == 3


def raiser(error: Exception):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_diverged_run_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zpp_lab.train.trainer as trainer

    build = trainer.build_engine

    def poisoned(*args):
        engine = build(*args)
        with torch.no_grad():
            engine.cell.master["embed.weight"][0, 0] = torch.inf
        return engine

    monkeypatch.setattr(trainer, "build_engine", poisoned)
    with pytest.raises(NonFiniteError, match=r"weights_forward .*embed\.weight"):
        run(small(tmp_path, "recipe=w4"))
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["outcome"] == "diverged"
    assert "embed.weight" in failure["error"]


def test_a_last_step_that_loses_the_weights_is_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own loss, from the weights before it, is finite."""
    import zpp_lab.train.trainer as trainer

    build = trainer.build_engine

    def losing(*args):
        engine = build(*args)
        step = engine.step

        def stepped(*args):
            result = step(*args)
            with torch.no_grad():
                engine.cell.master["embed.weight"].fill_(torch.nan)
            return result

        monkeypatch.setattr(engine, "step", stepped)
        return engine

    monkeypatch.setattr(trainer, "build_engine", losing)
    with pytest.raises(DivergedError, match=r"step 1: .*nan"):
        run(small(tmp_path, "train.steps=1"))
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["outcome"] == "diverged"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_run_of_a_version_with_more_settings_goes_on_and_is_read(tmp_path: Path) -> None:
    """One whose value did what is done today; with another it is another run."""
    config = small(tmp_path, "train.steps=4", "train.checkpoint_every=2", "run.piece_steps=2")
    assert run(config)["step"] == 2
    path = tmp_path / "run" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["engine"] |= {"pull": "auto", "pull_multiprocessors": 0}
    path.write_text(yaml.safe_dump(stored))
    assert run(config)["steps"] == 4
    assert read_config(tmp_path / "run") == config
    result = read_result(tmp_path / "run")
    assert [(arm.name, len(arm.finished)) for arm in result.arms] == [("zero3", 1)]
    stored["engine"]["pull"] = "kernel"
    path.write_text(yaml.safe_dump(stored))
    with pytest.raises(ValueError, match=r"engine\.pull: .*'kernel'"):
        run(config)
