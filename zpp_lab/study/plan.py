"""The runs of a study before any of them starts: their configs, folders and states.

All configs are composed first, so a typo in the last arm fails before the first
run starts, and a folder that holds other settings is never mixed with new ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from zpp_lab.config import ArmConfig, Config, StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study.runs import read_run
from zpp_lab.study.settings import differences

Compose = Callable[[list[str]], Config]
_FOLDER_NAME = re.compile(r"[\w.,+=-]+")


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed, its folder and its whole config."""

    arm: str
    seed: int
    dir: Path
    config: Config

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.dir / "summary.json").exists()


def plan_runs(study: StudyConfig, root: Path, compose: Compose) -> list[PlannedRun]:
    """Every run in the order it should start: the baseline's, then the arms seed by seed.

    Raises ValueError when a config does not compose or a folder holds other settings.
    """
    arms = sorted(study.arms, key=lambda arm: arm.name != study.baseline)
    pairs = [(arms[0], seed) for seed in study.seeds]
    pairs += [(arm, seed) for seed in study.seeds for arm in arms[1:]]
    runs = [_plan(study, arm, seed, root, compose) for arm, seed in pairs]
    faults = [fault for run in runs if (fault := _conflict(run))]
    if faults:
        raise ValueError("\n".join(faults))
    return runs


def run_overrides(study: StudyConfig, arm: ArmConfig, seed: int, folder: Path) -> list[str]:
    """The Hydra overrides of one run; the same as in the report's commands."""
    place = {"run.dir": str(folder), "run.study": study.name, "run.arm": arm.name}
    return [
        *study.overrides,
        *arm.overrides,
        f"seed={seed}",
        *(f"{key}={quote(value)}" for key, value in place.items()),
    ]


def quote(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


def write_config(run: PlannedRun) -> None:
    """Write config.yaml where a run died too early to do it."""
    path = run.dir / "config.yaml"
    if not path.exists():
        write_atomic(path, yaml.safe_dump(asdict(run.config), sort_keys=False))


def _plan(
    study: StudyConfig, arm: ArmConfig, seed: int, root: Path, compose: Compose
) -> PlannedRun:
    if not _FOLDER_NAME.fullmatch(arm.name) or arm.name in (".", ".."):
        raise ValueError(
            f"study {study.name}: arm {arm.name!r} names a folder; "
            "use letters, digits and _ . , + = -"
        )
    folder = root / arm.name / f"seed{seed}"
    try:
        config = compose(run_overrides(study, arm, seed, folder))
    except ValueError as error:
        raise ValueError(f"study {study.name}, arm {arm.name}: {error}") from None
    return PlannedRun(arm.name, seed, folder, config)


def _conflict(run: PlannedRun) -> str | None:
    """What to tell the user when the folder was run with other settings."""
    if not (run.dir / "config.yaml").exists():
        return None
    differing = differences(read_run(run.dir).config, run.config)
    if not differing:
        return None
    shown = ", ".join(f"{k} (there {a!r}, now {b!r})" for k, (a, b) in differing.items())
    return (
        f"{run.dir} holds a run with other settings: {shown}. "
        "Delete that folder to run it again, or give the study another folder with run.dir=…"
    )


def to_do(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs that have not finished; failed ones are among them."""
    return [run for run in runs if not run.finished]
