"""`python -m zpp_lab.train.launch.mps_keeper PROGRAM FOLDER`: runs an MPS daemon for its owner.

Its standard input is a pipe whose other end the owner alone has. When that ends, so has the owner,
or it needs the daemon no more: then the daemon is told to quit, what is left of it is killed, and
the folder is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zpp_lab.train.launch import processes
from zpp_lab.train.launch.mps import OWNER, READY, ask, directories, numbers, patient
from zpp_lab.train.launch.processes import EmulationError

START = 20.0  # seconds until a server must be there
GRACE = 5.0  # seconds in which it may end by itself
LAST_LINES = 6  # of the daemon's logs, in an error


def main(program: str, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the owner decides
        signal.signal(number, _ignore)  # a handler is not inherited, as SIG_IGN would be
    owner = os.environ[OWNER]
    try:
        try:
            start(program, folder)
            print(READY, flush=True)
        except (EmulationError, OSError, subprocess.SubprocessError) as error:
            print(" ".join(str(error).split()), flush=True)
            return
        sys.stdin.buffer.read()
    finally:
        quit_daemon(program, folder, lambda other: other == owner)
        shutil.rmtree(folder, ignore_errors=True)


def quit_daemon(program: str, folder: Path, own: Callable[[str], bool]) -> None:
    """Tell the daemon to quit, and kill what has not ended soon after."""
    environment, servers = own_environment(folder), list[str]()
    with contextlib.suppress(EmulationError):
        found = numbers(ask(program, "get_server_list", environment))
        servers = [processes.mark(pid) for pid in found]
        ask(program, "quit", environment)
    deadline = time.monotonic() + GRACE
    while (processes.marked(own, OWNER) or any(map(processes.alive, servers))) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    processes.end(own, variable=OWNER)
    for server in filter(processes.alive, servers):  # one that was given another environment
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(server.partition(":")[0]), signal.SIGKILL)


def _ignore(*_: object) -> None:
    """Wait on for the owner."""


def own_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the daemon sees every GPU: it would renumber those of
    CUDA_VISIBLE_DEVICES, and clients name them as the machine does."""
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return kept | directories(folder)


def start(program: str, folder: Path) -> None:
    """Start the daemon and a server of it, at once rather than with the first client, so that what
    keeps it from starting is known. EmulationError says what."""
    environment = own_environment(folder)
    for name in directories(folder).values():
        Path(name).mkdir()
    output = folder / "said"
    with output.open("w") as file:  # not a pipe: the daemon would keep it open
        begun = subprocess.run(
            [program, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the owner
            timeout=START,
            check=False,
        )
    if begun.returncode:
        raise EmulationError(output.read_text().strip() or f"exit code {begun.returncode}")
    patient(program, f"start_server -uid {os.getuid()}", environment, START)
    deadline = time.monotonic() + START
    while not numbers(patient(program, "get_server_list", environment, START)):
        if time.monotonic() > deadline:
            raise EmulationError(f"no server within {START:.0f} s: {last_words(folder)}")
        time.sleep(0.1)


def last_words(folder: Path) -> str:
    """Return the end of the daemon's and the server's logs."""
    lines: list[str] = []
    for path in sorted((folder / "log").glob("*.log")):
        lines += path.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return " | ".join(lines) or "its logs are empty"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
