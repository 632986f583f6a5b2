"""The runs of a study before any of them starts: their configs, folders and states.

All configs are composed first, so a typo in the last arm fails before the first run starts. They
are compared as flat dotted keys, by the trainer's own rule of what may differ on resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from zpp_lab.config.flat import differing, every_setting, flat_config, is_free
from zpp_lab.config.load import quote, setting_of
from zpp_lab.config.model import LoraConfig
from zpp_lab.config.schema import STUDY_HELDOUT, Config, TrainConfig
from zpp_lab.config.study import PREPARE, ArmConfig, PrepareConfig, StudyConfig
from zpp_lab.files import CONFIG, SUMMARY, write_atomic
from zpp_lab.runs.reader import read_run, read_study
from zpp_lab.runs.wandb.mode import resolve
from zpp_lab.train.inputs import check_branch, check_inputs, check_recipe, planned
from zpp_lab.train.launch.gpus import visible_gpus

Compose = Callable[[list[str]], Config]
_GIVEN = {  # settings that each run gets from its study → how to say them
    "seed": "use --seeds 1,2,3, or `seeds` of its file (`seed` of a prepared run)",
    "run.dir": "set the study's folder with --dir",
    "run.study": "leave it out",
    "run.arm": "leave it out",
}


def differences(
    one: Config | Mapping[str, Any], other: Config | Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return key → (value in one, value in other) where they differ and change numbers."""
    a, b = flat_config(one), flat_config(other)
    return {key: (a.get(key), b.get(key)) for key in differing(a, b)}


def fingerprint(config: Config) -> str:
    """Return the settings that change numbers, apart from the seed and the recipe's name, as one
    text: two arms with the same one would train the same."""
    own = ("seed", "recipe.name")
    chosen = {k: v for k, v in flat_config(config).items() if k not in own and not is_free(k)}
    return json.dumps(chosen, sort_keys=True, default=str)


def matching(study: StudyConfig, patterns: Sequence[str]) -> list[str]:
    """Return the names of arms that match `patterns`; ValueError if one matches none."""
    names = [arm.name for arm in study.arms]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--arms {pattern}: unknown arm; valid names: {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def some_arms(study: StudyConfig, patterns: Sequence[str]) -> StudyConfig:
    """Return the study with the arms that match, the arms that these are compared with, its
    baseline, and the composites that have all their arms."""
    wanted = matching(study, patterns)
    names = {study.baseline, *wanted}
    names |= {base for arm in study.arms if arm.name in wanted for base in study.bases(arm)}
    whole = [c for c in study.composites if names >= {a.name for a in chain(*study.members(c))}]
    arms = [arm for arm in study.arms if arm.name in names]
    return replace(study, arms=arms, composites=whole)


def heldout_default(
    study: StudyConfig, root: Path, compose: Compose, slurm: bool = False
) -> StudyConfig:
    """Return the study with STUDY_HELDOUT held-out tokens where its runs have GPUs (of this
    machine, or `slurm`'s) and nothing says how many: neither its words nor an experiment's file.
    One that has begun in `root` goes on with what it began with, on any machine. ValueError when
    `root` holds something else."""
    check_folder(study, root)
    words = [*study.overrides, *(word for arm in study.arms for word in arm.overrides)]
    if any(setting_of(word) == "train.eval_tokens" for word in words):
        return study
    more = f"train.eval_tokens={STUDY_HELDOUT}"
    begun = read_study(root)
    if begun is not None:
        taken = more in begun.overrides
    else:
        base = next(arm for arm in study.arms if arm.name == study.baseline)
        try:
            config = compose([*study.overrides, *base.overrides])
        except ValueError:  # the planner says whose
            return study
        unsaid = config.train.eval_tokens == TrainConfig.eval_tokens
        gpus = config.engine.device != "cpu" and (slurm or bool(visible_gpus(os.environ)))
        taken = unsaid and gpus
    return replace(study, overrides=[*study.overrides, more]) if taken else study


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed, its folder and config; `prepares`: a run before the arms."""

    arm: str
    seed: int
    dir: Path
    config: Config
    prepares: bool = False

    def __str__(self) -> str:
        return f"{PREPARE} {self.arm}" if self.prepares else f"{self.arm} seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.dir / SUMMARY).exists()


class Planner:
    """Plans runs of one study below one folder; an arm's config is composed once.

    Raises ValueError, naming the arm, for a config that does not compose, for two arms that
    are the same, and for a folder that holds another study.
    """

    def __init__(self, study: StudyConfig, root: Path, compose: Compose) -> None:
        self.study, self.root = study, root
        study.check_folders()
        check_folder(study, root)
        faults: dict[str, list[str]] = {}
        self._configs: dict[str, Config] = {}
        self._first: list[PlannedRun] = []
        for arm in study.arms:
            try:
                self._configs[arm.name] = self._compose(arm, compose)
            except ValueError as error:
                faults.setdefault(str(error), []).append(f"arm {arm.name}")
        for one in study.prepare:
            try:
                _check_own([*self.study.overrides, *one.overrides])
                folder = self.root / PREPARE / one.name
                config = compose(prepare_overrides(self.study, one, folder))
                self._first.append(PlannedRun(one.name, one.seed, folder, config, prepares=True))
            except ValueError as error:
                faults.setdefault(str(error), []).append(f"{PREPARE} {one.name}")
        if faults:
            raise ValueError("\n".join(self._told(*fault) for fault in faults.items()))
        _check_different(study, self._configs)
        _check_order_controls(study, self._configs)
        _check_points(study, self._configs)

    def _told(self, error: str, whose: Sequence[str]) -> str:
        """One line for a fault, however many arms have it."""
        every = len(whose) > 1 and len(whose) == len(self.study.arms) + len(self.study.prepare)
        return f"study {self.study.name}, {'every arm' if every else ', '.join(whose)}: {error}"

    def first(self, arms: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[PlannedRun]:
        """Return the runs of these arms and seeds (empty: all of the study's), after those that
        must have finished before any arm starts. ValueError as for `plan`, and for an unknown
        arm."""
        names = [arm.name for arm in self.study.arms]
        unknown = [arm for arm in arms if arm not in names]
        if unknown:
            raise ValueError(
                f"study {self.study.name}: unknown arm {unknown[0]!r}; valid names: "
                f"{', '.join(names)}"
            )
        _check_settings(self._first)
        return [*self._first, *self.plan(dict.fromkeys(arms or names, seeds or self.study.seeds))]

    def plan(self, seeds: Mapping[str, Iterable[int]]) -> list[PlannedRun]:
        """Return the runs of these seeds by arm, in the order they should start: baselines first,
        then the arms seed by seed. ValueError when a folder holds other settings."""
        bases = baselines(self.study)
        pairs = [(arm.name, seed) for arm in self.study.arms for seed in seeds.get(arm.name, ())]
        order = sorted(pairs, key=lambda pair: 0 if pair[0] in bases else pair[1])
        runs = [self._run(arm, seed) for arm, seed in order]
        _check_settings(runs)
        return runs

    def _compose(self, arm: ArmConfig, compose: Compose) -> Config:
        _check_own([*self.study.overrides, *arm.overrides])
        seed = self.study.seeds[0]
        return compose(run_overrides(self.study, arm, seed, run_folder(self.root, arm.name, seed)))

    def _run(self, arm: str, seed: int) -> PlannedRun:
        folder, config = run_folder(self.root, arm, seed), self._configs[arm]
        config = replace(config, seed=seed, run=replace(config.run, dir=str(folder)))
        return PlannedRun(arm, seed, folder, config)


def baselines(study: StudyConfig) -> set[str]:
    """Return the arms that others are compared with."""
    return {study.baseline} | {a.name for a in study.arms if a.role.startswith("baseline")}


def run_folder(root: Path, arm: str, seed: int) -> Path:
    return root / arm / f"seed{seed}"


def run_overrides(study: StudyConfig, arm: ArmConfig, seed: int, folder: Path) -> list[str]:
    """Return the Hydra overrides of one run; the same as in the report's commands."""
    start = arm.start or next((one.name for one in study.prepare), None)
    before = folder.parents[1] / PREPARE / str(start)
    return [
        *study.overrides,
        *([f"model.start={quote(str(before))}", *study.start_overrides] if start else []),
        *arm.overrides,
        f"seed={seed}",
        *_place(study, arm.name, folder),
    ]


def prepare_overrides(study: StudyConfig, one: PrepareConfig, folder: Path) -> list[str]:
    """Return the Hydra overrides of a run before the arms."""
    place = _place(study, one.name, folder)
    return [*study.overrides, *one.overrides, f"seed={one.seed}", *place]


def overrides_of(study: StudyConfig, run: PlannedRun) -> list[str]:
    """Return the Hydra overrides of a planned run."""
    if run.prepares:
        one = next(p for p in study.prepare if p.name == run.arm)
        return prepare_overrides(study, one, run.dir)
    arm = next(a for a in study.arms if a.name == run.arm)
    return run_overrides(study, arm, run.seed, run.dir)


def _place(study: StudyConfig, name: str, folder: Path) -> list[str]:
    place = {"run.dir": str(folder), "run.study": study.name, "run.arm": name}
    return [f"{key}={quote(value)}" for key, value in place.items()]


def _check_own(overrides: Sequence[str]) -> None:
    """ValueError for a setting that the study gives each run itself, so that this one is lost."""
    for override in overrides:
        instead = _GIVEN.get(setting_of(override))
        if instead:
            raise ValueError(
                f"{override}: a study sets {setting_of(override)} for each run; {instead}"
            )


def write_config(run: PlannedRun) -> None:
    """Write config.yaml where a run died too early to do it."""
    path = run.dir / CONFIG
    if not path.exists():
        write_atomic(path, yaml.safe_dump(every_setting(run.config), sort_keys=False))


def check_folder(study: StudyConfig, root: Path) -> None:
    """Raise ValueError when `root` holds the runs of another study, or is no folder."""
    nearest = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file: set a folder with --dir")
    if (root / CONFIG).is_file():
        raise ValueError(f"{root} holds a single run: set another folder with --dir")
    there = read_study(root)
    if there is not None and there.name != study.name:
        raise ValueError(
            f"{root} holds the study {there.name!r}, not {study.name!r}: use another --dir"
        )


def _check_different(study: StudyConfig, configs: Mapping[str, Config]) -> None:
    """A grid with a typo makes the same arm twice; a report would then compare it with itself.
    Two baselines, each of which has its own arms, may become one by a setting for all."""
    bases = {study.baseline} | {arm.name for arm in study.arms if arm.role == "baseline"}
    seen: dict[str, str] = {}
    for name, config in configs.items():
        other = seen.setdefault(fingerprint(config), name)
        if other != name and not {other, name} <= bases:
            raise ValueError(
                f"study {study.name}: arms {other} and {name} have the same settings; check their "
                "overrides and factors, or remove one"
            )


def _check_order_controls(study: StudyConfig, configs: Mapping[str, Config]) -> None:
    """A reversed sum of two ranks is the same sum, and micro-steps draw windows of their own: both
    are no control, and no repeat."""
    for arm in study.arms:
        config, base = (configs[name] for name in (arm.name, arm.against or study.baseline))
        cluster, recipe = config.cluster.dp, config.recipe
        terms = max(cluster.nodes, cluster.gpus_per_node) if recipe.two_hops else cluster.world
        if arm.role not in ("order_control", "baseline_repeat"):
            continue
        same = config.train.micro_steps == base.train.micro_steps
        if not (same or config.data.has_records or config.data.draw_ranks):
            raise ValueError(
                f"study {study.name}, arm {arm.name}: with other train.micro_steps this {arm.role} "
                "reads other sequences than its baseline: set in the study "
                f"data.draw_ranks={base.cluster.readers}"
            )
        if recipe.order == "reversed" and terms <= 2 and same:
            raise ValueError(
                f"study {study.name}, arm {arm.name}: a sum of {terms} ranks is the same in both "
                f"orders, so this {arm.role} cannot differ from its baseline; halve "
                "train.batch_size and double train.micro_steps in it, with its baseline's recipe"
            )


def _check_points(study: StudyConfig, configs: Mapping[str, Config]) -> None:
    """Points count success: only task=rl has it, and a learned reward does not define it."""
    for name, config in configs.items():
        where = f"study {study.name}, arm {name}"
        if (study.points is None) == (config.task == "rl"):
            fix = "leave points out" if study.points else "set points in the study, such as 5"
            raise ValueError(f"{where}: points={study.points} with task={config.task}: {fix}")
        if study.points is not None and config.rl.notes:
            raise ValueError(f"{where}: {'; '.join(config.rl.notes)}")


def _check_settings(runs: Sequence[PlannedRun]) -> None:
    """ValueError when folders were run with other settings; those that differ alike at once."""
    alike: dict[str, list[PlannedRun]] = {}
    for run in runs:
        if (run.dir / CONFIG).exists():
            differing = differences(read_run(run.dir).config, run.config)
            shown = ", ".join(f"{k} (there {a!r}, now {b!r})" for k, (a, b) in differing.items())
            alike.setdefault(shown, []).append(run)
    alike.pop("", None)
    if alike:
        raise ValueError("\n".join(_conflict(*fault) for fault in alike.items()))


def _conflict(shown: str, runs: Sequence[PlannedRun]) -> str:
    holds, it = f"{runs[0].dir} holds a run", "that folder to run it"
    if len(runs) > 1:
        holds = f"{runs[0].dir} and {len(runs) - 1} folders more hold runs"
        it = "those folders to run them"
    return (
        f"{holds} with other settings: {shown}. Delete {it} again, or set another folder with --dir"
    )


def check_runs(study: StudyConfig, runs: Sequence[PlannedRun], here: bool = True) -> None:
    """Raise ValueError for what would end runs that have not finished before their first step:
    once, before the first of them starts. What a run of the study itself prepares comes later.
    here: on this machine; elsewhere other files may be there."""
    if here and runs:
        resolve(runs[0].config.tracking.wandb)
    prepared = {str(run.dir): run.config for run in runs if run.prepares}
    faults: dict[str, dict[str, None]] = {}
    for run in runs:
        try:
            if not run.finished:
                _check_run(run.config, prepared, here)
        except ValueError as error:
            faults.setdefault(str(error), {})[run.arm] = None
    if faults:
        lines = [f"study {study.name}, {', '.join(arms)}: {text}" for text, arms in faults.items()]
        raise ValueError("\n".join(lines))


def _check_run(config: Config, prepared: Mapping[str, Config], here: bool) -> None:
    read, base = config, prepared.get(config.model.start or "")
    if base is not None:
        _check_base_run(config, base)
        own = replace(config.model, start=None, start_optimizer=False, lora=LoraConfig())
        read = replace(config, model=own)
    if here:
        check_inputs(read)
    check_recipe(config)
    if here or config.model.name == "llama":
        planned(config)


def _check_base_run(config: Config, base: Config) -> None:
    """ValueError where a run cannot start from a prepared one, as that is planned."""
    if not base.train.keep_checkpoints:
        raise ValueError(
            f"it starts from {PREPARE} {base.run.arm}, which keeps no checkpoint: set "
            "train.keep_checkpoints=1 there"
        )
    if config.model.start_optimizer:
        if base.train.checkpoint_weights_only:
            raise ValueError(
                f"it loads the optimizer of {PREPARE} {base.run.arm}, which saves weights only: "
                "set train.checkpoint_weights_only=false there"
            )
        check_branch(config, base)


def notes(runs: Sequence[PlannedRun]) -> list[str]:
    """Return what a user must know of the runs' settings, once, with the arms that it is about."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for note in run.config.notes:
            found.setdefault(note, {})[f"{PREPARE} {run.arm}" if run.prepares else run.arm] = None
    return [f"{', '.join(whose)}: {note}" for note, whose in found.items()]


def to_do(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that have not finished; failed ones are among them."""
    return [run for run in runs if not run.finished]
