"""One process at a time in a run's folder, and how others see it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.small_runs import small
from zpp_lab import files
from zpp_lab.cli.main import main
from zpp_lab.files import at_work, held, hold, only_one
from zpp_lab.runs.reader import read_run, state
from zpp_lab.train.launch.launcher import launch
from zpp_lab.train.launch.place import patience


def test_a_second_one_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with at_work(folder):
        assert held(folder)
        said = r"wait for it or stop it, .* run.dir; why"
        with pytest.raises(ValueError, match=said), at_work(folder, more="; why"):
            pass
    assert not held(folder)
    with at_work(folder), only_one(tmp_path):
        pass


def test_of_two_starts_at_one_moment_the_winner_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    winner: list[Any] = []

    def mkdir(path: Path, *args: Any, real: Any = Path.mkdir, **more: Any) -> None:
        real(path, *args, **more)
        if path == folder:
            winner.append(hold(folder))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ValueError), at_work(folder):
        pass
    assert held(folder)


def test_what_is_left_beside_a_mistake_does_not_hide_it(tmp_path: Path) -> None:
    def mistaken(*beside: Path) -> None:
        with at_work(tmp_path / "new" / "run"):
            for path in beside:
                path.mkdir()
            raise ValueError("the mistake")

    other = tmp_path / "new" / "other"
    for beside in ([], [other]):
        with pytest.raises(ValueError, match=r"^the mistake$"):
            mistaken(*beside)
        assert [str(path) for path in tmp_path.glob("*/*")] == list(map(str, beside))
    assert other.exists()


def test_patience_is_for_jobs_that_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patience({}) == patience({"SLURM_RESTART_COUNT": "0"}) == 0
    assert patience({"SLURM_RESTART_COUNT": "1"}) > 90
    assert patience({"TORCHELASTIC_RESTART_COUNT": "2"}) > 90
    first, now = hold(tmp_path), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 30.0
        if now[0] > 80:
            first.close()

    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(files.time, "sleep", sleep)
    with at_work(tmp_path, patience({"SLURM_RESTART_COUNT": "1"})):
        assert now[0] == 90


@contextmanager
def flock_fails(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", fail)
        yield


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_loses_only_them(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with flock_fails(number, monkeypatch), at_work(tmp_path):
        assert not held(tmp_path)
        assert state(read_run(started(tmp_path))) == "stopped"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"no locks on this file system ({os.strerror(number)})" in said
    with flock_fails(errno.EIO, monkeypatch), pytest.raises(OSError, match=r"\.lock"):
        held(tmp_path)
    with flock_fails(errno.EIO, monkeypatch), pytest.raises(OSError, match=r"\.lock"):
        hold(tmp_path)


def started(folder: Path) -> Path:
    (folder / "config.yaml").write_text("seed: 1\n")
    return folder


def test_a_finished_run_is_returned_whoever_holds_it(tmp_path: Path) -> None:
    config = small(tmp_path, "train.steps=2")
    summary = launch(config)
    with hold(tmp_path / "run"):
        assert launch(config) == summary
        with pytest.raises(ValueError):
            launch(small(tmp_path, "train.steps=2", "run.resume=false"))


def test_a_run_that_ends_while_it_is_read_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its summary comes before the end of its lock, so it must be read after that is seen."""
    folder = started(tmp_path)
    process = hold(folder)

    def ends(path: Path) -> bool:
        seen = held(path)
        (path / "summary.json").write_text('{"heldout_loss": 2.0, "steps": 3, "bytes": {}}')
        process.close()
        return seen

    monkeypatch.setattr("zpp_lab.files.held", ends)
    assert state(read_run(folder)) == "finished"


def test_jobs_of_a_sweep_hold_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZPP_SWEEP_DIR", str(tmp_path / "sweep"))
    folder = tmp_path / "sweep" / "w4" / "seed1"
    folder.mkdir(parents=True)
    with hold(folder):
        assert main(["train", "-m", "recipe=w4", "seed=1", "engine.device=cpu"]) == 2
    assert "run.dir" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_one_process_of_several_plays_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun without engine=fsdp: every process would train the same run."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = small(tmp_path)
    (tmp_path / "run").mkdir()
    with hold(tmp_path / "run"), pytest.raises(ValueError, match="engine=virtual"):
        launch(config)
