"""`zpp-lab train -m`: Hydra's multirun, with its sweepers and launchers.

Every job gets a run folder of its own below one sweep folder, named by what was swept, so that
`zpp-lab report` can group the seeds of an arm.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict

from zpp_lab.config.compose import (
    check_recipe_name,
    compose,
    explain,
    has_ended,
    own_files,
    to_config,
)
from zpp_lab.config.flat import arm_name, differing, flat_config
from zpp_lab.config.load import readable, setting_of, written
from zpp_lab.config.schema import Config
from zpp_lab.files import conf_dir, conf_names, listed_names
from zpp_lab.study.run.batch import check_sbatch, hydra_settings, jobs_of
from zpp_lab.study.run.progress import Countdown
from zpp_lab.train.launch.place import placed
from zpp_lab.train.time_slice import PAUSED, UNFINISHED


def multirun(overrides: list[str]) -> int:
    """Run Hydra's multirun over `overrides`; returns 0, or raises what a job raised: ValueError
    with the valid names where it is an override."""
    overrides = _placed(overrides)
    by = hydra_settings([*own_files(), *overrides])
    drawn = by.sweeper.get("params") or {}
    varying = _check_each(overrides) | {setting_of(f"{name}=") for name in drawn}
    countdown = _countdown(overrides, by)

    def job(composed: DictConfig) -> float:
        return _job(composed, varying, countdown)

    try:
        _check_names(overrides)
        overrides += _slurm_words(overrides)
        fixed = [o.split("=")[0].lstrip("+~") for o in overrides if not _swept(o)]
        exclude = ",".join(["seed", "run.dir", *fixed])
        named = f"hydra.job.config.override_dirname.exclude_keys=[{exclude}]"
        by_hydra(job, "--multirun", *overrides, named)
    except HydraException as error:
        raise ValueError(explain(error, overrides)) from None
    except BaseException:
        # the folder's name has the time in it, so the command alone would begin another sweep
        if Path(folder := _sweep_dir(overrides)).is_dir():
            word = shlex.quote(f"hydra.sweep.dir={written(str(Path(folder)))}")
            text = f"the same command with {word} resumes this sweep"
            print(f"{text}; finished runs are not repeated", file=sys.stderr)
        raise
    print(f"the verdicts of this sweep: zpp-lab report {_sweep_dir(overrides)}")
    return 0


def by_hydra(task: Callable[[DictConfig], object], *words: str) -> None:
    """Run Hydra's own command with these words and the files of --config-dir."""
    with _command_line("zpp-lab train", *words, *own_files()):
        main = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
        main(task)()


def show(overrides: list[str], *flags: str) -> None:
    """Print what Hydra's own --cfg and --info print of these settings."""
    compose(overrides)  # a mistake in our words
    by_hydra(lambda _: None, *flags, *map(readable, overrides))


@dataclass(frozen=True)
class Sweep:
    """What `zpp-lab train -m` would start. drawn: by which sweeper, and how many, where that draws
    them as it goes, so that no run is known before; launcher: of Hydra, with its settings."""

    folder: Path
    runs: Sequence[Config]
    drawn: str | None = None
    launcher: str | None = None
    settings: Sequence[str] = ()


def planned_sweep(overrides: list[str]) -> Sweep:
    """Return the runs of `zpp-lab train -m`, in their order. ValueError for what that refuses
    before its first run; nothing is started or written."""
    overrides = _placed(overrides)
    varying = _check_each(overrides)
    _check_names(overrides)
    by = hydra_settings([*own_files(), *overrides])
    sweeper, launcher = (by.runtime.choices[f"hydra/{name}"] for name in ("sweeper", "launcher"))
    own = _own(overrides)
    params = by.sweeper.get("params") or {}
    own = [*(_without_glob(f"{name}={value}") for name, value in params.items()), *own]
    parsed = [OverridesParser.create().parse_override(word) for word in own]
    drawn = sweeper != "basic"
    if drawn:
        jobs = [[word for of in map(_values, own) for word in of[:1]]]
    else:
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    fixed = {setting_of(word) for word in own if not _swept(word)}
    folder, runs = Path(_sweep_dir(overrides)), []
    for job in jobs:
        config = compose(list(job))
        swept = sorted(word for word in job if setting_of(word) not in {"seed", "run.dir", *fixed})
        name = ",".join(swept).replace("/", "_") or config.recipe.name
        place = config.run.dir or str(folder / name / f"seed{config.seed}")
        arm = config.run.arm or arm_name(config, varying)
        runs.append(replace(config, run=replace(config.run, dir=place, arm=arm)))
    lines = [word for word in overrides if setting_of(word).startswith("hydra.launcher.")]
    drawing = f"{sweeper}, {by.sweeper.get('n_trials', '?')} runs" if drawn else None
    return Sweep(folder, runs, drawing, None if launcher == "basic" else launcher, lines)


def _placed(overrides: list[str]) -> list[str]:
    """With the sweep's folder, written out because a job elsewhere has no such variable."""
    folder = os.environ.get("ZPP_SWEEP_DIR") or time.strftime("runs/sweep-%Y%m%d-%H%M%S")
    if not any(o.startswith("hydra.sweep.dir=") for o in overrides):
        overrides = [*overrides, f"hydra.sweep.dir={folder}"]
    return [_without_glob(readable(word)) for word in overrides]


def _without_glob(override: str) -> str:
    """`recipe=glob(w*)` with the names that it means, in place of Hydra, which does not see those
    of one's own conf/. Another override as it is."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # which says what is wrong when it is composed
    pattern = parsed.value()
    if not isinstance(pattern, Glob) or parsed.key_or_group.startswith("hydra"):
        return override
    name, _, text = override.partition("=")
    names = conf_names(parsed.key_or_group)
    if not names:
        raise ValueError(
            f"{override}: glob() works for groups of conf/ such as recipe, and {name} is none: "
            f"list its values, {name}=a,b"
        )
    found = pattern.filter(names)
    if not found:
        listed = listed_names(parsed.key_or_group, names)
        raise ValueError(f"{override}: {text} matches none of {listed}; use another pattern")
    return f"{name}={','.join(found)}"


def _slurm_words(overrides: list[str]) -> list[str]:
    """What Slurm's launcher gets of the jobs' nodes, GPUs and memory; [] for other launchers.
    ValueError where jobs need different things: a launcher has one set."""
    word = hydra_settings([*own_files(), *overrides]).runtime.choices["hydra/launcher"]
    if word == "basic":
        return []
    lines = [word for word in overrides if setting_of(word).startswith("hydra.launcher.")]
    own = _own(overrides)
    parsed = [OverridesParser.create().parse_override(word) for word in own]
    known = [one for one in parsed if not one.is_sweep_override() or one.is_discrete_sweep()]
    (jobs,) = BasicSweeper.split_arguments(known, None)
    kinds = dict.fromkeys(tuple(w for w in job if setting_of(w) != "seed") for job in jobs)
    runs = [(" ".join(job), compose(list(job))) for job in kinds]
    groups = jobs_of(word, Path(_sweep_dir(overrides)), lines, runs)
    if len(groups) > 1:
        one, other = (runs[group.places[0]][0] for group in groups[:2])
        raise ValueError(
            f"these jobs ask for different nodes, GPUs or memory of Slurm: {one}; {other}: sweep "
            "them in separate commands, or write a study"
        )
    if groups[0].words:
        check_sbatch(f"hydra/launcher={word}")
    return list(groups[0].words)


def _check_names(overrides: list[str]) -> None:
    """ValueError, before there is any folder, for a recipe's name that would be a bad one."""
    for word in overrides:
        if setting_of(word) == "recipe.name":
            one = OverridesParser.create().parse_override(word)
            swept = one.sweep_string_iterator() if one.is_sweep_override() else [one.value()]
            for name in swept:
                check_recipe_name(str(name).strip("'\""))


def _check_each(overrides: list[str]) -> set[str]:
    """The settings that differ between jobs, apart from the recipe's name. ValueError for a value
    that no job could have, before the first job. Each is looked at once, with the first values of
    what else is swept: all combinations would take too long."""
    own = _own(overrides)
    values = [_values(word) for word in own]
    first = [of[:1] for of in values]
    base = compose([word for of in first for word in of])
    varying = set()
    for i, (word, of) in enumerate(zip(own, values, strict=True)):
        if not of:
            varying.add(setting_of(word))
        for value in of[1:]:
            words = [*first[:i], [value], *first[i + 1 :]]
            try:
                other = compose([word for one in words for word in one])
            except ValueError as error:
                named = "" if value in str(error) else f"{value}: "
                raise ValueError(f"{named}{error}") from None
            if setting_of(word) not in ("recipe", "recipe.name"):  # an arm has the name itself
                varying.update(differing(flat_config(base), flat_config(other)))
    return varying


def _values(override: str) -> list[str]:
    """The values of an override, each as an override; none for an interval."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]  # which says what is wrong when it is composed
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        return []
    name = override.partition("=")[0]
    return [f"{name}={value}" for value in parsed.sweep_iterator(Transformer.encode)]


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """sys.argv as Hydra reads it; errors are raised here and do not take Hydra's own way out."""
    argv, sys.argv = sys.argv, [*words]
    full = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]


def _countdown(overrides: list[str], by: DictConfig) -> Countdown | None:
    """None where runs are other processes', or another rank says it."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    if by.runtime.choices["hydra/launcher"] != "basic" or (placed(os.environ) and rank != "0"):
        return None
    if by.runtime.choices["hydra/sweeper"] != "basic":
        return Countdown(by.sweeper.get("n_trials"))
    params = (by.sweeper.get("params") or {}).items()
    swept = [*(_without_glob(f"{name}={value}") for name, value in params), *_own(overrides)]
    return Countdown(math.prod(len(_values(word)) for word in swept))


def _own(overrides: list[str]) -> list[str]:
    """Without Hydra's own settings."""
    return [word for word in overrides if not setting_of(word).startswith(("hydra.", "hydra/"))]


def _job(composed: DictConfig, varying: set[str], countdown: Countdown | None) -> float:
    """One job; returns the held-out loss, for sweepers that optimize."""
    from zpp_lab.train.inputs import check_run
    from zpp_lab.train.launch.launcher import RankFailed, launch, leave, queue_again

    settings = HydraConfig.get()
    check_recipe_name(str(composed.recipe.name))
    name = settings.job.override_dirname.replace("/", "_") or str(composed.recipe.name)
    with open_dict(composed):
        folder = f"{settings.sweep.dir}/{name}/seed{composed.seed}"
        composed.run.dir = composed.run.dir or folder
        composed.run.arm = composed.run.arm or arm_name(to_config(composed), varying)
    config = to_config(composed)
    ended = has_ended(config)
    with countdown.run(ended) if countdown else nullcontext():
        if not ended:
            check_run(config)
        summary = launch(config)
    leave(at_exit=True)  # a rank that srun started has still to write down what this returns
    if why := queue_again(summary):
        raise RankFailed(why)
    if summary.get("outcome") == UNFINISHED:  # no other run of a sweep begins
        raise SystemExit(PAUSED)
    return float(summary.get("heldout_loss", math.nan))


def _sweep_dir(overrides: list[str]) -> str:
    """The folder of the last hydra.sweep.dir, without quotes."""
    named = [o.partition("=")[2] for o in overrides if o.startswith("hydra.sweep.dir=")]
    return named[-1].strip("'\"")


def _swept(override: str) -> bool:
    """Whether an override has several values: a=1,2 or a=range(3) or a=choice(x,y)."""
    parsed = OverridesParser.create().parse_override(override)
    return bool(parsed.is_sweep_override())
