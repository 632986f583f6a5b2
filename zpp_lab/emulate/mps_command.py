"""`zpp-lab mps`: a command whose processes, and theirs, share GPUs through NVIDIA's MPS.

    zpp-lab mps -- zpp-lab study deepspeed --runs-per-gpu 3

Without MPS kernels of two processes take turns on a GPU; with it they run side by side, so that
even runs of several ranks can share GPUs (their NCCL would wait out time slices). Numbers are
those of a GPU of their own. What crashes a GPU's server takes along all who share it. The daemon is
private and ends with the command; inside another `zpp-lab mps` that one's serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from zpp_lab.emulate.mps import PROGRAM, Mps

HELP = ("-h", "--help")


def main(argv: Sequence[str]) -> int:
    """The command's exit code, 128 + n where signal n ended it. EmulationError without MPS."""
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command or (command[0].startswith("-") and command[0] not in HELP):
        raise ValueError("name a command behind --: zpp-lab mps -- COMMAND")
    if command[0] in HELP:
        print(f"usage: zpp-lab mps -- COMMAND\n\n{__doc__}")
        return 0
    if PROGRAM in os.environ:
        return _run(command, {})
    with Mps() as mps:
        return _run(command, mps.environment)


def _run(command: Sequence[str], more: dict[str, str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before there was a process

    def pass_on(number: int, _: object) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    old = signal.signal(signal.SIGTERM, pass_on)
    try:
        process = _started(command, {**os.environ, **more})
        for number in early:
            process.send_signal(number)
        return _ended(process)
    finally:
        signal.signal(signal.SIGTERM, old)


def _started(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=environment)
    except OSError as error:
        raise ValueError(f"cannot run {command[0]}: {error.strerror}") from None


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C is the command's own affair: the terminal tells it too."""
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, old)
    return code if code >= 0 else 128 - code
