"""Runs a study: what is finished is skipped, what failed is tried again, nothing stops the rest.

A study with `max_seeds` above its first seeds goes on: it adds `seeds_per_look` seeds at a time
(`next_seeds`) to every arm whose gap is shown neither inside nor beyond the margin, after all runs
of the look before have ended. What repeated looking costs is paid for in `study/judge/families.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from zpp_lab.config.study import StudyConfig
from zpp_lab.files import FAILURE, only_one
from zpp_lab.runs.reader import Run, find_runs, last_step, read_json, unfinished_text, write_study
from zpp_lab.runs.wandb.process import start_study_sink
from zpp_lab.study.run import attempts
from zpp_lab.study.run.attempts import StudyOutcome
from zpp_lab.study.run.places import Memory, check_jobs, make_places
from zpp_lab.study.run.plan import Compose, PlannedRun, Planner, check_runs, notes, to_do
from zpp_lab.study.run.progress import Progress
from zpp_lab.study.run.queue import Queue, Stop, stop_on_signals
from zpp_lab.train.time_slice import UNFINISHED

if TYPE_CHECKING:
    from zpp_lab.study.judge.verdict import StudyResult

ENTRY = "zpp_lab.train.launch.launcher:train"  # the pool holds the folder


def next_seeds(study: StudyConfig, result: StudyResult) -> dict[str, list[int]]:
    """Return arm → further seeds to run now; empty when all is decided or the cap is reached.

    A pure function of the runs that have ended, so a study that was killed and started again
    asks for the same seeds. Runs of a look that have not ended are asked for again; failed runs
    are not. Baselines come first, with the seeds that their arms' pairs lack.
    """
    if study.max_seeds <= len(study.seeds):
        return {}
    from zpp_lab.study.judge.families import replay  # loads scipy: for studies that look alone
    from zpp_lab.study.judge.verdict import entries

    missing = replay(study, entries(study, result.arms, result.composites)).missing
    arms = {arm.name: arm for arm in result.arms}
    todo: dict[str, set[int]] = {}
    for name, seeds in missing.items():
        for side in (*study.bases(arms[name].arm), name):
            runs = arms[side].runs
            left = [s for s in seeds if s not in runs or runs[s].outcome == "unfinished"]
            todo.setdefault(side, set()).update(left)
    bases = {base for name in missing for base in study.bases(arms[name].arm)}
    order = sorted(todo, key=lambda name: name not in bases)
    return {name: sorted(todo[name]) for name in order if todo[name]}


class Executor(Protocol):
    """Runs planned runs somewhere: this machine's queue, or a Hydra launcher."""

    outcomes: dict[Path, str]  # run folder → how it ended, for runs that ended in this call

    def run(self, todo: Sequence[PlannedRun], stop: Stop) -> None: ...


@dataclass(frozen=True)
class Launch:
    """One start of a study: which of its runs, where, and until when. ValueError for what nobody
    would keep.

    jobs: runs side by side; 0 takes study.jobs, and if that is 0 too as many as fit.
    launcher: a Hydra launcher (conf/hydra/launcher, such as slurm) in place of this machine.
    settings: overrides of hydra.launcher.
    arms, seeds: those to run now; the study keeps the others, and adds none. Empty: all.
    until: unix time before which running runs stop, each with a checkpoint; for this machine.
    """

    jobs: int = 0
    launcher: str | None = None
    settings: Sequence[str] = ()
    arms: Sequence[str] = ()
    seeds: Sequence[int] = ()
    until: float | None = None

    def __post_init__(self) -> None:
        check_jobs(self.jobs)
        if self.until is not None and self.launcher is not None:
            raise ValueError(
                "--for applies to runs on this machine; set the job's limit in the launcher"
            )


def run_study(
    study: StudyConfig,
    root: Path,
    launch: Launch | None = None,
    *,
    retry: bool = False,
    compose: Compose | None = None,
    entry: str = ENTRY,
    stream: TextIO | None = None,
) -> StudyOutcome:
    """Run every arm × seed of `study` below `root` that has not ended yet, and then, with
    `study.max_seeds`, more seeds for the arms that are undecided. Arms wait for the runs of
    `study.prepare`, and do not start when one of those fails.

    launch: which runs, where and until when; None: all, as many side by side as fit.
    retry: also start the runs again that diverged or failed too often.
    compose, entry: other than Hydra's compose and the trainer only in tests.
    Raises ValueError before anything runs for a config that does not compose, for a folder
    with other settings or another study, and when a study is running in `root` already; OSError
    when the disk is full.
    """
    launch = launch or Launch()
    planner = Planner(study, root, compose or hydra_compose())
    runs = planner.first(launch.arms, launch.seeds)
    check_runs(study, runs, here=launch.launcher is None)
    if launch.launcher is not None:
        from zpp_lab.study.run.batch import check_batch  # Hydra is slow to import

        check_batch(launch.launcher, root, launch.settings, to_do(runs))
    with only_one(root), stop_on_signals() as stop:
        todo, lost = _todo(study, runs, retry)
        progress = Progress(len(runs), todo, stream)
        executor, where = _executor(study, root, runs, launch, entry, progress)
        write_study(root, study)
        progress.say(f"Study {study.name}: {_intent(runs, todo, lost)}, {where}.")
        for note in notes(todo):
            progress.say(note)
        tracking = runs[0].config.tracking
        sink = start_study_sink(root, tracking)
        executor.run([run for run in todo if run.prepares], stop)
        ready = _ready([run for run in runs if run.prepares], progress, stop)
        executor.run([run for run in todo if ready and not run.prepares], stop)
        some = launch.arms or launch.seeds
        while ready and not (some or stop.requested or _over(launch.until, executor)):
            more = _more(planner, root)
            if not more:
                break
            progress.add(more)
            progress.say(f"Still undecided: {len(more)} more runs ({_seeds(more)}).")
            runs, todo = [*runs, *more], [*todo, *more]
            executor.run(more, stop)
        sink.end(tracking.wait_seconds)
        late = not stop.requested and _over(launch.until, executor)
        held = [] if ready or stop.requested or late else [run for run in todo if not run.prepares]
        ended = {run.dir: "finished" for run in todo if run.finished} | executor.outcomes
        outcome = _outcome(study, runs, todo, ended, held)
        outcome = replace(outcome, out_of_time=late)
        progress.say(outcome.message)
    return outcome


def _ready(first: Sequence[PlannedRun], progress: Progress, stop: Stop) -> bool:
    """Whether the arms may start."""
    open_runs = [str(run) for run in first if not run.finished]
    if open_runs and not stop.requested:
        progress.say(f"No arm starts before {', '.join(open_runs)} has finished.")
    return not open_runs


def _over(until: float | None, executor: Executor) -> bool:
    if until is None:
        return False
    return time.time() >= until or UNFINISHED in executor.outcomes.values()


def _todo(
    study: StudyConfig, runs: Sequence[PlannedRun], retry: bool
) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """(the runs to start, those that failed for good)."""
    left = to_do(runs)
    if retry:
        for run in left:
            attempts.forget(run.dir)
            (run.dir / FAILURE).unlink(missing_ok=True)
    lost = [run for run in left if attempts.given_up(run.dir, study.retries)]
    return [run for run in left if run not in lost], lost


def _executor(
    study: StudyConfig,
    root: Path,
    runs: Sequence[PlannedRun],
    launch: Launch,
    entry: str,
    progress: Progress,
) -> tuple[Executor, str]:
    """Where the runs go, and a phrase that says so."""
    if launch.launcher is not None:
        from zpp_lab.study.run.batch import Batch

        batch = Batch(study, root, launch.launcher, launch.settings, progress)
        return batch, f"through Hydra's launcher {launch.launcher}"
    places = make_places(
        launch.jobs or study.jobs, study.runs_per_gpu, [run.config for run in runs]
    )
    memory = Memory(study.runs_per_gpu if places.gpus else 1)
    for run in runs:
        if run.finished and places.gpus:
            memory.learn(run)
    side = f"{len(places)} {'GPUs' if places.gpus else 'side by side'}"
    return Queue(entry, places, memory, progress, launch.until), side


def _more(planner: Planner, root: Path) -> list[PlannedRun]:
    """The runs of further seeds that undecided arms need; see `next_seeds`."""
    if planner.study.max_seeds <= 0:
        return []
    from zpp_lab.study.judge.verdict import judge_study

    wanted = next_seeds(planner.study, judge_study(planner.study, find_runs(root)))
    left = to_do(planner.plan(wanted))
    return [run for run in left if not attempts.given_up(run.dir, planner.study.retries)]


def _outcome(
    study: StudyConfig,
    runs: Sequence[PlannedRun],
    todo: Sequence[PlannedRun],
    ended: Mapping[Path, str],
    waiting: Sequence[PlannedRun],
) -> StudyOutcome:
    tried = {run.dir for run in todo}
    lost = [run for run in runs if not run.finished and run.dir not in tried]
    before = {run.dir: str(attempts.attempts(run.dir)[-1]["outcome"]) for run in lost}
    known = {**before, **ended}

    def those(*outcomes: str) -> list[str]:
        return [str(run) for run in runs if known.get(run.dir) in outcomes]

    failed = those("crashed", "out_of_memory")
    again = {str(run) for run in runs if attempts.given_up(run.dir, study.retries)}
    return StudyOutcome(
        finished=[str(run) for run in todo if ended.get(run.dir) == "finished"],
        skipped=[str(run) for run in runs if run.dir not in tried and run.finished],
        failed=failed,
        diverged=those("diverged"),
        given_up=[name for name in failed if name in again],
        unfinished=[
            str(run)
            for run in todo
            if run not in waiting and ended.get(run.dir, "unfinished") == "unfinished"
        ],
        waiting=[str(run) for run in waiting],
        ends={str(run): end for run in runs if not run.finished and (end := _end(run))},
    )


def _end(run: PlannedRun) -> str:
    """How a run stands that has not finished; "" for one that was never started."""
    step, failure = last_step(run.dir), read_json(run.dir / FAILURE)
    found = Run(run.dir, run.arm, run.seed, asdict(run.config), None, failure, step)
    return unfinished_text(found) if step or failure else ""


def hydra_compose() -> Compose:
    from zpp_lab.config.compose import compose  # Hydra is slow to import, and a report needs none

    return compose


def _intent(
    runs: Sequence[PlannedRun], todo: Sequence[PlannedRun], lost: Sequence[PlannedRun]
) -> str:
    again = sum((run.dir / FAILURE).exists() for run in todo)
    parts = [f"{len(runs)} runs", f"{len(runs) - len(todo) - len(lost)} finished already"]
    parts += [f"{again} failed and are repeated"] if again else []
    parts += [f"{len(lost)} diverged or failed for good (--retry)"] if lost else []
    return ", ".join(parts)


def _seeds(runs: Sequence[PlannedRun]) -> str:
    seeds: dict[str, list[str]] = {}
    for run in runs:
        seeds.setdefault(run.arm, []).append(str(run.seed))
    return "; ".join(f"{arm} seed {', '.join(own)}" for arm, own in seeds.items())
