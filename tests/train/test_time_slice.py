"""A run in pieces: it stops in time with a checkpoint, and ends as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engines.fsdp_world import run_world
from tests.small_runs import newest, small
from tests.train.launch.test_launcher import lines
from tests.train.test_trainer import last_checkpoint, without_times
from tests.waiting import until
from zpp_lab.cli.main import main
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.metrics import read
from zpp_lab.runs.reader import queued_at
from zpp_lab.study.report.appendix import _commit
from zpp_lab.train.launch.launcher import RankFailed, job, launch, queue_again
from zpp_lab.train.time_slice import JOB, PAUSED, SlurmJob, TimeSlice, seconds
from zpp_lab.train.trainer import Trainer, run


@pytest.mark.parametrize(
    ("text", "value"), [("480", 480), ("480s", 480), ("8m", 480), ("1.5h", 5400), (" 2m ", 120)]
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


def signalled(
    config: Config, monkeypatch: pytest.MonkeyPatch, number: int, at: int = 3, times: int = 1
) -> list[int]:
    """A run that hears `number` so often in step `at`, whoever hears it first then raising
    KeyboardInterrupt. Steps of the checkpoints that it leaves."""
    step = Trainer._step

    def hears(self: Trainer, *words: Any) -> Any:
        if self.step == at - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return step(self, *words)

    before = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", hears)
            with pytest.raises(KeyboardInterrupt):
                run(config)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    folder = Path(str(config.run.dir))
    assert json.loads((folder / "failure.json").read_text())["outcome"] == "interrupted"
    return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGINT, 3), (signal.SIGTERM, 3), (signal.SIGTERM, 12)]
)
def test_ctrl_c_and_sigterm_wait_for_the_step_and_its_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    at: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also in the last step of a run that keeps no checkpoint."""
    few = ("recipe=qsdp", "train.checkpoint_every=0", "train.keep_checkpoints=0")
    whole = run(small(tmp_path, f"run.dir={tmp_path / 'whole'}", *few))
    config = small(tmp_path, f"run.dir={tmp_path / 'run'}", *few)
    assert signalled(config, monkeypatch, number, at) == [at]
    assert "the run stops after this step" in capfd.readouterr().err
    ended = run(config)
    assert f"resuming after step {at}" in capfd.readouterr().out
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert ended["heldout_loss_master"] == whole["heldout_loss_master"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_second_signal_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path, f"run.dir={tmp_path / 'run'}", "train.checkpoint_every=0")
    assert signalled(config, monkeypatch, signal.SIGINT, times=2) == []


class Steps:
    """A clock for which every step lasts long enough that pieces are `length` steps."""

    def __init__(self, length: int) -> None:
        self.length, self.looks = length, 0

    def over(self, *_: float) -> bool:
        self.looks += 1
        return self.looks > self.length


def in_pieces(config: Config, monkeypatch: pytest.MonkeyPatch, length: int) -> list[int]:
    """Run to the end, `length` steps at a start; the steps at which it stopped."""
    stops = []
    for _ in range(100):
        monkeypatch.setattr("zpp_lab.train.trainer.TimeSlice", lambda *_: Steps(length))
        ended = run(config)
        if ended["outcome"] == "finished":
            return stops
        stops.append(ended["step"])
        folder = Path(str(config.run.dir))
        assert not (folder / "failure.json").exists()
        assert not (folder / "summary.json").exists()
        assert len(read(folder / "metrics.jsonl")) == ended["step"]
        _move(folder)
    raise AssertionError("no end")


def _move(folder: Path) -> None:
    """As onto another machine: a copy of the folder, the old one gone."""
    shutil.copytree(folder, folder.with_name("elsewhere"))
    shutil.rmtree(folder)
    folder.with_name("elsewhere").rename(folder)


@pytest.mark.parametrize(("recipe", "every"), [("zero3", 5), ("qsdp", 0)])
def test_pieces_end_with_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, every: int
) -> None:
    settings = (f"recipe={recipe}", f"train.checkpoint_every={every}")
    run(small(tmp_path, *settings, f"run.dir={tmp_path / 'whole'}"))
    cut = small(tmp_path, *settings, f"run.dir={tmp_path / 'cut'}")
    assert in_pieces(cut, monkeypatch, 5) == [5, 10]
    assert last_checkpoint(tmp_path / "cut") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")


def test_a_piece_ends_with_a_whole_state_where_weights_alone_are_kept(tmp_path: Path) -> None:
    settings = ("train.checkpoint_weights_only=true", "run.piece_steps=3")  # a checkpoint is due
    alone = small(tmp_path, settings[0], f"run.dir={tmp_path / 'whole'}")
    assert run(alone)["checkpoint_seconds"] > 0
    cut = [run(small(tmp_path, *settings))["outcome"] for _ in range(4)]
    assert cut == ["unfinished"] * 3 + ["finished"]
    assert last_checkpoint(tmp_path / "run") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")


def test_pieces_of_several_commits_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piece(commit: str | None) -> dict[str, Any]:
        monkeypatch.setattr("zpp_lab.train.trainer.commit", lambda: commit)
        return run(small(tmp_path, "run.piece_steps=5"))

    assert [piece("a")["step"], piece("b")["step"]] == [5, 10]
    shutil.rmtree(newest(tmp_path / "run"))  # so step 10 is repeated
    summary = piece(None)
    assert summary["commit"] is None
    assert summary["commits"] == [
        {"after": 0, "commit": "a"},
        {"after": 5, "commit": "b"},
        {"after": 9, "commit": None},
    ]
    assert _commit(summary) == "a, after step 5 b, after step 9 not recorded"
    assert "commits" not in run(small(tmp_path, f"run.dir={tmp_path / 'one'}"))


def test_other_tokens_are_no_place_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zpp_lab.train.trainer.TimeSlice", lambda *_: Steps(5))
    run(small(tmp_path))
    text = tmp_path / "texts" / "part0.py"
    text.write_text(text.read_text() + "x = 1\n")
    with pytest.raises(ValueError):
        run(compose_again(tmp_path))


def compose_again(folder: Path) -> Config:
    """`small` without writing the corpus anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.small_runs.corpus", lambda folder: folder / "texts")
        return small(folder)


class Late(TimeSlice):
    """Lets two steps pass even where their time is over before: the machine may be slow."""

    def over(self, next_step: float = 0.0) -> bool:
        return super().over(next_step) and self.asked > 2


def test_train_says_that_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zpp_lab.train.trainer.TimeSlice", Late)
    config = small(tmp_path)  # makes the corpus
    words = [f"data.path={config.data.path}", f"data.cache_dir={tmp_path / 'cache'}", "data=text"]
    words += ["data.seq_len=16", "data.heldout_every=2", "model=tiny", "tracking.wandb=off"]
    words += ["engine.device=cpu", f"run.dir={tmp_path / 'cli'}", "train.steps=100000"]
    assert main(["train", "--for", "2s", *words]) == PAUSED
    assert "the same command resumes" in capsys.readouterr().out
    steps = len(read(tmp_path / "cli" / "metrics.jsonl"))
    assert 0 < steps < 100000
    assert Saved(newest(tmp_path / "cli")).step == steps


def decided() -> list[list[bool]]:
    """What each rank hears where its clock and rank 0's say different things."""
    rank, now = dist.get_rank(), time.time()
    over, left = now - 1, now + 1e6
    own = [TimeSlice((over, left)[rank]).over(), TimeSlice((left, over)[rank]).over()]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, own)
    return every


def test_the_clock_of_rank_0_decides_for_all() -> None:
    assert run_world(2, decided) == [[True, False]] * 2


@pytest.mark.slow
def test_real_ranks_stop_together_and_go_on(tmp_path: Path) -> None:
    settings = ("engine=fsdp", "engine.device=cpu", "recipe=zeropp")
    settings += ("train.checkpoint_every=0", "cluster.nodes=1", "cluster.gpus_per_node=2")
    launch(small(tmp_path, *settings, f"run.dir={tmp_path / 'whole'}"))
    left = f"run.until={time.time() + 1e6}"
    for more, step in (("run.until=1.0", 0), ("run.piece_steps=5", 5)):
        ended = launch(small(tmp_path, *settings, left, more, f"run.dir={tmp_path / 'cut'}"))
        assert ended["outcome"] == "unfinished"
        assert lines(tmp_path / "cut") == step
    assert launch(small(tmp_path, *settings, left, f"run.dir={tmp_path / 'cut'}"))["steps"] == 12
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("whole", "cut")]
    assert summaries[0]["heldout_loss"] == summaries[1]["heldout_loss"]


def test_a_step_before_an_evaluation_is_expected_to_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before one was seen; after the last step comes a second one, of the masters."""
    asked: list[float] = []

    class Asked(TimeSlice):
        def over(self, next_step: float = 0.0) -> bool:
            asked.append(next_step)
            return False

    monkeypatch.setattr("zpp_lab.train.trainer.TimeSlice", Asked)
    run(small(tmp_path, "train.eval_every=4"))
    assert len(asked) == 12
    assert asked[2] < asked[3]
    assert asked[6] < asked[7] < asked[11]


def test_a_piece_that_is_too_short_says_so_and_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(small(tmp_path, "run.until=1.0"))
    assert (ended["outcome"], ended["step"]) == ("unfinished", 0)
    assert "--for" in capsys.readouterr().out
    assert run(small(tmp_path))["steps"] == 12  # the time is no setting of the run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job of Slurm's, whose commands answer with the scripts in this folder."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, line in (("scontrol", f'echo "$@" >> {commands}/told'), ("squeue", "echo NONE")):
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield commands
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    vars(JOB).update(vars(SlurmJob()))


def warned(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    told: str = "",
    other: Any = signal.SIG_DFL,
    start: Any = launch,
) -> str:
    """A start that Slurm warns before its step `step`, up to its end, and not before the file
    `told` is there; why its job was not queued again. other: who listened before."""

    class Warned(TimeSlice):
        def over(self, next_step: float = 0.0) -> bool:
            if self.asked + 1 == step:
                os.kill(os.getpid(), signal.SIGUSR2)
                until(lambda: not told or Path(told).exists())
            return super().over(next_step)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, other)
    vars(JOB).update(vars(SlurmJob()))
    monkeypatch.setattr("zpp_lab.train.trainer.TimeSlice", Warned)
    return queue_again(start(config))


def test_a_run_that_slurm_warns_stops_and_its_job_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: Path
) -> None:
    run(small(tmp_path, "train.checkpoint_every=0", f"run.dir={tmp_path / 'whole'}"))
    cut = small(tmp_path, "train.checkpoint_every=0", f"run.dir={tmp_path / 'cut'}")
    assert warned(cut, monkeypatch, step=6) == ""
    assert (slurm / "told").read_text() == "requeue 7\n"
    assert queued_at(tmp_path / "cut") == 5
    assert "after step 5): give it a longer --time" in warned(cut, monkeypatch, step=1)
    (slurm / "scontrol").write_text("#!/bin/sh\necho it is disabled >&2; exit 1\n")
    assert "(it is disabled): submit it with" in warned(cut, monkeypatch, step=2)
    (slurm / "scontrol").write_text(f"#!/bin/sh\ntouch {slurm}/late\n")
    (slurm / "squeue").write_text("#!/bin/sh\ndate -d '1 sec' +%FT%T\n")  # the step outlasts it
    assert warned(cut, monkeypatch, step=2, told=f"{slurm}/late") == ""
    (slurm / "squeue").write_text("#!/bin/sh\necho NONE\n")  # else a slow step would be late too

    def submitit(*_: object) -> None:
        raise RuntimeError("timed-out too many times.")

    with pytest.raises(RankFailed, match=r"\(timed-out too many times\): raise hydra\.launcher"):
        warned(cut, monkeypatch, step=2, other=submitit, start=job)
    assert "raise hydra.launcher" in (tmp_path / "cut" / "failure.json").read_text()
    assert warned(cut, monkeypatch, step=0) == ""
    assert last_checkpoint(tmp_path / "cut") == last_checkpoint(tmp_path / "whole")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
