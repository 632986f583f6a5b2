"""NVIDIA's MPS for ranks that share a GPU: a private daemon that goes when its owner goes.

Without MPS the kernels of two processes never run on one GPU at the same time. Those of NCCL wait
for each other there, so each would wait out the other's time slice. A keeper (`mps_keeper.py`)
starts the daemon in a folder of its own and ends it again, however the owner ends; no setting of a
GPU, such as its compute mode, is touched.

Clients find the daemon by files in that folder, so they may be in other network namespaces. They
need the daemon's user, and its namespaces of processes and IPC, which emulated nodes leave alone.
A client that does not find it goes on in time slices without a word: `check_client` asks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from zpp_lab.emulate import marks
from zpp_lab.emulate.tools import EmulationError

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")
OWNER = "ZPP_LAB_MPS_OWNER"  # marks the keeper and what it starts
PROGRAM = "ZPP_LAB_MPS_CONTROL"  # tells ranks that they must be clients, and whom to ask
READY = "ready"
QUEUES = "8"  # as many as a process has without MPS; fewer let one stream hold up another
PATIENCE = 30.0  # seconds for an answer
SETTLING = 30.0  # seconds in which a server that has just started may refuse to answer
WITHOUT = (
    "or share them in time slices, which is slow: --share-gpus=time-slices, or leave out "
    "`zpp-lab mps`"
)


def find_control() -> str:
    """Where the daemon's program is. EmulationError says how to get it."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    found = shutil.which(CONTROL, path=path)
    if found is None:
        raise EmulationError(
            f"sharing GPUs needs {CONTROL}, which is neither on PATH nor in {' or '.join(PLACES)}: "
            "it comes with the driver (Debian and Ubuntu: nvidia-compute-utils of its version; in "
            f"a container: the capability `utility` or `compute`); {WITHOUT}"
        )
    return found


class Mps:
    """A daemon while the body runs. environment: for the processes that shall be its clients.

    EmulationError where it is missing or does not start; says what it said.
    """

    def __init__(self) -> None:
        self.program = find_control()
        self.folder = Path()
        self.keeper: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)
        more = {PROGRAM: self.program, "CUDA_DEVICE_MAX_CONNECTIONS": queues}
        return {**directories(self.folder), **more}

    def __enter__(self) -> Mps:
        marks.end_orphans(OWNER)
        self.folder = Path(tempfile.mkdtemp(prefix="zpp-mps-"))
        words = [sys.executable, "-m", "zpp_lab.emulate.mps_keeper", self.program, str(self.folder)]
        self.keeper = subprocess.Popen(
            words,
            env={**os.environ, OWNER: marks.mark()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self.keeper.stdout is not None
            said = self.keeper.stdout.readline().strip()
            if said != READY:
                why = said or "the process that tried it ended"
                raise EmulationError(f"{self.program} does not serve here: {why}; {WITHOUT}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """The keeper ends the daemon and removes the folder."""
        if self.keeper is None:
            return
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()
        self.keeper = None


def directories(folder: Path) -> dict[str, str]:
    """The daemon's variables for its files in `folder`."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def ask(program: str, command: str, environment: Mapping[str, str]) -> str:
    """The daemon's answer. EmulationError where it gives none."""
    try:
        done = subprocess.run(
            [program],
            env=dict(environment),
            input=command + "\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulationError(f"{program} gives no answer to {command}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise EmulationError(f"{program} refuses {command}: {said}")
    return done.stdout


def patient(program: str, command: str, environment: Mapping[str, str], seconds: float) -> str:
    """As `ask`, of a daemon or server that has just started: so long it may refuse."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask(program, command, environment)
        except EmulationError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def numbers(text: str) -> list[int]:
    """The process ids of an answer."""
    return [int(word) for word in text.split() if word.isdigit()]


def check_client(environment: Mapping[str, str], pid: int) -> None:
    """EmulationError when the process `pid`, which uses CUDA, should be a client and is none."""
    program = environment.get(PROGRAM)
    if program is None:
        return
    servers = numbers(patient(program, "get_server_list", environment, SETTLING))
    clients = [
        client
        for server in servers
        for client in numbers(patient(program, f"get_client_list {server}", environment, SETTLING))
    ]
    if pid not in clients:
        raise EmulationError(
            f"process {pid} uses its GPU without MPS (servers {servers}, clients {clients}): they "
            f"need the same user and the same namespaces of processes and IPC; {WITHOUT}"
        )
