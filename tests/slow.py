"""Runs the tests that `make test` leaves out, so that they are run at all.

    python -m tests.slow [--jobs 2] [--minutes 30] [FILE ...]

Each file has a process of its own, is ended when it takes too long, and says what it found as
soon as it is done; a summary follows, and the exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

LONGEST = (  # these come first: started last, one of them would run alone
    "tests/cuda/test_compile.py",
    "tests/engines/test_fsdp_parity.py",
    "tests/study/run/test_kill.py",
    "tests/train/launch/test_launcher.py",
)
PYTEST = (sys.executable, "-m", "pytest", "-m", "slow", "-p", "no:cacheprovider")
GRACE = 20.0  # seconds for fixtures to tidy up


class Run:
    """pytest on the slow tests of one file, under way. `said`: its last line, or why none."""

    def __init__(self, file: str, seconds: float) -> None:
        self.file, self.limit, self.began = file, seconds, time.monotonic()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*PYTEST, "-rfE", file], stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.good, self.said, self.output = False, "", ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def over(self) -> bool:
        """Whether it has ended, or its time has."""
        late = self.process.poll() is None and self.seconds > self.limit
        if late:
            self.end()
        if self.process.returncode is None:
            return False
        self.log.seek(0)
        self.output = self.log.read()
        lines = self.output.strip().splitlines() or ["no output"]
        self.said = f"ended after {self.limit / 60:g} minutes" if late else lines[-1].strip("= ")
        self.good = not late and self.process.returncode == 0
        return True

    def end(self) -> None:
        """End it and its children."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def files_with_slow_tests() -> list[str]:
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return re.findall(r"^(\S+\.py): \d+$", done.stdout, re.MULTILINE)


def in_order(files: Sequence[str]) -> list[str]:
    return sorted(files, key=lambda f: (LONGEST.index(f) if f in LONGEST else len(LONGEST), f))


def run_all(files: Sequence[str], jobs: int, seconds: float, say: Callable[[str], None]) -> bool:
    """Whether all files are good; `jobs` of them run side by side, each at most `seconds`."""
    began, waiting, bad = time.monotonic(), deque(files), []
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Run(waiting.popleft(), seconds))
            time.sleep(0.1)
            for run in [r for r in running if r.over()]:
                running.remove(run)
                say(f"{'ok ' if run.good else 'BAD'} {run.seconds:6.0f} s  {run.file}: {run.said}")
                if not run.good:
                    bad.append(run)
                    say(run.output)
    finally:
        for run in running:
            run.end()
    minutes = (time.monotonic() - began) / 60
    say(f"\n{len(files)} files in {minutes:.1f} minutes, {len(bad) or 'none'} with failures")
    for run in bad:
        say(f"  {run.file}: {run.said}")
    return not bad


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="by default all that have any")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=30.0, help="for each file")
    asked = parser.parse_args(words)
    files = asked.files or in_order(files_with_slow_tests())
    good = run_all(files, asked.jobs, 60 * asked.minutes, partial(print, flush=True))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
