"""A study's runs through one of Hydra's launchers: Slurm (submitit), joblib, Ray.

Hydra's sweepers build products of settings, and a study's runs are a list, which is handed to the
launcher in a sweeper's place. How each run ended is read from its folder. A job asks Slurm for what
its run needs (`needs`); runs that need the same share a launcher, and a job array.
"""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from zpp_lab.config.compose import PLUGINS, explain, own_files, to_config
from zpp_lab.config.load import quote, setting_of, written
from zpp_lab.config.schema import Config, RunConfig
from zpp_lab.config.study import StudyConfig
from zpp_lab.files import FAILURE, conf_dir
from zpp_lab.study.run import attempts
from zpp_lab.study.run.attempts import ended_run, ending
from zpp_lab.study.run.plan import PlannedRun, overrides_of
from zpp_lab.study.run.progress import Progress
from zpp_lab.study.run.queue import Stop
from zpp_lab.train.memory.forecast import host_bytes

_CPUS = 8  # of a process, where engine.threads does not say
_PROCESS_GB = 8  # host memory of a process: torch, CUDA's context, the text
_OF_A_TASK = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"  # else Slurm 22.05 binds it to one
_STEP_GB = 8  # memory is asked for in such steps, so that arms that hardly differ ask alike
_SLURM = "SlurmLauncher"
_FIXED = ("nodes", "tasks_per_node", "gpus_per_node")  # what a run is made for
_FLAGS = {  # of sbatch, which additional_parameters can hold
    *("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres"),
    *("mem", "mem-per-cpu", "mem-per-gpu"),
}
_OTHERS = {  # settings of the launcher that say the same in another way → which one is the same
    "gpus_per_task": "gpus_per_node",
    "mem_per_gpu": "mem_gb",
    "mem_per_cpu": "mem_gb",
    "cpus_per_gpu": "cpus_per_task",
}


@dataclass(frozen=True)
class Needs:
    """What a run asks of Slurm. gpus_per_node: 0 for none; mem_gb of a node: 0 for all of it."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    mem_gb: int


@dataclass(frozen=True)
class Jobs:
    """Jobs that ask for the same: which of them, and the launcher's settings that say so."""

    places: Sequence[int]
    words: Sequence[str] = ()


class Batch:
    """Runs planned runs through the launcher named `launcher` and waits for all of them.

    settings: overrides of hydra.launcher. `check_batch` comes first."""

    def __init__(
        self,
        study: StudyConfig,
        root: Path,
        launcher: str,
        settings: Sequence[str],
        progress: Progress,
    ) -> None:
        self._study, self._root, self._launcher = study, root, launcher
        self._settings, self._progress = settings, progress
        self.outcomes: dict[Path, str] = {}

    def run(self, todo: Sequence[PlannedRun], stop: Stop) -> None:
        """Run the jobs and wait for all; when interrupted, Slurm's continue."""
        if not todo:
            return
        for run in todo:
            (run.dir / FAILURE).unlink(missing_ok=True)
        words = [overrides_of(self._study, run) for run in todo]
        groups = jobs_of(self._launcher, self._root, self._settings, _named(todo))
        lines = [[*self._settings, *group.words] for group in groups]
        try:
            with _interrupts(), _started(self._launcher, self._root, lines) as launchers:
                work = [[words[i] for i in group.places] for group in groups]
                faults = _launch(launchers, work)
        except KeyboardInterrupt:
            stop.request()
            return
        for group, fault in zip(groups, faults, strict=True):
            for place in group.places:
                self._settle(todo[place], fault)

    def _settle(self, run: PlannedRun, fault: str) -> None:
        run.dir.mkdir(parents=True, exist_ok=True)
        how = fault or "the job ended without a summary; see the launcher's logs"
        result = ended_run(run, 1, how=how)
        if result.outcome != "finished":
            attempts.note(run.dir, result.failure or {"outcome": result.outcome})
        self.outcomes[run.dir] = result.outcome
        self._progress.ended(run, ending(result))


def check_batch(name: str, root: Path, settings: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    """Raise ValueError for a launcher that cannot start here or lacks what a run needs."""
    if check_launcher(name, root, settings, runs):
        check_sbatch(f"--launcher {name}", " (--dry-run shows their headers anywhere)")


def check_sbatch(asked: str, more: str = "") -> None:
    """Raise ValueError, beginning with `asked`, where Slurm's sbatch is not found."""
    if shutil.which("sbatch") is None:
        raise ValueError(
            f"{asked}: sbatch not found; start this on a node that submits jobs to Slurm{more}"
        )


def check_launcher(
    name: str, root: Path, settings: Sequence[str], runs: Sequence[PlannedRun]
) -> list[tuple[list[str], str]]:
    """Return (the arms, the header of their batch script) for each kind of job that Slurm gets; []
    for another launcher of Hydra's. ValueError for one that cannot start. Nothing is written."""
    headers = []
    for group in jobs_of(name, root, settings, _named(runs)):
        config = _composed(name, root, [*settings, *group.words])
        if _is_slurm(config):
            whose = dict.fromkeys(str(runs[i]).partition(" seed ")[0] for i in group.places)
            headers.append((list(whose), _header(config, len(group.places))))
    return headers


def _named(runs: Sequence[PlannedRun]) -> list[tuple[str, Config]]:
    return [(str(run), run.config) for run in runs]


# ---------------------------------------------------------------------- what a job asks for


def jobs_of(
    name: str, root: Path, settings: Sequence[str], runs: Sequence[tuple[str, Config]]
) -> list[Jobs]:
    """Return the runs, each with what to call it, by what they ask of the launcher `name`, with
    `settings`. One group where it is not Slurm's. ValueError where these ask for something else."""
    for word in settings:
        if not setting_of(word).startswith("hydra.launcher."):
            raise ValueError(
                f"{word}: only Hydra's settings hydra.launcher.… are read; leave it out"
            )
    own = _composed(name, root, settings)
    if not _is_slurm(own):
        return [Jobs(range(len(runs)))]
    found = _settings_of(own)
    groups: dict[tuple[str, ...], list[int]] = {}
    known: dict[str, tuple[str, ...]] = {}  # runs that differ in their seed ask alike
    for place, (run, config) in enumerate(runs):
        key = repr(replace(config, seed=0, run=RunConfig()))
        if key not in known:
            try:
                known[key] = tuple(_words(found, needs(config), config))
            except ValueError as error:
                raise ValueError(f"{run}: {error}") from None
        groups.setdefault(known[key], []).append(place)
    return [Jobs(places, words) for words, places in groups.items()]


def needs(config: Config) -> Needs:
    """Return a process for every rank of a real engine, on its node; else one with one GPU. Nodes
    that share GPUs are one, where one task starts the ranks itself. Memory is what the plan knows,
    twice for engine=virtual, of which it does not know all; with engine=deepspeed all of a node's.
    """
    engine, cluster = config.engine, config.cluster
    own_tasks = engine.ranked and engine.share_gpus is None
    nodes = cluster.nodes if own_tasks else 1
    ranks = cluster.world // nodes if engine.ranked else 1  # on a node
    gpus = 0 if engine.device == "cpu" else cluster.gpus_per_node if engine.ranked else 1
    tasks = ranks if own_tasks else 1
    held = host_bytes(config)
    memory = 0 if held is None else ranks * (_PROCESS_GB + held / 1e9)
    return Needs(
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=(engine.threads or _CPUS) * (ranks // tasks),
        mem_gb=-int(-memory // _STEP_GB) * _STEP_GB,
    )


def _words(own: Mapping[str, Any], need: Needs, config: Config) -> list[str]:
    """Overrides for what the launcher lacks. ValueError where it has too little or, of
    nodes, tasks and GPUs, another number; fewer CPUs or more memory are the user's choice."""
    words, taken = [], {_OTHERS[name] for name in _OTHERS if own.get(name)}
    more = {
        str(k).replace("_", "-"): v for k, v in (own.get("additional_parameters") or {}).items()
    }
    if own.get("gpus_per_task") or more.keys() & _FLAGS:
        raise ValueError(
            "hydra.launcher.gpus_per_task, and nodes, tasks, GPUs or memory in "
            "additional_parameters are ignored: leave them out, they follow from the run"
        )
    # GPUs in a request such as gpu:h100:4
    if found := re.findall(r"(?:^|,)gpu(?::[\w-]+)?(?::(\d+))?(?=,|$)", own.get("gres") or ""):
        taken.add("gpus_per_node")
        gpus = sum(int(count or 1) for count in found)
        _check("gres", own["gres"], gpus, need.gpus_per_node, config)
    for name, value in asdict(need).items():
        given = own.get(name)
        if given:
            wanted = max(given, value) if name == "mem_gb" else value
            if name in (*_FIXED, "mem_gb"):
                _check(name, given, given, wanted, config)
        elif name not in taken:
            none = name == "gpus_per_node" and value == 0
            words.append(f"hydra.launcher.{name}={'null' if none else value}")
    if "cpus_per_task" not in taken:
        lines = [*(own.get("setup") or ()), _OF_A_TASK]
        words.append(f"hydra.launcher.setup={written(lines)}")
    if need.nodes * need.tasks_per_node > 1:
        words += _in_blocks(more.get("distribution"))
    return words


def _in_blocks(given: object) -> list[str]:
    """Overrides by which rank r sits on node r // gpus_per_node. ValueError where it would not."""
    if given is None:
        return ["++hydra.launcher.additional_parameters.distribution=block"]
    if re.split("[:,]", str(given))[0] != "block":  # the first word is on nodes
        raise ValueError(
            f"hydra.launcher.additional_parameters.distribution={given}, but ranks must fill one "
            "node after the other: leave it out, or let it begin with block"
        )
    return []


def _check(name: str, given: object, number: int, wanted: int, config: Config) -> None:
    if number != wanted:
        cluster = config.cluster
        unset = "0" if name in ("nodes", "tasks_per_node") else "null"
        raise ValueError(
            f"hydra.launcher.{name}={given}, but engine={config.engine.name} on cluster "
            f"{cluster.nodes}x{cluster.gpus_per_node} needs {wanted}; with {unset} it follows from "
            "the run (conf/hydra/launcher)"
        )


def _is_slurm(composed: DictConfig) -> bool:
    return str(composed.hydra.launcher.get("_target_")).endswith(f".{_SLURM}")


def _settings_of(composed: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(composed.hydra.launcher, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _header(composed: DictConfig, count: int) -> str:
    """The #SBATCH lines of so many jobs, as submitit writes them."""
    from submitit.slurm import slurm

    found = _settings_of(composed)
    own = ("_target_", "submitit_folder", "max_num_timeout")
    names = {str(k): str(v) for k, v in slurm.SlurmExecutor._equivalence_dict().items()}
    given = {k: v for k, v in found.items() if k not in own and v is not None}
    settings: dict[str, Any] = {names.get(k, k): v for k, v in given.items()}
    if "mem" in settings:
        settings["mem"] = f"{settings['mem']}GB"
    if count > 1:
        settings["map_count"] = count
    script = slurm._make_sbatch_string("", found["submitit_folder"], **settings)
    return "\n".join(line for line in script.splitlines() if line.startswith("#SBATCH"))


# ---------------------------------------------------------------------- launchers


@contextmanager
def _hydra() -> Iterator[Any]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="zpp_lab"):
        main = GlobalHydra.instance().hydra
        assert main is not None
        yield main


def hydra_settings(words: Sequence[str]) -> DictConfig:
    """Return Hydra's own settings of a multirun with these words: its launcher, sweeper and what
    their settings. ValueError as `compose`'s."""
    with _hydra() as main:
        try:
            composed = main.compose_config("config", list(words), run_mode=RunMode.MULTIRUN)
        except HydraException as error:
            raise ValueError(explain(error, list(words))) from None
        except (AssertionError, AttributeError):  # omegaconf's, where no file has these
            where = "hydra.sweeper.params"
            word = next((w for w in words if setting_of(w).startswith(where)), None)
            if word is None:
                raise
            raise ValueError(
                f"{word}: {where} can be changed only where a file of --config-dir sets it: sweep "
                "over the setting itself, such as train.lr=0.1,0.2"
            ) from None
    return composed.hydra


def _composed(name: str, root: Path, settings: Sequence[str]) -> DictConfig:
    """Hydra's config of a multirun with this launcher, which can start."""
    with _hydra() as main:
        return _instance(main, name, root, settings)[1]


def _instance(
    main: Any, name: str, root: Path, settings: Sequence[str]
) -> tuple[Launcher, DictConfig]:
    try:
        folder = f"hydra.sweep.dir={quote(str(root))}"
        words = [*own_files(), f"hydra/launcher={name}", folder, *settings]
        config = main.compose_config("config", words, run_mode=RunMode.MULTIRUN)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(main.config_loader, Callbacks(config)),
            task_function=task,
            config=config,
        )
    except (HydraException, ImportError) as error:
        if settings and "Could not override" in str(error):
            named = (k for k in map(setting_of, settings) if f"'{k}'" in str(error))
            raise ValueError(
                f"{next(named, settings[0])}: Hydra's launcher {name!r} does not have this "
                "setting; see conf/hydra/launcher"
            ) from None
        extras = {"slurm": "slurm"} | {k.rpartition("/")[2]: v for k, v in PLUGINS.items()}
        fix = f": pip install 'zpp_lab[{extras[name]}]'" if name in extras else ""
        raise ValueError(
            f"Hydra's launcher {name!r} cannot start; install its package{fix}: {_reason(error)}"
        ) from None
    return launcher, config


@contextmanager
def _started(name: str, root: Path, each: Sequence[Sequence[str]]) -> Iterator[list[Launcher]]:
    """A launcher for each of these settings."""
    with _hydra() as main:
        yield [_instance(main, name, root, settings)[0] for settings in each]


def _reason(error: Exception) -> str:
    """In one line, without the list of places where Hydra has looked."""
    return " ".join(str(error).partition("\nConfig search path")[0].split())


def _launch(launchers: Sequence[Launcher], work: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Errors of each launcher besides its runs'; "" for none. Several wait in parallel."""
    faults, first = [""] * len(launchers), 0
    threads = []

    def launch(number: int, first: int) -> None:
        try:
            launchers[number].launch(work[number], initial_job_idx=first)
        except Exception as error:  # a job that the batch system lost; the others have ended
            faults[number] = f"{type(error).__name__}: {error}"

    for number, jobs in enumerate(work):
        if len(work) == 1:
            launch(number, first)
        else:
            threads.append(threading.Thread(target=launch, args=(number, first), daemon=True))
            threads[-1].start()
        first += len(jobs)
    for thread in threads:
        thread.join()
    return faults


def task(composed: DictConfig) -> None:
    """Run one job, or one rank of it. A second one of the same run waits and finds it finished."""
    from zpp_lab.train.launch.launcher import job

    job(to_config(composed))


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
