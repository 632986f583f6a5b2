"""Lines up several studies: the arms of one recipe on other machines, commits, data or models.

Arms match by name. What differs between the studies' configs, data and machines is listed, since
a gap may only be compared with another one when it is known what else changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats as scipy_stats

from zpp_lab.runconfig import flat_config
from zpp_lab.study.result import read_result
from zpp_lab.study.runs import Run
from zpp_lab.study.table import NOTHING, gap_text, signed
from zpp_lab.study.verdict import ArmResult, StudyResult

_SUMMARY: tuple[str, ...] = ("data.name", "data.hash", "model_parameters", "commit")
_SUMMARY += ("machine.cpu", "machine.gpus", "versions.torch", "versions.python", "versions.zpp_lab")
_OF_THE_RUN = ("seed", "run.", "recipe.", "tracking.", "data.cache_dir", "data.path")


@dataclass(frozen=True)
class Shift:
    """How much an arm's gap changed from the first study, in nats, with Welch's interval."""

    mean: float
    interval: tuple[float, float] | None  # None where a study has fewer than two seeds

    @property
    def differs(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class ComparedArm:
    """One arm's results by study, in the studies' order; None where a study lacks it."""

    name: str
    results: Sequence[ArmResult | None]
    shifts: Sequence[Shift | None]  # against the first study that has it; None for that one
    recipe: Mapping[str, Sequence[Any]]  # recipe settings in which the studies differ


@dataclass(frozen=True)
class Comparison:
    """Several studies side by side. `differences`: what → its value in each study."""

    names: Sequence[str]
    arms: Sequence[ComparedArm]
    differences: Mapping[str, Sequence[Any]]
    confidence: float


def compare(roots: Sequence[Path]) -> Comparison:
    """Read and judge the studies below `roots` and line their arms up.

    ValueError for fewer than two folders, and when no arm is in two of them.
    """
    if len(roots) < 2:
        raise ValueError("give two folders or more")
    results = [read_result(root) for root in roots]
    names = short_names([Path(os.path.abspath(root)) for root in roots])
    confidence = results[0].study.confidence
    wanted = dict.fromkeys(arm.name for result in results for arm in result.arms)
    arms = [_line_up(name, results, confidence) for name in wanted]
    if not any(sum(r is not None for r in arm.results) > 1 for arm in arms):
        own = "; ".join(
            f"{name}: {', '.join(a.name for a in result.arms)}"
            for name, result in zip(names, results, strict=True)
        )
        raise ValueError(f"no arm is in two of the studies ({own})")
    return Comparison(names, arms, _differences(results), confidence)


def short_names(roots: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as tell them apart."""
    for depth in range(1, max(len(root.parts) for root in roots) + 1):
        names = ["/".join(root.parts[-depth:]) for root in roots]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a folder is given twice")


def _line_up(name: str, results: Sequence[StudyResult], confidence: float) -> ComparedArm:
    found = [next((a for a in r.arms if a.name == name), None) for r in results]
    first = next(arm for arm in found if arm is not None)
    shifts = [
        None if arm is None or arm is first else _shift(first, arm, confidence) for arm in found
    ]
    runs = [None if arm is None else arm.first_run for arm in found]
    recipes = [{} if run is None else _settings(run, recipe=True) for run in runs]
    known = [recipe for recipe in recipes if recipe]
    differing = sorted({k for r in known for k in r if r[k] != known[0].get(k)})
    return ComparedArm(name, found, shifts, {k: [r.get(k) for r in recipes] for k in differing})


def _shift(first: ArmResult, other: ArmResult, confidence: float) -> Shift | None:
    """Gaps of unlike studies are independent: seeds are no pairs any more."""
    a, b = (list(arm.gaps.values()) for arm in (first, other))
    if not a or not b or "baseline" in (first.verdict, other.verdict):
        return None
    mean = sum(b) / len(b) - sum(a) / len(a)
    if len(a) < 2 or len(b) < 2:
        return Shift(mean, None)
    if len({*a}) == len({*b}) == 1:  # no spread to estimate
        return Shift(mean, (mean, mean))
    interval = scipy_stats.ttest_ind(b, a, equal_var=False).confidence_interval(confidence)
    return Shift(mean, (float(interval.low), float(interval.high)))


def _differences(results: Sequence[StudyResult]) -> dict[str, list[Any]]:
    """Settings, data, machines and versions that are not the same in all studies.

    Of each study the baseline's first run is looked at; what its arms change on purpose
    (recipes) is not listed here. A study's own spread (several commits) is shown as such.
    """
    runs = [result.baseline.first_run for result in results]
    settings = [{} if run is None else _settings(run, recipe=False) for run in runs]
    keys = sorted({key for flat in settings for key in flat})
    rows: dict[str, list[Any]] = {k: [flat.get(k) for flat in settings] for k in keys}
    rows |= {key: [_facts(result, key) for result in results] for key in _SUMMARY}
    rows["margin"] = [result.study.margin for result in results]
    rows["seeds"] = [", ".join(map(str, result.study.seeds)) for result in results]
    return {key: values for key, values in rows.items() if any(v != values[0] for v in values)}


def _settings(run: Run, recipe: bool) -> dict[str, Any]:
    """A run's flat settings: of the recipe only, or all others that matter."""
    flat = flat_config(run.config)
    if recipe:
        return {k: v for k, v in flat.items() if k.startswith("recipe.")}
    return {k: v for k, v in flat.items() if not k.startswith(_OF_THE_RUN)}


def _facts(result: StudyResult, key: str) -> str:
    """The values of a summary's dotted key over all finished runs, joined where several."""
    found: dict[str, None] = {}
    for run in result.runs:
        value: Any = run.summary
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, []):
            found[str(value if not isinstance(value, list) else ", ".join(map(str, value)))] = None
    return "; ".join(found)


# ---------------------------------------------------------------------- as cells of a table


def columns(found: Comparison) -> list[str]:
    """Arm, then each study's verdict and gap, then the shift from the first study."""
    each = [cell for name in found.names for cell in (name, f"{name}: gap")]
    return ["Arm", *each, *(f"{name}: shift" for name in found.names[1:])]


def rows(found: Comparison) -> list[list[str]]:
    """The cells of `columns` as text, one row an arm."""
    return [
        [
            arm.name,
            *(cell for result in arm.results for cell in _verdict_cells(result)),
            *(_shift_text(shift) for shift in arm.shifts[1:]),
        ]
        for arm in found.arms
    ]


def _verdict_cells(arm: ArmResult | None) -> tuple[str, str]:
    return (NOTHING, NOTHING) if arm is None else (arm.verdict, gap_text(arm))


def _shift_text(shift: Shift | None) -> str:
    if shift is None:
        return NOTHING
    if shift.interval is None:
        return signed(shift.mean)
    half = (shift.interval[1] - shift.interval[0]) / 2
    return f"{signed(shift.mean)} ± {half:.4f}{' *' if shift.differs else ''}"


def difference_rows(found: Comparison) -> list[list[str]]:
    """What differs, with its value in each study; recipes that differ under their arm's name."""
    values = dict(found.differences)
    for arm in found.arms:
        values |= {f"{arm.name}: {key}": v for key, v in arm.recipe.items()}
    return [[key, *(_text(v) for v in each)] for key, each in values.items()]


def _text(value: Any) -> str:
    return NOTHING if value in (None, "") else str(value)
