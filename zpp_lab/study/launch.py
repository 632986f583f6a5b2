"""Runs a study: what is finished is skipped, what failed is tried again, nothing stops the rest."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from zpp_lab.config import StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study.plan import Compose, PlannedRun, plan_runs, to_do, write_config
from zpp_lab.study.pool import LOG, Pool
from zpp_lab.study.progress import Progress
from zpp_lab.study.runs import read_run, write_study
from zpp_lab.study.slots import make_slots
from zpp_lab.tracking import start_study_sink

ENTRY = "zpp_lab.launcher:launch"
_POLL = 0.5  # seconds between looks at the running processes
_TAIL_LINES, _TAIL_BYTES = 30, 8192


@dataclass(frozen=True)
class StudyOutcome:
    """How a study's call ended. `failed` and `unfinished` name runs as "arm seed n"."""

    finished: Sequence[str]
    skipped: Sequence[str]  # finished before this call
    failed: Sequence[str]
    unfinished: Sequence[str] = ()  # left over by Ctrl-C or SIGTERM

    @property
    def exit_code(self) -> int:
        """For the shell: 0 all finished, 1 a run failed, 130 interrupted."""
        return 130 if self.unfinished else int(bool(self.failed))

    @property
    def message(self) -> str:
        done = len(self.finished) + len(self.skipped)
        lines = [f"{done} of {done + len(self.failed) + len(self.unfinished)} runs finished."]
        if self.failed:
            lines.append(
                f"Failed: {', '.join(self.failed)}. Each one's folder says why (failure.json, "
                f"{LOG}); the same command tries them again."
            )
        if self.unfinished:
            lines.append("Interrupted. The same command goes on from here; nothing is repeated.")
        return "\n".join(lines)


def run_study(
    study: StudyConfig,
    root: Path,
    jobs: int = 0,
    *,
    compose: Compose | None = None,
    entry: str = ENTRY,
    stream: TextIO | None = None,
) -> StudyOutcome:
    """Run every arm × seed of `study` below `root` that has not finished yet.

    jobs: runs side by side; 0 takes study.jobs, and if that is 0 too one a GPU or one a core.
    compose, entry: other than Hydra's compose and the trainer only in tests.
    Raises ValueError before anything runs for a config that does not compose, for a folder
    with other settings, and when a study is running in `root` already.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        runs = plan_runs(study, root, compose or _compose())
        write_study(root, study)
        todo = to_do(runs)
        slots = make_slots(jobs or study.jobs, [run.config for run in runs])
        progress = Progress(len(runs), todo, stream)
        progress.say(f"Study {study.name}: {_intent(runs, todo, len(slots))}")
        tracking = runs[0].config.tracking
        sink = start_study_sink(root, tracking)
        ended = _run_all(todo, Pool(entry, slots), progress)
        if tracking.wait_seconds > 0:  # else its process goes on by itself
            sink.wait(tracking.wait_seconds)
        outcome = _outcome(runs, todo, ended)
        progress.say(outcome.message)
    return outcome


def _outcome(
    runs: Sequence[PlannedRun], todo: Sequence[PlannedRun], ended: Mapping[Path, bool]
) -> StudyOutcome:
    tried = {run.dir for run in todo}
    return StudyOutcome(
        finished=[str(run) for run in todo if ended.get(run.dir)],
        skipped=[str(run) for run in runs if run.dir not in tried],
        failed=[str(run) for run in todo if ended.get(run.dir) is False],
        unfinished=[str(run) for run in todo if run.dir not in ended],
    )


def _compose() -> Compose:
    from zpp_lab.compose import compose  # Hydra is slow to import, and a report needs none

    return compose


def _intent(runs: Sequence[PlannedRun], todo: Sequence[PlannedRun], jobs: int) -> str:
    again = sum((run.dir / "failure.json").exists() for run in todo)
    parts = [f"{len(runs)} runs", f"{len(runs) - len(todo)} finished already"]
    parts += [f"{again} failed and are tried again"] if again else []
    return ", ".join([*parts, f"{jobs} side by side."])


def _run_all(todo: Sequence[PlannedRun], pool: Pool, progress: Progress) -> dict[Path, bool]:
    """Run folder → finished (True) or failed (False), for the runs that ended."""
    waiting, ended = deque(todo), {}
    with _stop_on_signals() as stop:
        try:
            while (waiting or pool.running) and not stop.requested:
                while waiting and pool.has_room:
                    run = waiting.popleft()
                    (run.dir / "failure.json").unlink(missing_ok=True)
                    pool.start(run)
                for run, code in pool.wait(_POLL):
                    if not stop.requested or run.finished:
                        ended[run.dir] = _settle(run, code, progress)
                progress.update(pool.running)
        finally:
            pool.stop()
            progress.close()
    return ended


def _settle(run: PlannedRun, code: int, progress: Progress) -> bool:
    """Report a run that ended; one that left no word gets its failure.json here."""
    if not run.finished:
        write_config(run)  # a run that failed early has not done it itself
        if not (run.dir / "failure.json").exists():
            _write_failure(run, code)
    result = read_run(run.dir)
    if result.summary is not None:
        loss, seconds = result.summary["heldout_loss"], result.summary["seconds"]
        progress.ended(run, f"held-out loss {loss:.4f}, {seconds:.0f} s")
        return True
    assert result.failure is not None
    error = str(result.failure["error"]).strip().splitlines() or [""]
    progress.ended(run, f"{result.outcome.replace('_', ' ')}: {error[0]}")
    return False


def _write_failure(run: PlannedRun, code: int) -> None:
    failure = {
        "outcome": "crashed",
        "error": how_it_ended(code),
        "step": None,
        "traceback": log_tail(run.dir / LOG),
    }
    write_atomic(run.dir / "failure.json", json.dumps(failure, indent=1) + "\n")


def how_it_ended(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    if code >= 0:
        return f"the process ended with exit code {code} and without a summary; see {LOG}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the machine may be out of memory)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}; see {LOG}"


def log_tail(path: Path) -> str:
    """The last lines of a log, for failure.json."""
    if not path.exists():
        return ""
    text = path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


class _Stop:
    """Whether a signal asked for the end. A plain flag: a second signal may come at any moment,
    inside this handler too, where a lock would wait for itself."""

    requested = False

    def request(self, *_: object) -> None:
        self.requested = True


@contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """Notes SIGINT and SIGTERM; the old handlers come back at the end."""
    stop = _Stop()
    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, stop.request)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the folder, so that two calls never run the same runs at the same time."""
    with open(root / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{root}: a study is running here already; wait or stop it") from None
        yield
