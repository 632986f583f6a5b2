"""A study's answer in sentences: its cheapest usable arm first, then the other verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from zpp_lab.study.judge import claims
from zpp_lab.study.judge.noise import band_gap, noise_bands, one_seed
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.words import gap_text, margin_nats, percent

_TIE = 0.01  # of the baseline's bytes: cheaper by less than this is not cheaper
_TO = dict.fromkeys(claims.INSIDE, "on par with")
_TO |= {claims.BETTER: "better than", claims.BELOW_OPEN: "below"}
_GROUPS = {  # what a sentence on several arms begins with
    "On par": claims.INSIDE,
    "Better": (claims.BETTER,),
    "Below zero, size open": (claims.BELOW_OPEN,),
    "Worse": (claims.WORSE,),
    "Above zero, size open": (claims.ABOVE_OPEN,),
    "Undecided": (claims.UNDECIDED,),
    "Diverged": ("diverged",),
}
_LETTERS, _TOGETHER = 60, 3  # letters of arms, and composites, that the answer names


def answer(result: StudyResult) -> list[str]:
    """Say what the study found: first the sentence for a reader in a hurry, then the others."""
    base = result.study.baseline
    arms = [arm for arm in result.arms if arm.arm.role == "arm" and arm.verdict != "baseline"]
    if result.margin is None:
        return [f"No answer yet: the baseline {base} has no finished run."]
    if wrong := [c.arm for c in result.controls if c.wrong]:
        return [f"No answer: the control {_some(wrong)} has the wrong verdict."]
    if one_seed(result):
        return _lone_answer(result, arms)
    costs = {a.name: c for a in arms if a.verdict in claims.GOOD and (c := cost(a)) is not None}
    limit = min(costs.values(), default=0.0) + _TIE
    near_least = [arm for arm in arms if arm.name in costs and costs[arm.name] <= limit]
    best = min(near_least, key=_upper_end, default=None)
    seen = [best.name] if best else []
    if best is None:
        near = f"{margin_nats(result)} a token of the loss of {result.compared_with}"
        on_par = _of(arms, claims.INSIDE)
        lines = [] if on_par else [f"No arm is shown to be within {near}."]
    else:
        lines = [f"{_named(best)} is {_found(result, best)}"]
    for lead, verdicts in _GROUPS.items():
        names = [name for name in _of(arms, verdicts) if name not in seen]
        if names:
            also = f"Also {lead.lower()}" if best and best.verdict in verdicts else lead
            lines.append(f"{also}: {_some(names, len(arms))}.")
            seen += names
    if without := [arm.name for arm in arms if arm.name not in seen]:
        lines.append(f"No verdict yet: {_some(without, len(arms))}.")
    lines += [f"Together, {one.name} is {one.verdict}." for one in result.composites[:_TOGETHER]]
    if waiting := [control.arm for control in result.controls if control.waiting]:
        lines[0] = f"Provisional until the control {_some(waiting)} is decided: {lines[0]}"
    return lines


def _found(result: StudyResult, best: ArmResult) -> str:
    """Say verdict, bytes and gap of the cheapest usable arm."""
    base = result.baseline_of(best).name
    where = "over all links" if best.bytes_inter is None else "between nodes"
    return (
        f"{_TO[best.verdict]} {base} at {percent(cost(best))} of its bytes "
        f"{where}: gap {gap_text(best)} nats a token, margin ±{best.margin or 0:.4f}."
    )


def _named(arm: ArmResult) -> str:
    return f"{arm.name} ({arm.arm.describe})" if arm.arm.describe else arm.name


def _lone_answer(result: StudyResult, arms: Sequence[ArmResult]) -> list[str]:
    places = {arm.name: band_gap(result, arm, noise_bands(result)) for arm in arms}
    above = [name for name, place in places.items() if place and place.side == "above"]
    lines = ["No answer yet: with one seed an arm nothing is tested."]
    if any(places.values()):
        lines.append(f"Above the noise band: {_some(above, len(arms)) or 'no arm'}.")
    return lines


def _of(arms: Sequence[ArmResult], verdicts: Sequence[str]) -> list[str]:
    return [arm.name for arm in arms if arm.verdict in verdicts]


def _some(names: Sequence[str], of: int = 0) -> str:
    """List names; where they are many, give their number. "" for none."""
    if len(names) > 1 and len("".join(names)) > _LETTERS:
        return f"{len(names)} of {of} arms" if of else f"{len(names)} arms"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def cost(arm: ArmResult) -> float | None:
    """Return bytes a step as a share of the baseline's: between nodes, or on one node in all."""
    return arm.bytes_total if arm.bytes_inter is None else arm.bytes_inter


def _upper_end(arm: ArmResult) -> float:
    assert arm.gap is not None
    return arm.gap.interval[1] if arm.gap.interval else arm.gap.mean
