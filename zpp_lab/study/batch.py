"""A study's runs through one of Hydra's launchers: Slurm (submitit), joblib, Ray.

Hydra's sweepers build products of settings. The runs of a study are a list, so this hands the
list to the launcher in a sweeper's place. How each run ended is read from its folder, as always.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from zpp_lab.compose import to_config
from zpp_lab.config import StudyConfig
from zpp_lab.hydra_words import quote
from zpp_lab.locks import hold
from zpp_lab.paths import conf_dir
from zpp_lab.runconfig import run_dir
from zpp_lab.study import attempts
from zpp_lab.study.outcome import ended_run, ending
from zpp_lab.study.plan import PlannedRun, overrides_of
from zpp_lab.study.progress import Progress
from zpp_lab.study.queue import Stop


class Batch:
    """Runs planned runs through the launcher named `launcher` and waits for all of them.

    ValueError, before anything is written, for one that cannot start."""

    def __init__(self, study: StudyConfig, root: Path, launcher: str, progress: Progress) -> None:
        self._study, self._root, self._launcher = study, root, launcher
        self._progress = progress
        self.outcomes: dict[Path, str] = {}
        check_launcher(launcher, root)

    def run(self, todo: Sequence[PlannedRun], stop: Stop) -> None:
        """Returns when every job has ended, or early when interrupted: jobs of a batch system
        then go on by themselves."""
        if not todo:
            return
        for run in todo:
            (run.dir / "failure.json").unlink(missing_ok=True)
        jobs = [overrides_of(self._study, run) for run in todo]
        try:
            with _interrupts(), _started(self._launcher, self._root) as launcher:
                fault = _launch(launcher, jobs)
        except KeyboardInterrupt:
            stop.request()
            return
        for run in todo:
            self._settle(run, fault)

    def _settle(self, run: PlannedRun, fault: str) -> None:
        run.dir.mkdir(parents=True, exist_ok=True)
        how = fault or "the job ended without a summary; see the launcher's logs"
        result = ended_run(run, 1, how=how)
        if result.outcome != "finished":
            attempts.note(run.dir, result.failure or {"outcome": result.outcome})
        self.outcomes[run.dir] = result.outcome
        self._progress.ended(run, ending(result))


def check_launcher(name: str, root: Path) -> None:
    """ValueError for a launcher of Hydra's that cannot start. Nothing is written."""
    with _started(name, root):
        pass


@contextmanager
def _started(name: str, root: Path) -> Iterator[Launcher]:
    words = [f"hydra/launcher={name}", f"hydra.sweep.dir={quote(str(root))}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="zpp_lab"):
        main = GlobalHydra.instance().hydra
        assert main is not None
        try:
            config = main.compose_config("config", words, run_mode=RunMode.MULTIRUN)
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=HydraContext(main.config_loader, Callbacks(config)),
                task_function=task,
                config=config,
            )
        except (HydraException, ImportError) as error:
            raise ValueError(
                f"Hydra's launcher {name!r} cannot start; is its package installed "
                f"(slurm: pip install 'zpp_lab[slurm]')? {_reason(error)}"
            ) from None
        yield launcher


def _reason(error: Exception) -> str:
    """In one line, without the list of places where Hydra has looked."""
    return " ".join(str(error).partition("\nConfig search path")[0].split())


def _launch(launcher: Launcher, jobs: Sequence[Sequence[str]]) -> str:
    """What went wrong beside the runs themselves, or nothing."""
    try:
        launcher.launch(jobs, initial_job_idx=0)
    except Exception as error:  # a job that the batch system lost; the others have ended
        return f"{type(error).__name__}: {error}"
    return ""


def task(composed: DictConfig) -> None:
    """One job. A second one of the same run waits here and then finds it finished."""
    from zpp_lab.launcher import train

    config = to_config(composed)
    folder = run_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        train(config)


@contextmanager
def _interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt here: a launcher's wait is not ours to poll."""
    both = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, signal.default_int_handler) for number in both}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
