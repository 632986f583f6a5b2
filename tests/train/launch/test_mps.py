"""The MPS daemon's life, with a recorder in place of NVIDIA's program: it goes with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.launch.fake_mps import calls, fake_mps
from tests.waiting import until
from zpp_lab.train.launch import mps_keeper, processes
from zpp_lab.train.launch.mps import CONTROL, OWNER, Mps, check_client, find_control
from zpp_lab.train.launch.processes import EmulationError

JOB = Path(__file__).with_name("mps_job.py")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def of(owner: str) -> list[int]:
    return processes.marked(lambda other: other == owner, OWNER)


def test_it_serves_from_a_private_folder_and_is_told_to_quit(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    with Mps() as mps:
        pipe, log = mps.environment["CUDA_MPS_PIPE_DIRECTORY"], mps.folder / "log"
        assert (control / "seen").read_text().splitlines() == [f"{pipe} {log}", "unset"]
        assert mps.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
        assert len(of(processes.mark())) == 3  # keeper, daemon and server
        assert processes.marked(lambda other: other == processes.mark()) == []  # no part of a node
        folder = mps.folder
    start = f"start_server -uid {os.getuid()}"
    asked = ["get_server_list"] * 2
    assert calls(control) == ["daemon", start, *asked, "quit"]
    assert not folder.exists()
    assert of(processes.mark()) == []


def test_a_server_that_does_not_heed_it_is_killed(control: Path) -> None:
    (control / "stubborn").touch()
    with Mps():
        pass
    assert of(processes.mark()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_an_owner_that_is_ended(
    control: Path, tmp_path: Path, number: signal.Signals
) -> None:
    owner = subprocess.Popen(
        [sys.executable, str(JOB), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(JOB.parents[2])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_nodes.py
        stderr=subprocess.DEVNULL,
    )
    until(lambda: (tmp_path / "folder").exists() or owner.poll() is not None)
    mark, folder = processes.mark(owner.pid), Path((tmp_path / "folder").read_text())
    assert len(of(mark)) == 3
    owner.send_signal(number)
    owner.wait(240)
    until(lambda: of(mark) == [] and not folder.exists())
    assert calls(control)[-1] == "quit"


def test_what_a_dead_owner_left_is_ended_by_the_next(control: Path) -> None:
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, OWNER: "4194304:1"})
    until(lambda: left.pid in of("4194304:1"))
    with Mps():
        assert left.wait(240) == -signal.SIGKILL


def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (control / "refuses").write_text("Cannot start:\nno permission\n")
    mps = Mps()
    with pytest.raises(EmulationError, match=r"no permission.*=time-slices"), mps:
        pass
    assert not mps.folder.exists()
    assert of(processes.mark()) == []
    (control / "refuses").unlink()
    (control / "no_server").touch()
    monkeypatch.setattr(mps_keeper, "START", 0.1)
    folder = control / "private"
    (folder / "log").mkdir(parents=True)
    (folder / "log").rmdir()
    monkeypatch.setattr(mps_keeper, "last_words", lambda _: "server: no memory")
    try:
        with pytest.raises(EmulationError, match="server: no memory"):
            mps_keeper.start(str(control / CONTROL), folder)
    finally:
        for name in (folder / "pipe" / "pid", control / "server"):
            os.kill(int(name.read_text().split()[-1]), signal.SIGKILL)


def test_a_missing_program_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("zpp_lab.train.launch.mps.PLACES", (str(tmp_path / "driver"),))
    with pytest.raises(EmulationError, match=r"nvidia-compute-utils.*--share-gpus=time-slices"):
        find_control()
    assert find_control.__doc__
    program = fake_mps(tmp_path / "driver")
    assert find_control() == str(program)  # not on PATH, but where drivers put it


def test_a_rank_that_is_no_client_is_found_out(control: Path) -> None:
    check_client({}, 1)  # nobody asked for MPS
    with Mps() as mps:
        environment = {**os.environ, **mps.environment}
        with pytest.raises(EmulationError, match="process 12"):
            check_client(environment, 12)
        (control / "clients").write_text("11\n12\n")
        check_client(environment, 12)


def test_a_daemon_that_refuses_at_first_is_asked_again(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVIDIA's does with `get_client_list` of a server that has just started."""
    busy = control / "busy"
    busy.write_text("\n" * 2)  # for the keeper's first questions
    with Mps() as mps:
        assert busy.read_text() == ""
        environment = {**os.environ, **mps.environment}
        (control / "clients").write_text("12\n")
        busy.write_text("\n" * 3)
        check_client(environment, 12)
        assert busy.read_text() == ""
        monkeypatch.setattr("zpp_lab.train.launch.mps.SETTLING", 0.1)
        busy.write_text("\n" * 99)  # not for ever
        with pytest.raises(EmulationError, match=r"get_server_list.*not now"):
            check_client(environment, 12)
        busy.write_text("")  # else the keeper's last question waits for its answer
    assert of(processes.mark()) == []
