"""`zpp-lab mps`: a command whose processes, and theirs, share GPUs through NVIDIA's MPS.

    zpp-lab mps -- zpp-lab study deepspeed --runs-per-gpu 3

Without MPS kernels of two processes take turns on a GPU; with it they run side by side. So even
runs of several ranks can share GPUs: without it NCCL's kernels, which wait for each other, would
wait out each other's time slices. Numbers are those of a GPU of their own. What crashes a GPU's
server takes along all who share it. The daemon is private and ends with the command; inside
another `zpp-lab mps` that one's serves. No setting of a GPU, such as its compute mode, is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zpp_lab.train.launch import processes
from zpp_lab.train.launch.processes import EmulationError

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")
OWNER = "ZPP_LAB_MPS_OWNER"  # marks the keeper and what it starts
PROGRAM = "ZPP_LAB_MPS_CONTROL"  # tells ranks that they must be clients, and whom to ask
READY = "ready"
QUEUES = "8"  # as many as a process has without MPS; fewer let one stream hold up another
PATIENCE = 30.0  # seconds for an answer
SETTLING = 30.0  # seconds in which a server that has just started may refuse to answer
WITHOUT = (
    "or share GPUs in time slices, which is slow: --share-gpus=time-slices, or leave out "
    "`zpp-lab mps`"
)
HELP = ("-h", "--help")


def find_control() -> str:
    """Return the daemon's program. EmulationError says how to get it."""
    found = shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is None:
        raise EmulationError(
            f"sharing GPUs needs {CONTROL}, which is neither on PATH nor in {' or '.join(PLACES)}: "
            "it comes with the driver (Debian and Ubuntu: nvidia-compute-utils of its version; in "
            f"a container: the capability `utility` or `compute`); {WITHOUT}"
        )
    return found


class Mps:
    """An MPS daemon while the body runs. environment: for the processes that shall be its clients.

    EmulationError, with its message, where it is missing or does not start. A keeper
    (`mps_keeper.py`) starts it in a folder of its own and ends it again, however the owner ends.
    Clients find it by files in that folder, so they may be in other network namespaces. They need
    its user, and its namespaces of processes and IPC, which emulated nodes leave alone. A client
    that does not find it silently runs in time slices: `check_client` asks.
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
        processes.end_orphans(OWNER)
        self.folder = Path(tempfile.mkdtemp(prefix="zpp-mps-"))
        keeper = "zpp_lab.train.launch.mps_keeper"
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", keeper, self.program, str(self.folder)],
            env={**os.environ, OWNER: processes.mark()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self.keeper.stdout is not None
            answer = self.keeper.stdout.readline().strip()
            if answer != READY:
                why = answer or "the process that tried to start it has ended"
                raise EmulationError(f"{self.program} cannot run here: {why}; {WITHOUT}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Have the keeper end the daemon and remove the folder."""
        if self.keeper is None:
            return
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()
        self.keeper = None


def directories(folder: Path) -> dict[str, str]:
    """Return the daemon's variables for its files in `folder`."""
    names = {"PIPE": "pipe", "LOG": "log"}
    return {f"CUDA_MPS_{key}_DIRECTORY": str(folder / name) for key, name in names.items()}


def ask(program: str, command: str, environment: Mapping[str, str]) -> str:
    """Return the daemon's answer. EmulationError where it gives none."""
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
        raise EmulationError(f"{program} does not answer {command}: {error}") from None
    if done.returncode:
        answer = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise EmulationError(f"{program} refuses {command}: {answer}")
    return done.stdout


def patient(program: str, command: str, environment: Mapping[str, str], seconds: float) -> str:
    """Ask a daemon or server that has just started, which may refuse for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask(program, command, environment)
        except EmulationError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def numbers(text: str) -> list[int]:
    """Return the process ids of an answer."""
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


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code, 128 + n where signal n ended it."""
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command or (command[0].startswith("-") and command[0] not in HELP):
        raise ValueError("give a command after --: zpp-lab mps -- COMMAND")
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
        try:
            process = subprocess.Popen(command, env={**os.environ, **more})
        except OSError as error:
            raise ValueError(f"cannot run {command[0]}: {error.strerror}") from None
        for number in early:
            process.send_signal(number)
        # Ctrl-C reaches the command too, which decides
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, interrupt)
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, old)
