"""Speed-ups over the strongest plain arm of a call, break-evens, and speeds of a study's arms.

Plain is what FSDP2 does by itself: its defaults, weights resharded to the node, copies across nodes
(HSDP). An arm's raw twin has the same partition and no codec, so a speed-up is what bits bring (arm
over twin) times what the partition brings (twin over the strongest plain arm).

A study's measured speeds lie in speed.csv of its folder. An arm takes the speed of a measurement
whose recipe has the same settings; names, model and data may differ. Virtual ranks are matched as
engine=fsdp, and plain FSDP2 stands for zero3 where that was not measured. An arm with other
micro-steps than the baseline moves other bytes, so it has no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.flat import flatten, stored_recipe
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.speed.results import (
    BASE,
    HSDP,
    MAX,
    Measured,
    Setting,
    labels,
    read_speeds,
    settings,
)

COPY = "speed.csv"
FASTER = 0.02  # a lead of less is none: an arm's own steps differ by about as much
RAW = CodecConfig(codec="none")
# What an unset field means: CodecConfig.
BLOCK = CodecConfig("block", None, 256, True, "nearest", "fp32", 0, False)
_LISTED = 3  # settings named as different


@dataclass(frozen=True)
class StudySpeeds:
    """The measured speeds of a study's arms.

    by_place: bandwidth → arm → tokens/s, slowest link first. matches: arm → the names it was
    measured as. missing: arm → why it has no speed.
    """

    measured: Sequence[Measured]
    by_place: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    matches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        return "; ".join(dict.fromkeys(m.machine for m in self.measured if m.machine)) or "unknown"


def study_speeds(root: Path, result: StudyResult) -> StudySpeeds | None:
    """Read the speed.csv in the study's folder; None without one. ValueError names a fault."""
    path = root / COPY
    return match(read_speeds(path), result) if path.exists() else None


def match(measured: Sequence[Measured], result: StudyResult) -> StudySpeeds:
    """Give each arm of the study the measurements of its recipe's settings."""
    places: dict[str, list[Measured]] = {}
    names = labels(measured)
    order = list(names)
    for one in sorted(measured, key=lambda m: (_slowness(m), order.index(m.setting))):
        places.setdefault(f"{one.place}, {names[one.setting]}", []).append(one)
    known = [(m, recipe_settings(m.config["recipe"])) for m in measured if m.config]
    recipes = {id(m): own for m, own in known}
    by_place: dict[str, dict[str, float]] = {}
    matches: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for arm in result.arms:
        if arm.first_run is None:
            continue
        own = recipe_settings(arm.first_run.config.get("recipe") or {})
        if _micro_steps(arm) != _micro_steps(result.baseline):
            missing[arm.name] = (
                f"its step has {_micro_steps(arm)} micro-steps, that of {result.baseline.name} "
                f"{_micro_steps(result.baseline)}"
            )
            continue
        for place, there in places.items():
            found = _best(arm, own, there, recipes)
            if found is not None:
                by_place.setdefault(place, {})[arm.name] = found.tokens_per_s
                matches.setdefault(arm.name, []).append(found.arm)
        if arm.name not in matches:
            missing[arm.name] = _why(arm, own, measured, recipes)
    ordered = {place: by_place[place] for place in places if place in by_place}
    named = {arm: list(dict.fromkeys(names)) for arm, names in matches.items()}
    return StudySpeeds(measured, ordered, named, missing)


def recipe_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe does, by setting: short-hands and defaults filled in, its name left out.

    Two recipes do the same when these are equal. ValueError for settings that there are not.
    """
    config = stored_recipe(recipe)
    wires = {wire: _wire(config.wire(wire)) for wire in config.wires}
    found = {name: getattr(config, name) for name in ("secondary", "hops", "order")}
    found |= {"sharding": list(config.parts)} | flatten(wires)
    if config.kept:
        found["update"] = config.sharding.update
    if any(codec != _values(RAW) for codec in wires.values()):  # else there is nothing to exempt
        exempt = config.exempt
        found |= {"exempt": [exempt.max_ndim, list(exempt.names), exempt.below_numel]}
    lists = {name: repr(own) for name in ("rules", "phases") if (own := getattr(config, name))}
    return found | lists


def _wire(codec: CodecConfig) -> dict[str, Any]:
    if codec.raw:
        return _values(RAW)
    return _values(codec.over(BLOCK) if codec.codec in (None, "block") else codec)


def _values(codec: CodecConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(codec).items() if not name.startswith("_")}


def _micro_steps(arm: ArmResult) -> int:
    run = arm.first_run
    return int(((run.config if run else {}).get("train") or {}).get("micro_steps", 1))


def _best(
    arm: ArmResult,
    own: Mapping[str, Any],
    there: Sequence[Measured],
    recipes: Mapping[int, Mapping[str, Any]],
) -> Measured | None:
    """The arm's measurement at one place: of those with its settings and engine the one of its
    name, else the first. One whose settings the table does not say is taken by its name."""
    engine = _engine(arm)
    known = [(m, recipes.get(id(m))) for m in there if m.engine in ("", engine)]
    fit = [m for m, its in known if (m.arm in _names(arm) if its is None else its == own)]
    if not fit and engine == "fsdp":
        plain = [m for m in there if m.arm == BASE]
        fit = [m for m in plain if recipes.get(id(m), recipe_settings({})) == own]
    return min(fit, key=lambda m: m.arm != arm.name, default=None)


def _why(
    arm: ArmResult,
    own: Mapping[str, Any],
    measured: Sequence[Measured],
    recipes: Mapping[int, Mapping[str, Any]],
) -> str:
    for one in measured:
        other = recipes.get(id(one))
        if other is not None and one.arm in _names(arm) and other != own:
            keys = sorted(k for k in own.keys() | other.keys() if own.get(k) != other.get(k))
            listed = [f"{k} {other.get(k)} there, {own.get(k)} here" for k in keys[:_LISTED]]
            more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
            return f"{one.arm} was measured with other settings: {'; '.join(listed)}{more}"
    return f"nothing with its settings was measured on engine={_engine(arm)}"


def _names(arm: ArmResult) -> set[str]:
    return {arm.name, *(run.recipe for run in arm.runs.values())}


def _engine(arm: ArmResult) -> str:
    run = arm.first_run
    name = str(((run.config if run else {}).get("engine") or {}).get("name", "virtual"))
    return "fsdp" if name == "virtual" else name


def _slowness(one: Measured) -> tuple[int, float]:
    """Links by their speed, then those without a limit, then none at all."""
    if one.setting.nodes == 1:
        return 2, 0.0
    return (1, 0.0) if one.link == MAX else (0, float(one.link))


@dataclass(frozen=True)
class SpeedUp:
    """An arm's tokens/s over those of `base`, the strongest plain arm of its call, at the same
    link; low to high: by its slowest and fastest step (both the value itself where the table has no
    spread). twin: the arm's raw twin; None where it has no codec or no twin was timed."""

    at: Measured
    value: float
    low: float
    high: float
    base: Measured
    twin: Measured | None = None

    @property
    def bits(self) -> float | None:
        """What bits bring: the arm over its twin."""
        return self.at.tokens_per_s / self.twin.tokens_per_s if self.twin else None

    @property
    def partition(self) -> float | None:
        """What the partition brings: the twin over the strongest plain arm."""
        return self.twin.tokens_per_s / self.base.tokens_per_s if self.twin else None


@dataclass(frozen=True)
class BreakEven:
    """Where an arm's speed-up crosses 1.

    crossings: Gb/s, rising, between which `first` (is it faster at the slowest link?) alternates.
    slowest, fastest: the links measured.
    """

    setting: Setting
    arm: str
    first: bool
    crossings: Sequence[float]
    slowest: float
    fastest: float

    @property
    def text(self) -> str:
        """In words: for which bandwidths the arm is faster."""
        if self.slowest == self.fastest:
            return f"{'faster' if self.first else 'not faster'} at the only speed measured"
        if not self.crossings:
            return f"{'always' if self.first else 'never'} faster in the measured range"
        edges = [None, *self.crossings, None]
        spans = list(pairwise(edges))[0 if self.first else 1 :: 2]
        return "faster " + " and ".join(_span(low, high) for low, high in spans)


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {gbps_text(low)} to {gbps_text(high)} Gb/s"
    if low is not None:
        return f"above {gbps_text(low)} Gb/s"
    assert high is not None
    return f"below {gbps_text(high)} Gb/s"


def gbps_text(gbps: float) -> str:
    """Return three digits, and never an exponent."""
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.3g}"


def strongest_plain(measured: Sequence[Measured]) -> dict[tuple[Setting, str, str], Measured]:
    """Return the fastest plain arm of each cell that has one."""
    found: dict[tuple[Setting, str, str], Measured] = {}
    for m in measured:
        if m.plain and (m.cell not in found or m.tokens_per_s > found[m.cell].tokens_per_s):
            found[m.cell] = m
    return found


def twins(measured: Sequence[Measured]) -> dict[int, Measured]:
    """Return by `id` the raw twin of each arm that names one. ValueError lists the twins that are
    missing: without them nobody can tell what bits bring from what the partition brings."""
    there = {(m.cell, m.arm): m for m in measured}
    found, missing = {}, []
    for m in measured:
        if not m.twin:
            continue
        own = there.get((m.cell, m.twin))
        if own is None:
            missing.append(f"{m.twin} for {m.arm} at {m.place} on {m.setting.text}")
        else:
            found[id(m)] = own
    if missing:
        raise ValueError(
            f"the table of speeds lacks raw twins of the same call: {'; '.join(missing)}; measure "
            "the arms again with `zpp-lab bench step`, which adds their twins, or remove their rows"
        )
    return found


def without_twin(measured: Sequence[Measured]) -> dict[Setting, list[str]]:
    """Return arms with codecs timed without a twin: in older tables, or with --no-twins."""
    found: dict[Setting, dict[str, None]] = {}
    for m in measured:
        if m.coded and not m.twin:
            found.setdefault(m.setting, {})[m.arm] = None
    return {setting: list(arms) for setting, arms in found.items()}


def without_hsdp(measured: Sequence[Measured]) -> list[Setting]:
    """Return settings of several nodes for which a call did not time HSDP."""
    found = dict.fromkeys(m.cell for m in measured if m.setting.nodes > 1)
    known = {m.cell for m in measured if m.arm == HSDP}
    return list(dict.fromkeys(cell[0] for cell in found if cell not in known))


def speed_ups(measured: Sequence[Measured]) -> list[SpeedUp]:
    """Return the speed-up of every measurement whose cell has a plain arm, the plain ones too.
    ValueError for a twin that the table names and lacks."""
    bases, raw = strongest_plain(measured), twins(measured)
    found = []
    for m in measured:
        base = bases.get(m.cell)
        if base is None:
            continue
        value = m.tokens_per_s / base.tokens_per_s
        low = value * _ratio(m.step_s, m.step_max_s)
        high = value * _ratio(m.step_s, m.step_min_s)
        found.append(SpeedUp(m, value, low, high, base, raw.get(id(m))))
    return found


def without_base(measured: Sequence[Measured]) -> list[Setting]:
    """Return settings at which an arm has no base to be compared with at any link."""
    known = {one.at.setting for one in speed_ups(measured)}
    return [setting for setting in settings(measured) if setting not in known]


def break_evens(ups: Sequence[SpeedUp]) -> list[BreakEven]:
    """Return one for each setting and arm, but plain ones, that has a bandwidth; in the table's
    order.

    Between two measured links the logarithm of the speed-up is taken as linear in that of the
    bandwidth. A speed-up of just 1 is not faster.
    """
    groups: dict[tuple[Setting, str], list[SpeedUp]] = {}
    for one in ups:
        if one.at.gbps is not None and not one.at.plain:
            groups.setdefault((one.at.setting, one.at.arm), []).append(one)
    return [_break_even(*key, group) for key, group in groups.items()]


def _break_even(setting: Setting, arm: str, ups: Sequence[SpeedUp]) -> BreakEven:
    points = sorted((one.at.gbps or 0.0, one.value) for one in ups)
    crossings = [
        math.exp(math.log(x0) + math.log(x1 / x0) * math.log(y0) / (math.log(y0) - math.log(y1)))
        for (x0, y0), (x1, y1) in pairwise(points)
        if (y0 > 1) != (y1 > 1)
    ]
    return BreakEven(setting, arm, points[0][1] > 1, crossings, points[0][0], points[-1][0])


def _ratio(median: float | None, other: float | None) -> float:
    return 1.0 if median is None or other is None else median / other
