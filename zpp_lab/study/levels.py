"""Which settings a study sweeps, and each arm's levels of them.

An arm's own `factors` decide. Where a study says none, they are the settings in which the arms'
configs differ; settings that always change together are one factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zpp_lab.config import Level
from zpp_lab.runconfig import flat_config
from zpp_lab.study.controls import EXPECTED
from zpp_lab.study.verdict import ArmResult, StudyResult

_NOT_FACTORS = ("seed", "recipe.name", "model.preset", "data.cache_dir")
_NOT_GROUPS = ("run.", "tracking.", "engine.")


@dataclass(frozen=True)
class Cell:
    """One arm's place in the grid: its level of each factor, and its gaps by seed (nats)."""

    arm: str
    levels: Mapping[str, Level]
    gaps: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.gaps.values())


def cells_of(result: StudyResult) -> list[Cell]:
    """Every arm with a gap and levels; the baseline, whose gap is 0, among them."""
    arms = [arm for arm in result.arms if arm.arm.role not in EXPECTED]
    told = {arm.name: arm.arm.factors for arm in arms if arm.arm.factors}
    levels: Mapping[str, Mapping[str, Level]] = told or _levels_from_configs(arms)
    cells = []
    for arm in arms:
        if arm.gaps and levels.get(arm.name):
            cells.append(Cell(arm.name, dict(levels[arm.name]), arm.gaps))
    return cells


def level_order(levels: Iterable[Any]) -> list[Any]:
    """Numbers by size, then words, then null (nothing is changed: the raw end of the scale)."""
    return sorted(levels, key=level_key)


def level_key(level: Any) -> tuple[int, float, str]:
    """What `level_order` sorts by."""
    if level is None:
        return 2, 0.0, ""
    number = isinstance(level, int | float) and not isinstance(level, bool)
    return (0, float(level), "") if number else (1, 0.0, str(level))


def level_text(level: Any, factor: str = "") -> str:
    """A level as plots write it. Null bits are "raw", other nulls leave it to the default."""
    if level is None:
        return "raw" if factor.endswith("bits") else "default"
    if isinstance(level, bool):
        return str(level).lower()
    return f"{level:g}" if isinstance(level, float) else str(level)


def short_names(factors: Sequence[str]) -> dict[str, str]:
    """Factors without what all of their dotted names begin with, such as "recipe."."""
    dotted = [part.split(".") for name in factors for part in name.split(" = ")]
    shared = dotted[0][:1] if dotted and all(d[0] == dotted[0][0] for d in dotted) else []
    drop = f"{shared[0]}." if shared and all(len(d) > 1 for d in dotted) else ""
    return {
        name: " = ".join(part.removeprefix(drop) for part in name.split(" = ")) for name in factors
    }


def _levels_from_configs(arms: Sequence[ArmResult]) -> dict[str, dict[str, Level]]:
    configs = {}
    for arm in arms:
        if arm.first_run is not None:
            configs[arm.name] = flat_config(arm.first_run.config)
    keys = sorted({key for config in configs.values() for key in config if _may_be_factor(key)})
    columns: dict[tuple[str, ...], str] = {}
    for key in keys:
        values = tuple(repr(config.get(key)) for config in configs.values())
        if len(set(values)) > 1:
            columns.setdefault(_pattern(values), key)
    return {
        name: {key: _level(config.get(key)) for key in columns.values()}
        for name, config in configs.items()
    }


def _may_be_factor(key: str) -> bool:
    return key not in _NOT_FACTORS and not key.startswith(_NOT_GROUPS)


def _pattern(values: Sequence[str]) -> tuple[str, ...]:
    """Which arms share a value: the same for settings that always change together."""
    numbers: dict[str, str] = {}
    return tuple(numbers.setdefault(value, str(len(numbers))) for value in values)


def _level(value: Any) -> Level:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
