"""`zpp-lab mps`: a command with a daemon of its own, which ends with it however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.launch.fake_mps import calls
from tests.waiting import until
from zpp_lab.cli.main import main as cli
from zpp_lab.train.launch.mps import PROGRAM, main

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def writes(names: str, file: Path) -> list[str]:
    return ["--", "sh", "-c", f"echo {names} > {file}"]


def test_the_command_finds_the_daemon_and_its_code_comes_back(
    control: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    assert main(writes(f"$CUDA_MPS_PIPE_DIRECTORY ${PROGRAM}", found)) == 0
    pipe, program = found.read_text().split()
    assert (Path(program).parent, Path(pipe).exists()) == (control, False)
    assert calls(control)[-1] == "quit"
    assert main(["sh", "-c", "exit 7"]) == 7


def test_inside_another_that_ones_daemon_serves(control: Path, tmp_path: Path) -> None:
    inner = [sys.executable, "-m", "zpp_lab.cli", "mps", "--", "true"]
    assert main(["--", *inner]) == 0
    assert calls(control).count("daemon") == 1


def test_a_signal_reaches_the_command_first(control: Path, tmp_path: Path) -> None:
    waits = (
        f"trap 'echo ended > {tmp_path}/end; exit 3' TERM; touch {tmp_path}/on; sleep 600 & wait"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "zpp_lab.cli", "mps", "--", "bash", "-c", waits],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    until((tmp_path / "on").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 3
    assert (tmp_path / "end").read_text() == "ended\n"
    assert calls(control)[-1] == "quit"


def test_what_cannot_run_is_said(control: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["mps", "--", "no-such-program"]) == 2
    assert "cannot run no-such-program: No such file" in capsys.readouterr().err
    assert cli(["mps"]) == 2
    assert "zpp-lab mps -- COMMAND" in capsys.readouterr().err
