"""The commands as a user types them: exit codes, messages, sweeps, outside codecs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runs.wandb_file import OfflineRun
from tests.small_runs import SHAPE, corpus
from zpp_lab.cli.main import main
from zpp_lab.codecs import CodecBase, SegmentNoise, registry
from zpp_lab.runs.wandb.folder import run_folders
from zpp_lab.runs.wandb.sink import follow
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.run.progress import Countdown

TINY = [*SHAPE, "train.steps=2", "train.eval_tokens=64"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A working folder of its own, and the overrides of a run of milliseconds."""
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.path={corpus(tmp_path)}"]


def test_train_and_report(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *here]) == 0
    assert "over 64 held-out tokens, fewer than 1,000, get no verdict" in capsys.readouterr().err
    assert main(["train", *here, "recipe=w4"]) == 0
    capsys.readouterr()  # the width of its progress depends on the machine's pace
    assert main(["report", "runs"]) == 0
    shown = capsys.readouterr().out
    assert "set train.eval_tokens=32768 or more" in shown
    assert max(map(len, shown.partition("\n\n")[0].splitlines())) <= 100  # the table
    assert Path("runs/report.html").stat().st_size > 100_000


def test_a_sweep_names_folders_by_what_was_swept(here: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setenv("ZPP_SWEEP_DIR", "sweep")
    assert main(["train", "-m", *here, "recipe.weights.bits=null,4", "seed=1,2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run ")]
    assert [line.split(",")[0] for line in said] == [f"run {i} of 4" for i in (1, 2, 3, 4)]
    found = sorted(str(p.parent.relative_to("sweep")) for p in Path("sweep").rglob("summary.json"))
    assert found == [f"recipe.weights.bits={b}/seed{s}" for b in ("4", "null") for s in (1, 2)]


def test_a_sweep_tells_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean of the runs that were trained now, failed ones too."""
    clock, out = [0.0], io.StringIO()
    monkeypatch.setattr("zpp_lab.study.run.progress.time.monotonic", lambda: clock[0])
    countdown = Countdown(12, out)
    for seconds, ended in ((0, True), (100, False), (140, False), (24, False)):
        with suppress(ValueError), countdown.run(ended):
            clock[0] += seconds
            if seconds == 140:
                raise ValueError("diverged")
    assert out.getvalue().splitlines() == [
        *("run 1 of 12", "run 2 of 12"),
        "run 3 of 12, about 17 minutes left",  # ten of 100 s
        "run 4 of 12, about 18 minutes left",  # nine of 120 s
    ]


def test_a_sweep_goes_on(here: list[str], monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One job that diverges keeps none from running, and the folder's name is told for the rest."""
    swept = ["train", "-m", *here, "train.clip=0", "train.lr=1e30,0.1"]
    monkeypatch.setenv("ZPP_SWEEP_DIR", "my sweep")
    assert main(swept) == 1
    told = capsys.readouterr().err
    assert "zpp-lab train: the run diverged: step 1" in told
    assert "Traceback" not in told
    assert "hydra.sweep.dir=" in told
    assert "my sweep" in told
    assert [p.parent.parent.name for p in Path().rglob("summary.json")] == ["train.lr=0.1"]
    monkeypatch.delenv("ZPP_SWEEP_DIR")
    (path,) = Path().rglob("summary.json")
    written = path.stat().st_mtime_ns
    assert main([*swept, "hydra.sweep.dir='my sweep'"]) == 1
    assert path.stat().st_mtime_ns == written
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["mps", "--", "true"], "sharing GPUs needs nvidia-cuda-mps-control"),
        (["build"], "--arch 90a"),
    ],
)
def test_without_a_gpu_the_answer_names_it(words, answer, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["zpp-lab", *words])  # as the console script finds them
    assert main() == 2
    assert answer in capsys.readouterr().err


@dataclass(frozen=True)
class HalfCodec(CodecBase):
    """An outside codec: fp16 with a factor."""

    factor: float = 1.0

    def nbytes(self, numel: int) -> int:
        return -(-numel * 2 // 16) * 16

    def encode(
        self, x: Tensor, noise: SegmentNoise | None, out: Tensor, *, rotated: bool = False
    ) -> None:
        data = (x.float() * self.factor).half().view(torch.uint8)
        out.zero_()
        out[:, : data.shape[1]] = data

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload[:, : numel * 2].contiguous().view(torch.float16).float() / self.factor


def test_a_codec_from_outside_trains(here: list[str], monkeypatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register_codec("half", HalfCodec)
    recipe = ["recipe.weights.codec=half", "recipe.weights.options={factor: 8.0}"]
    recipe += ["recipe.grads.codec=half", "recipe.name=half"]
    assert main(["train", *here, *recipe]) == 0
    assert Path("runs/half/seed1/summary.json").exists()


@pytest.mark.parametrize(
    ("swept", "arms"),
    [
        (["recipe.weights.bits=null,4"], {"zero3", "zero3 weights.bits=4"}),
        pytest.param(
            ["recipe=zero3,w4", "train.lr=1e-3,2e-3"],
            {f"{recipe} train.lr={lr}" for recipe in ("zero3", "w4") for lr in (0.001, 0.002)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wandb_calls_a_sweeps_runs_by_the_arms_of_its_report(
    here: list[str], swept: list[str], arms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZPP_SWEEP_DIR", "sweep")
    assert main(["train", "-m", *here, *swept, "seed=1,2"]) == 0
    told = set()
    for run in run_folders("sweep"):
        assert follow(run, "offline", lambda: True)
        shown = OfflineRun(run.path)
        told.add((shown.run.job_type, shown.run.display_name, shown.run.run_group))
        (recipe,) = [tag for tag in shown.run.tags if tag.startswith("recipe=")]
        assert recipe == f"recipe={shown.run.job_type.partition(' train.lr')[0]}"
        summary = json.loads((run.path / "summary.json").read_text())
        assert summary["arm"] == shown.run.job_type
        assert shown.summary["_runtime"] == summary["seconds"]
    assert told == {(arm, f"{arm} seed{seed}", "sweep") for arm in arms for seed in (1, 2)}
    assert {arm.name for arm in read_result(Path("sweep")).study.arms} - {"zero3"} == arms - {
        "zero3"
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train"],
            "\ninterrupted; the same command resumes after the last checkpoint, if any\n",
        ),
        (["train", "--dry-run"], "\ninterrupted\n"),
        (["doctor"], "\ninterrupted\n"),
    ],
)
def test_only_what_goes_on_says_so_when_it_is_interrupted(words, said, monkeypatch, capsys) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zpp_lab.config.compose.compose", stop)
    monkeypatch.setattr("zpp_lab.tools.doctor.doctor", stop)
    assert main(words) == 130
    assert capsys.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_need_not_be_utf_8(here: list[str], encoding: str) -> None:
    """A sign that the terminal or a file lacks is replaced; it ends no command after its work."""
    plan, train = ["plan", *here, "cluster=2x2"], ["train", *here, "run.dir=runs/é→1"]
    both = f"main({plan!r}) or main({train!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from zpp_lab.cli.main import main; sys.exit({both})"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() or encoding == "latin-1"
    assert b"weights_forward" in done.stdout
    assert b"runs/" in done.stdout
    assert b"->1" in done.stdout
