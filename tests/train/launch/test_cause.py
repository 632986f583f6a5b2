"""Among ranks that failed together, the one that ended the run is named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zpp_lab.config.schema import Config, RunConfig
from zpp_lab.train.launch import launcher
from zpp_lab.train.launch.cause import USER_ERROR, first_cause, lost_a_peer
from zpp_lab.train.launch.heartbeat import lost_line, silent


@dataclass
class Failed:
    exitcode: int
    message: object = ""
    timestamp: int = 7


CLOSED = Failed(1, {"message": "RuntimeError: [gloo/pair.cc] Connection closed by peer [::1]:5"}, 6)
OURS = Failed(1, {"message": "CollectiveError: rank 0: grads_intra of blocks.3 failed: reset"}, 6)
KILLED, ABORTED, ENDED = Failed(-9), Failed(-6), Failed(-15)
RAISED = Failed(1, {"message": "KeyError: 'a'", "extraInfo": {"py_callstack": "KeyError: 'a'"}})
WHY = silent(9.0)
LOST = "LostRank: " + lost_line(0, "weights_forward of unit root (world)", 1, WHY)
SILENT = Failed(1, {"message": LOST, "lost": 1, "why": WHY}, 6)
GONE = Failed(1, {"message": "LostRank: rank 0: rank 1 is gone", "lost": 1, "why": "is gone"}, 6)
MISTAKE = Failed(USER_ERROR, {"message": "ValueError: no such file"}, 8)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ((CLOSED, KILLED), 1),
        ((OURS, KILLED, CLOSED), 1),
        ((CLOSED, OURS, RAISED), 2),
        ((ABORTED, ENDED, RAISED), 2),
        ((RAISED, MISTAKE), 1),
        ((RAISED, Failed(1, "KeyError: 'b'", 6)), 1),
        ((SILENT, KILLED), 0),  # by the launcher, as it did not end
        ((SILENT, KILLED, KILLED), 0),
        ((GONE, KILLED), 1),
        ((SILENT, ENDED, RAISED), 2),
    ],
)
def test_the_cause_comes_before_what_follows_from_it(
    failures: tuple[Failed, ...], rank: int
) -> None:
    assert first_cause(dict(enumerate(failures))) == (rank, failures[rank])


def test_an_own_error_is_no_lost_peer() -> None:
    assert lost_a_peer("torch.distributed.DistBackendError: NCCL: remote process exited or there")
    assert not lost_a_peer("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("failures", "said"),
    [({0: GONE}, "^rank 0: rank 1 is gone"), ({1: RAISED}, "^rank 1 ended the run")],
)
def test_a_folder_that_takes_no_failure_does_not_hide_the_rank(
    failures: dict[int, Failed], said: str, tmp_path: Path
) -> None:
    failed: Any = SimpleNamespace(failures=failures)
    left = tmp_path / "failure.json"
    left.write_text('{"outcome": "cra')
    with pytest.raises(launcher.RankFailed, match=said):
        launcher._report(failed, tmp_path, False)
    assert json.loads(left.read_text())["rank"] == 1
    with pytest.raises(launcher.RankFailed, match=said):
        launcher._report(failed, left, False)


def test_the_traceback_behind_a_mistake_is_kept(tmp_path: Path) -> None:
    """What ended the run in one line may have come from a library."""
    noted = {"message": "ValueError: no such file", "extraInfo": {"py_callstack": "Traceback: x"}}
    failed: Any = SimpleNamespace(failures={1: Failed(USER_ERROR, noted)})
    with pytest.raises(ValueError, match=r"^no such file$"):
        launcher._report(failed, tmp_path, False)
    left = json.loads((tmp_path / "failure.json").read_text())
    assert (left["error"], left["traceback"]) == ("rank 1: no such file", "Traceback: x")


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_on_a_failing_disk_says_its_line_and_ends(
    launched: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    ended: list[int] = []
    monkeypatch.setattr(launcher, "Pulse", lambda _, lost, __: SimpleNamespace(missing=lost))
    monkeypatch.setattr(launcher, "PULSES", [])
    monkeypatch.setattr(launcher.watchdog, "when_late", lambda _: None)
    monkeypatch.setattr(launcher.os, "_exit", ended.append)
    config = Config(run=RunConfig(dir=str(tmp_path / "file" / "run")))
    error_file = str(tmp_path / "file" / "error.json") if launched else None
    pulse: Any = launcher._watch(config, 0, error_file)
    pulse.missing(1, "is gone: its process has ended")
    assert ended == [1]
    assert "rank 0: rank 1 is gone: its process has ended" in capsys.readouterr().err
