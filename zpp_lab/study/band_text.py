"""What a study with one seed can say, in words: how wide the noise band is and where arms stand.

Nothing is tested, so no sentence here speaks of a verdict: an arm lies inside the band, above it
(its loss is higher) or below it (lower), and by how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zpp_lab.study.band import Beside, beside, noise_bands, noise_of, one_seed
from zpp_lab.study.looks import planned_seeds
from zpp_lab.study.table import nats, signed
from zpp_lab.study.verdict import ArmResult, StudyResult

_SIDES = {
    "above": "Above it, with a higher loss",
    "inside": "Inside it",
    "below": "Below it, with a lower loss",
}
_LISTED = 8  # arms named in one sentence
Placed = Mapping[str, Beside]


def band_width(result: StudyResult) -> str:
    """The width of each noise band and where it comes from; "" without one, or with more seeds."""
    if not one_seed(result):
        return ""
    said = []
    for name, noise in noise_bands(result).items():
        controls = _join(arm.name for arm in _paired(result, name, ("order_control",)))
        said.append(
            f"±{nats(noise)} nats, as far as {controls}, in which only the order of sums differs, "
            f"strays from {name} in the second half of training. One draw of the noise."
        )
    return " ".join(said)


def conclusion(result: StudyResult) -> str:
    """What one seed shows, and what not; "" for a study with more."""
    if not one_seed(result):
        return ""
    so_far = " so far" if len(planned_seeds(result.study)) > 1 else ""
    parts = [f"With one seed an arm{so_far} nothing is tested."]
    placed, bands = _placed(result, ("arm",)), noise_bands(result)
    if not any(arm.gaps for arm in result.arms if arm.verdict != "baseline"):
        return parts[0]
    if not placed:
        return f"{parts[0]} No noise band says how large a gap noise makes."
    parts += [_above(result, placed), _below(result, placed), *_negative(result, bands)]
    return " ".join(filter(None, parts))


def band_lines(result: StudyResult) -> list[str]:
    """Sentences for each baseline with one finished seed, on what its arms' gaps are worth."""
    bases = [arm for arm in result.arms if arm.verdict == "baseline" and len(arm.finished) == 1]
    return [line for base in bases for line in _of(result, base)]


# ---------------------------------------------------------------------- the conclusion


def _above(result: StudyResult, placed: Placed) -> str:
    over = {name: at for name, at in placed.items() if at.side == "above"}
    widths = " and ".join(f"±{nats(noise)}" for noise in noise_bands(result).values())
    band = f"the noise band ({widths} nats, one draw)"
    if over:
        others = " No other arm did." if len(over) < len(placed) else ""
        return (
            f"{_join(over)} ended above {band}, {_factors(over)}, with a higher loss than it "
            f"explains: a sign of a cost, and no test of one.{others}{_small(result, over)}"
        )
    arms = [arm for arm in result.arms if arm.name in placed]
    fewer = all(arm.bytes_total is not None and arm.bytes_total < 1 for arm in arms)
    what = "fewer bits cost anything" if fewer else "an arm costs anything"
    return f"No arm ended above {band}: nothing here shows that {what}."


def _small(result: StudyResult, over: Placed) -> str:
    """Which of the higher losses do not matter to the study."""
    margins = {arm.name: arm.margin or 0.0 for arm in result.arms}
    inside = [name for name, at in over.items() if at.gap < margins[name]]
    return f" Within the margin: {_join(inside)}." if inside else ""


def _below(result: StudyResult, placed: Placed) -> str:
    under = {name: at for name, at in placed.items() if at.side == "below"}
    if not under:
        return ""
    return (
        f"{_join(under)} ended below it ({_factors(under)}), with a lower loss. That shows no gain "
        f"either: {_why_no_gain(result, placed)}."
    )


def _why_no_gain(result: StudyResult, placed: Placed) -> str:
    controls = _placed(result, ("order_control",))
    if controls and all(at.gap < 0 for at in (*placed.values(), *controls.values())):
        base = " or ".join(noise_bands(result))
        return (
            f"every gap is to one run of {base}, and {_join(controls)} ended below that run as well"
        )
    return "the band is one draw of the noise"


def _negative(result: StudyResult, bands: Mapping[str, float]) -> list[str]:
    """Whether the study has seen that it can see a cost."""
    said = []
    for control in result.controls:
        if control.role != "negative_control":
            continue
        arm = next(arm for arm in result.arms if arm.name == control.arm)
        at = beside(result, arm, bands)
        if at is not None:
            said.append(f"The negative control {arm.name} lies {at.side} the band ({at.times}).")
        elif control.unanswered:
            said.append(
                f"The negative control {arm.name} has no answer ({control.verdict}), so nothing "
                "shows either that this study would see a cost."
            )
    return said


# ---------------------------------------------------------------------- arm by arm


def _of(result: StudyResult, base: ArmResult) -> list[str]:
    if not _paired(result, base.name, ("arm", "negative_control")):
        return []
    noise = noise_of(result, base)
    if noise is None:
        return [
            f"{base.name} has one seed, so nothing is tested, and no order control beside it "
            f"says how large a gap noise makes. {_elsewhere(result)}"
        ]
    control = _join(arm.name for arm in _paired(result, base.name, ("order_control",)))
    if noise == 0.0:
        return [
            f"{base.name} has one seed, so nothing is tested, and {control} equals it in every "
            f"digit: its order of sums changed nothing, so it says nothing of noise. "
            f"{_elsewhere(result)}"
        ]
    return [
        f"{base.name} has one seed, so nothing is tested. The noise band around its loss is "
        f"±{nats(noise)} nats, by {control}. {_sides(result, base)} {_shared(result, base)}".strip()
    ]


def _elsewhere(result: StudyResult) -> str:
    """What the controls of other baselines say, or what would help."""
    known = noise_bands(result)
    if not known:
        return "More seeds would, or an order control."
    said = [f"{nats(noise)} nats from {name}" for name, noise in known.items()]
    return f"The nearest to it: order controls stray up to {', '.join(said)}."


def _sides(result: StudyResult, base: ArmResult) -> str:
    """Which arms lie on which side of the band, with their gaps."""
    arms = {arm.name for arm in _paired(result, base.name, ("arm", "negative_control"))}
    placed = {n: at for n, at in _placed(result).items() if n in arms}
    parts = []
    for side, words in _SIDES.items():
        found = [
            f"{n} ({signed(at.gap)}, {at.times})" for n, at in placed.items() if at.side == side
        ]
        parts.append(f"{words}: {_join(found) if found else 'none'}.")
    return " ".join(parts)


def _shared(result: StudyResult, base: ArmResult) -> str:
    """The gaps to the order control's run, where all gaps to the baseline's have one sign."""
    arms = _paired(result, base.name, ("arm",))
    controls = _paired(result, base.name, ("order_control",))
    gaps = {arm.name: arm.gap.mean for arm in (*arms, *controls) if arm.gap is not None}
    same = len({gap > 0 for gap in gaps.values()}) == 1
    if len(controls) != 1 or len(arms) < 2 or not same:
        return ""
    control = controls[0].name
    to_control = [gaps[arm.name] - gaps[control] for arm in arms]
    side = "above" if gaps[control] > 0 else "below"
    return (
        f"All of these gaps are to one and the same run of {base.name}, and all lie {side} 0, as "
        f"does {control}'s ({signed(gaps[control])}). To the run of {control} the arms' gaps go "
        f"from {signed(min(to_control))} to {signed(max(to_control))}."
    )


def _paired(result: StudyResult, base: str, roles: Sequence[str]) -> list[ArmResult]:
    """The arms of these roles with a gap to that baseline."""
    return [
        arm
        for arm in result.arms
        if arm.gaps
        and arm.verdict != "baseline"
        and arm.arm.role in roles
        and result.baseline_of(arm).name == base
    ]


def _placed(result: StudyResult, roles: Sequence[str] = ("arm", "negative_control")) -> Placed:
    bands = noise_bands(result)
    found = {a.name: beside(result, a, bands) for a in result.arms if a.arm.role in roles}
    return {name: at for name, at in found.items() if at is not None}


def _factors(placed: Placed) -> str:
    """The factors of some arms: one, or from the least to the largest."""
    told = list(dict.fromkeys(at.times for at in sorted(placed.values(), key=lambda a: a.factor)))
    return told[0] if len(told) == 1 else f"{told[0]} to {told[-1]}"


def _join(names: Iterable[str]) -> str:
    told = list(names)
    if len(told) > _LISTED:
        told[_LISTED:] = [f"{len(told) - _LISTED} more"]
    *most, last = told
    return f"{', '.join(most)} and {last}" if most else last
