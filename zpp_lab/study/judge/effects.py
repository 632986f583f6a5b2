"""Main effects and interactions of a study's swept factors on the loss gap.

An arm's `factors` give its levels; without them, the factors are the settings in which the arms'
configs differ. Only arms with equal levels of all other factors are compared. A mean over such
matched groups is taken within each seed; its interval is Student's over seeds. An unmatched arm is
drawn as a dot and named, never averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from zpp_lab.config.flat import flat_config
from zpp_lab.config.study import Level
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult

_NOT_FACTORS = ("seed", "recipe.name", "model.preset", "data.cache_dir")
_NOT_GROUPS = ("run.", "tracking.", "engine.")
Others = tuple[tuple[str, Level], ...]  # the levels of all other factors: what a group shares
_MIN_TIED = 3  # levels that make a line of arms in which two factors move together


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
    """Return every arm with a gap and levels; the baseline, whose gap is 0, among them."""
    arms = [arm for arm in result.arms if arm.arm.role in ("arm", "baseline")]
    values = {arm.name: arm.arm.factors for arm in arms if arm.arm.factors}
    levels: Mapping[str, Mapping[str, Level]] = values or _levels_from_configs(arms)
    cells = []
    for arm in arms:
        if arm.gaps and levels.get(arm.name):
            cells.append(Cell(arm.name, dict(levels[arm.name]), arm.gaps))
    return cells


def level_order(levels: Iterable[Any]) -> list[Any]:
    """Sort numbers by size, then words, then null (the uncompressed end of the scale)."""
    return sorted(levels, key=level_key)


def level_key(level: Any) -> tuple[int, float, str]:
    """Return what `level_order` sorts by."""
    if level is None:
        return 2, 0.0, ""
    number = isinstance(level, int | float) and not isinstance(level, bool)
    return (0, float(level), "") if number else (1, 0.0, str(level))


def level_text(level: Any, factor: str = "") -> str:
    """Return a level as plots write it. Null bits are "raw", other nulls "default"."""
    if level is None:
        return "raw" if factor.endswith("bits") else "default"
    if isinstance(level, bool):
        return str(level).lower()
    return f"{level:g}" if isinstance(level, float) else str(level)


def short_names(factors: Sequence[str]) -> dict[str, str]:
    """Return factors without what all of their dotted names begin with, such as "recipe."."""
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
    every = {key for config in configs.values() for key in config} - {*_NOT_FACTORS}
    keys = sorted(key for key in every if not key.startswith(_NOT_GROUPS))
    columns: dict[tuple[str, ...], str] = {}
    for key in keys:
        values = tuple(repr(config.get(key)) for config in configs.values())
        if len(set(values)) > 1:
            columns.setdefault(_pattern(values), key)
    return {
        name: {key: _level(config.get(key)) for key in columns.values()}
        for name, config in configs.items()
    }


def _pattern(values: Sequence[str]) -> tuple[str, ...]:
    """Which arms share a value: the same for settings that always change together."""
    numbers: dict[str, str] = {}
    return tuple(numbers.setdefault(value, str(len(numbers))) for value in values)


def _level(value: Any) -> Level:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


@dataclass(frozen=True)
class Estimate:
    """Mean gap in nats with its interval over `seeds` (the point itself for a single seed)."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class MainEffect:
    """Mean gap at each level of one factor over `groups` groups of arms alike in all else.

    left_out: levels that no matched group has. arms: all arms, as (group, level, name, mean gap).
    """

    factor: str
    levels: Mapping[Level, Estimate]
    groups: int
    left_out: Sequence[Level]
    arms: Sequence[tuple[int, Level, str, float]]


@dataclass(frozen=True)
class Interaction:
    """Mean gaps over the grid of two factors; `departure` is the cell farthest from additive."""

    factors: tuple[str, str]
    cells: Mapping[tuple[Level, ...], Estimate]
    groups: int
    at: tuple[Level, ...]
    departure: Estimate


def main_effects(cells: Sequence[Cell], confidence: float = 0.95) -> list[MainEffect]:
    """Return one for each factor (and each pair that moves together) with a matched comparison."""
    names = sorted({name for cell in cells for name in cell.levels})
    found = [_main_effect(name, cells, confidence) for name in names]
    for pair in combinations(names, 2):
        tied = _tied(pair, cells)
        if len({cell.levels[" = ".join(pair)] for cell in tied}) >= _MIN_TIED:
            found.append(_main_effect(" = ".join(pair), tied, confidence))
    return [effect for effect in found if effect is not None]


def interactions(cells: Sequence[Cell], confidence: float = 0.95) -> list[Interaction]:
    """Return all pairs of factors with a whole grid, the farthest from additivity first."""
    names = sorted({name for cell in cells for name in cell.levels})
    found = [_interaction(pair, cells, confidence) for pair in combinations(names, 2)]
    known = [one for one in found if one is not None]
    return sorted(known, key=lambda one: -abs(one.departure.mean))


def _main_effect(factor: str, cells: Sequence[Cell], confidence: float) -> MainEffect | None:
    groups = _groups(cells, (factor,))
    keys = {others: {levels[0] for levels in group} for others, group in groups.items()}
    levels = _best_levels(list(keys.values()))
    if len(levels) < 2:
        return None
    matched = [groups[others] for others, have in keys.items() if levels <= have]
    estimates = _estimates(matched, [(level,) for level in level_order(levels)], confidence)
    if estimates is None:
        return None
    arms = [
        (number, level[0], cell.arm, cell.mean)
        for number, group in enumerate(groups.values())
        for level, cell in sorted(group.items(), key=lambda item: level_key(item[0][0]))
    ]
    every = {level for have in keys.values() for level in have}
    return MainEffect(
        factor,
        {level[0]: estimate for level, estimate in estimates.items()},
        len(matched),
        level_order(every - levels),
        arms,
    )


def _interaction(
    pair: tuple[str, str], cells: Sequence[Cell], confidence: float
) -> Interaction | None:
    groups = _groups(cells, pair)
    whole = {others: _whole_grid(set(group)) for others, group in groups.items()}
    counted = Counter(frozenset(grid) for grid in whole.values() if grid)
    if not counted:
        return None
    grid = max(counted, key=lambda g: (len(g) * counted[g], len(g)))
    matched = [groups[others] for others, have in whole.items() if grid <= have]
    rows, columns = (level_order({key[i] for key in grid}) for i in (0, 1))
    order = [(a, b) for a in rows for b in columns]
    estimates = _estimates(matched, order, confidence)
    if estimates is None:
        return None
    seeds = _by_seed(matched, order)
    table = seeds.reshape(len(seeds), len(rows), len(columns))
    residual = (
        table
        - table.mean(1, keepdims=True)
        - table.mean(2, keepdims=True)
        + table.mean((1, 2), keepdims=True)
    ).reshape(len(seeds), -1)
    worst = int(np.argmax(np.abs(residual.mean(0))))
    departure = _estimate(residual[:, worst], confidence)
    return Interaction(pair, estimates, len(matched), order[worst], departure)


def _groups(
    cells: Iterable[Cell], factors: tuple[str, ...]
) -> dict[Others, dict[tuple[Level, ...], Cell]]:
    """Cells that agree in all factors but these, by their levels of these."""
    groups: dict[Others, dict[tuple[Level, ...], Cell]] = {}
    for cell in cells:
        if all(factor in cell.levels for factor in factors):
            others = tuple(sorted((k, v) for k, v in cell.levels.items() if k not in factors))
            levels = tuple(cell.levels[factor] for factor in factors)
            groups.setdefault(others, {})[levels] = cell
    return groups


def _best_levels(have: Sequence[set[Level]]) -> set[Level]:
    """The levels that give the most matched comparisons: (levels − 1) × groups with all of them."""
    pairs = combinations(have, 2) if len(have) < 200 else ()
    options = [*have, *(a & b for a, b in pairs)]
    unique: set[frozenset[Level]] = {frozenset(option) for option in options if len(option) > 1}

    def score(levels: frozenset[Level]) -> tuple[int, int, list[str]]:
        groups = sum(levels <= other for other in have)
        return (len(levels) - 1) * groups, len(levels), sorted(map(str, levels))

    return set(sorted(unique, key=score)[-1]) if unique else set()


def _whole_grid(keys: set[tuple[Level, ...]]) -> set[tuple[Level, ...]]:
    """The rows that have every column, as a grid of at least 2 × 2; else nothing."""
    columns = {b for _, b in keys}
    rows = {a for a, _ in keys if all((a, b) in keys for b in columns)}
    if len(rows) < 2 or len(columns) < 2:
        return set()
    return {(a, b) for a in rows for b in columns}


def _by_seed(
    matched: Sequence[Mapping[tuple[Level, ...], Cell]], order: Sequence[tuple[Level, ...]]
) -> np.ndarray:
    """float64 [seeds, levels]: each seed's mean gap over the groups; seeds that all cells have."""
    cells = [group[levels] for group in matched for levels in order]
    seeds = sorted(set.intersection(*(set(cell.gaps) for cell in cells)))
    values = [
        [np.mean([group[levels].gaps[seed] for group in matched]) for levels in order]
        for seed in seeds
    ]
    return np.array(values, dtype=np.float64).reshape(len(seeds), len(order))


def _estimates(
    matched: Sequence[Mapping[tuple[Level, ...], Cell]],
    order: Sequence[tuple[Level, ...]],
    confidence: float,
) -> dict[tuple[Level, ...], Estimate] | None:
    values = _by_seed(matched, order)
    if not len(values):
        return None
    return {levels: _estimate(values[:, i], confidence) for i, levels in enumerate(order)}


def _estimate(values: np.ndarray, confidence: float) -> Estimate:
    mean = float(values.mean())
    spread = len(values) > 1 and np.ptp(values) > 0
    low, high = t_interval(values, confidence) if spread else (mean, mean)
    return Estimate(mean, low, high, len(values))


def _tied(pair: tuple[str, str], cells: Sequence[Cell]) -> list[Cell]:
    """The cells in which both factors have the same level, as cells of one factor."""
    same = [c for c in cells if all(n in c.levels for n in pair)]
    same = [c for c in same if c.levels[pair[0]] == c.levels[pair[1]]]
    name = " = ".join(pair)
    return [
        Cell(
            c.arm,
            {k: v for k, v in c.levels.items() if k not in pair} | {name: c.levels[pair[0]]},
            c.gaps,
        )
        for c in same
    ]
