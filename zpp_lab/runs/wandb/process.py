"""Starts the wandb process of a run or a study. Imports no wandb."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path
from typing import IO

import zpp_lab
from zpp_lab.config.schema import TrackingConfig
from zpp_lab.runs.wandb.folder import SINK_LOG
from zpp_lab.runs.wandb.mode import Mode, resolve

SINK = "zpp_lab.runs.wandb.sink"
_started: list[subprocess.Popen[bytes]] = []  # they may outlive their handles; that is no fault


class SinkHandle:
    """A wandb process that runs in parallel, or none when wandb is off."""

    def __init__(
        self, process: subprocess.Popen[bytes] | None, log: Path, target: Path, mode: Mode = "off"
    ) -> None:
        self._process, self._log, self._target, self._mode = process, log, target, mode

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def end(self, seconds: float) -> None:
        """Wait where there is time; else a line says who sends the rest."""
        if seconds > 0:
            self.wait(seconds)
        elif self._mode == "online" and self._process is not None and self._process.poll() != 0:
            print(
                f"wandb: a background process sends the rest; its log is {self._log}. If it "
                f"fails: zpp-lab sync {self._target}",
                file=sys.stderr,
            )

    def wait(self, seconds: float) -> bool:
        """Say that nothing more will come, and wait at most `seconds` for the rest to be sent.

        Returns whether wandb has everything; otherwise a line says how to send it
        later. A process that is not done goes on by itself.
        """
        if self._process is None:
            return True
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            if self._process.wait(seconds) == 0:
                return True
            state = "was not given everything"
        except subprocess.TimeoutExpired:
            state = f"does not have everything after {seconds:g} s; its process continues"
        except OSError as error:
            state = f"may not have everything ({error})"
        print(
            f"wandb {state}; see {self._log}. Nothing is lost; send it again with: zpp-lab sync "
            f"{self._target}",
            file=sys.stderr,
        )
        return False


def start_run_sink(run_dir: Path, mode: Mode) -> SinkHandle:
    """Send one run while it trains. OSError when no process can be started."""
    log = run_dir / SINK_LOG
    if mode == "off":
        return SinkHandle(None, log, run_dir)
    process = start_process(SINK, [str(run_dir), "--mode", mode], log)
    return SinkHandle(process, log, run_dir, mode)


def start_study_sink(root: Path | str, cfg: TrackingConfig) -> SinkHandle:
    """Send each run below `root` as it ends, all from one process.

    Call `wait(seconds)` on the handle after the last run. ValueError when `cfg` asks
    for a mode that this machine cannot do; a process that cannot be started is one
    line on stderr, as a study does not depend on it.
    """
    root = Path(root).resolve()
    log = root / SINK_LOG
    mode, why = resolve(cfg.wandb)
    if cfg.wandb == "auto":
        print(f"wandb: {mode} ({why})", flush=True)
    if mode == "off":
        return SinkHandle(None, log, root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        arguments = ["--study", str(root), "--mode", mode]
        process = start_process(SINK, arguments, log, subprocess.PIPE)
    except OSError as error:
        print(f"wandb: cannot start its process ({error}); the study continues", file=sys.stderr)
        return SinkHandle(None, log, root)
    return SinkHandle(process, log, root, mode)


def start_process(
    module: str, arguments: list[str], log: Path, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module of ours on its own, with all that it says in `log`."""
    command = [sys.executable, "-m", module, *arguments]
    file: IO[bytes]
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # neither Ctrl-C nor a closed terminal reaches it
        )
    _started.append(process)
    return process


def _environment() -> dict[str, str]:
    """This environment, with the package importable even from a plain checkout."""
    package = zpp_lab.__file__
    assert package is not None
    root = str(Path(package).resolve().parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        before = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else root
    return environment
