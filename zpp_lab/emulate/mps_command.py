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
    if not command or command[0] in HELP:
        print(f"usage: zpp-lab mps -- COMMAND\n\n{__doc__}")
        return 0 if command else 2
    if PROGRAM in os.environ:
        return _run(command, {})
    with Mps() as mps:
        return _run(command, mps.environment)


def _run(command: Sequence[str], more: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env={**os.environ, **more})
    except OSError as error:
        raise ValueError(f"cannot run {command[0]}: {error.strerror}") from None
    old = {n: signal.signal(n, lambda n, _: process.send_signal(n)) for n in (signal.SIGTERM,)}
    old[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells both
    try:
        code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
