"""A run in time slices: it stops between two steps, with a checkpoint, before a given time, when
Slurm warns that its job's time is nearly over, or (all ranks in one process) on Ctrl-C and SIGTERM.

The same command then resumes, here or on another machine that has the run's folder, and ends with
the bytes of a run that was never stopped. Rank 0's clock and signals decide for all ranks. A
stopped run leaves neither summary nor failure.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from zpp_lab.files import QUEUED, write_atomic
from zpp_lab.runs.reader import last_step, queued_at

PAUSED = 75  # exit code of a command whose run stopped for want of time (EX_TEMPFAIL)
UNFINISHED = "unfinished"  # the outcome of such a run
_BYTES_A_PARAMETER = {"fp32": 12, "bf16": 8, "8bit": 6}  # of weights and AdamW's moments
_BYTES_A_SECOND = 1e9  # of a rank; on a good local disk 1.7e9 were measured (experiments/kernels)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # for --signal; submitit's is the second
_TO_ASK = 20.0  # seconds before the end of a job's time, to ask that it be queued again
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str = "--for") -> float:
    """Parse the time of `option`: 480, 480s, 8m or 1.5h. ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{option} {text}: use a time above 0, such as 480, 480s, 8m or 1.5h")
    return float(found[1]) * _UNITS[found[2]]


def writing_seconds(numel: int, optimizer_state: str) -> float:
    """Estimate a checkpoint's seconds, of so many parameters of one process."""
    return numel * _BYTES_A_PARAMETER[optimizer_state] / _BYTES_A_SECOND


class SlurmJob:
    """The Slurm job of this process, if any. Once it is warned, its run stops, and the job is then
    queued again: by the former signal handler (submitit), else by Slurm's own command."""

    def __init__(self) -> None:
        self.warning: int | None = None  # the signal that came
        self._before: dict[int, Any] = {}
        self._folder: Path | None = None
        self._asked = threading.Lock()

    def listen(self, folder: Path | None) -> None:
        """Record a warning from now on, which would end the process otherwise. folder: the run's;
        None for a rank of our own launcher, which asks for it."""
        main = threading.current_thread() is threading.main_thread()
        if "SLURM_JOB_ID" in os.environ and main and not self._before:
            self._folder = folder
            self._before = {number: signal.signal(number, self._hear) for number in _WARNINGS}

    @property
    def listens(self) -> bool:
        return bool(self._before)

    @property
    def _asks(self) -> bool:
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
        return self._folder is not None and rank == "0"

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.warning is None:
            self.warning = number
            if self._asks:
                os.write(2, b"Slurm's warning: the run stops after this step\n")
                threading.Thread(target=self._ask_in_time, daemon=True).start()

    def _ask_in_time(self) -> None:
        """Ask early where the step and its checkpoint would outlast the job."""
        words = ["squeue", "-h", "-j", os.environ["SLURM_JOB_ID"], "-o", "%e"]
        try:
            end = datetime.fromisoformat(subprocess.check_output(words, text=True).strip())
        except (OSError, subprocess.CalledProcessError, ValueError):
            return  # it has no limit, or nobody knows
        left = max(0.0, end.timestamp() - time.time())
        time.sleep(max(left - _TO_ASK, 0.75 * left))
        if why := self.again():
            print(why, file=sys.stderr, flush=True)

    def again(self) -> str:
        """Queue the job again, once; returns why not, or "". submitit then ends the process."""
        if self.warning is None or self._folder is None or not self._asks:
            return ""
        if not self._asked.acquire(blocking=False):
            return ""
        other, fix = self._before[self.warning], "submit it with `#SBATCH --requeue`"
        before, step = queued_at(self._folder), last_step(self._folder)
        try:
            write_atomic(self._folder / QUEUED, f"{step}\n")
            if callable(other):
                fix = "raise hydra.launcher.max_num_timeout or hydra.launcher.timeout_min"
                other(self.warning, None)
            elif before is not None and step <= before:
                fix = "give it a longer --time"
                raise ValueError(f"no step since the last requeue, after step {before}")
            else:
                words = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
                subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
        except Exception as error:
            (self._folder / QUEUED).unlink(missing_ok=True)
            reason = " ".join((getattr(error, "stderr", None) or str(error)).split()).rstrip(".")
            return (
                f"the job's time is nearly over, and it was not queued again ({reason}): {fix}. "
                "The same command resumes from here"
            )
        return ""


JOB = SlurmJob()


class Signals:
    """Ctrl-C and SIGTERM wait while this is entered, so that the step ends and a checkpoint is
    written. Then the first that came goes to who heard it before; the same once more does at
    once. For a run in one process: ranks that hear them apart from each other could not agree on
    a step."""

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._give_back()
        if self.came is not None and kind is None:
            signal.raise_signal(self.came)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.came is None:
            self.came = number
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            note = (
                f"{name}: the run stops after this step and saves a checkpoint; press again to "
                "stop now\n"
            )
            os.write(2, note.encode())
        elif number == self.came:
            self._give_back()
            signal.raise_signal(number)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class TimeSlice:
    """Decides when to stop: after `steps` steps of this start (0: any number), and before a step
    that would probably end after `until` (unix seconds). Also once Slurm has warned of the job's
    end. Rank 0 decides for all ranks of the default process group, if there is one. Without an
    `until`, and outside of Slurm, no rank is asked."""

    def __init__(self, until: float | None, steps: int = 0) -> None:
        self.until, self.steps, self.asked = until, steps, 0

    def over(self, next_step: float = 0.0) -> bool:
        """Return whether to stop before the next step, which will probably take so many seconds,
        with the checkpoint after it. Every rank must call it once a step."""
        self.asked += 1
        if self.steps and self.asked > self.steps:
            return True
        if self.until is None and not JOB.listens:
            return False
        late = self.until is not None and time.time() + next_step >= self.until
        return _as_rank_0(late or JOB.warning is not None)

    def too_short(self, writing: float) -> str:
        """Say why a slice had no step, where its checkpoint would need `writing` s."""
        if JOB.warning is not None:
            return "no step was started before Slurm's warning: give the job more time"
        left = max(0.0, (self.until or 0.0) - time.time())
        return (
            f"no step was started: {left:.0f} s of this time slice were left after start-up, and "
            f"a checkpoint needs about {writing:.0f} s; use longer time slices (--for)"
        )


def _as_rank_0(own: bool) -> bool:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return own
    decision = torch.tensor([own])
    dist.broadcast(decision, src=0)
    return bool(decision)
