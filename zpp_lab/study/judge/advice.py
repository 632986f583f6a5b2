"""What to use, from the verdicts, by rules that the report prints beside it.

Every sentence names the rule that made it, so that a reader who disagrees knows with what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from zpp_lab.study.judge.claims import (
    ABOVE_OPEN,
    BELOW_OPEN,
    BETTER,
    GOOD,
    INSIDE,
    OPEN,
    UNDECIDED,
    WORSE,
)
from zpp_lab.study.judge.noise import beside, noise_bands, one_seed
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.speed.speeds import FASTER
from zpp_lab.study.words import gap_text, margin_nats, percent

Speeds = Mapping[str, Mapping[str, float]]  # bandwidth → arm → tokens/s
_TIE = 0.01  # of the baseline's bytes: cheaper by less than this is not cheaper
_TO = dict.fromkeys(INSIDE, "on par with") | {BETTER: "better than", BELOW_OPEN: "below"}
_QUICK, _SEEDS = 180, 8  # seconds of a run; seeds where it takes no more
_LISTED = 8  # arms named in one sentence
_NAMED, _TOGETHER = 60, 3  # letters of arms, and composites, that the answer names
RULES = (
    "If a control has the wrong verdict, nothing is advised. While one is undecided, the advice is "
    "provisional.",
    "Candidates are the arms whose gap is shown to be inside the margin or below 0, except "
    "controls.",
    "The candidate that sends the fewest bytes a step between nodes is advised (all bytes where "
    f"there is one node). Within {_TIE:.0%} of the baseline's bytes, the one whose interval of the "
    "gap ends lower.",
    "Where speeds were measured, the candidate with the most tokens/s is advised at each "
    f"bandwidth, or the baseline where none is faster by more than {FASTER:.0%}.",
    "Arms that send fewer bytes than the advised one, and are undecided or of open size, are worth "
    "more seeds.",
    "Arms that are worse, or that diverged, should not be used at this scale.",
    "With one seed an arm nothing is tested, so its loss decides no advice.",
    f"Where a run takes less than {_QUICK // 60} minutes and an arm is undecided or of open size, "
    f"{_SEEDS} seeds an arm are advised: an interval over 3 is three times as wide. Plan them "
    "beforehand as `seeds`, or as `max_seeds`, which corrects for the looks in between.",
)


@dataclass(frozen=True)
class Advice:
    """One sentence and the number of the rule behind it, from 1."""

    text: str
    rule: int


def answer(result: StudyResult) -> list[str]:
    """What the study found: first the sentence for a reader in a hurry, then the others."""
    base, arms = result.study.baseline, _candidates(result)
    if result.margin is None:
        return [f"No answer yet: the baseline {base} has no finished run."]
    if wrong := [c.arm for c in result.controls if c.wrong]:
        return [f"No answer: the control {_some(wrong)} has the wrong verdict."]
    if one_seed(result):
        return _lone_answer(result, arms)
    best = _cheapest([arm for arm in arms if arm.verdict in GOOD])
    seen = [best.name] if best else []
    if best is None:
        near = f"{margin_nats(result)} a token of the loss of {result.compared_with}"
        on_par = _of(arms, INSIDE)
        said = [] if on_par else [f"No arm is shown to be within {near}."]
    else:
        said = [f"{_named(best)} is {_found(result, best)}"]
    begin = {"On par": INSIDE, "Better": (BETTER,), "Below zero, size open": (BELOW_OPEN,)}
    begin |= {"Worse": (WORSE,), "Above zero, size open": (ABOVE_OPEN,)}
    begin |= {"Undecided": (UNDECIDED,), "Diverged": ("diverged",)}
    for word, verdicts in begin.items():
        names = [name for name in _of(arms, verdicts) if name not in seen]
        if names:
            also = f"Also {word.lower()}" if best and best.verdict in verdicts else word
            said.append(f"{also}: {_some(names, len(arms))}.")
            seen += names
    if without := [arm.name for arm in arms if arm.name not in seen]:
        said.append(f"No verdict yet: {_some(without, len(arms))}.")
    said += [f"Together, {one.name} is {one.verdict}." for one in result.composites[:_TOGETHER]]
    if waiting := [control.arm for control in result.controls if control.waiting]:
        said[0] = f"Provisional until the control {_some(waiting)} is decided: {said[0]}"
    return said


def _found(result: StudyResult, best: ArmResult) -> str:
    """The verdict, bytes and gap of the cheapest arm that may be used."""
    base = result.baseline_of(best).name
    return (
        f"{_TO[best.verdict]} {base} at {percent(cost(best))} of its bytes "
        f"{_where(best)}: gap {gap_text(best)} nats a token, margin ±{best.margin or 0:.4f}."
    )


def _named(arm: ArmResult) -> str:
    return f"{arm.name} ({arm.arm.describe})" if arm.arm.describe else arm.name


def _where(arm: ArmResult) -> str:
    return "over all links" if arm.bytes_inter is None else "between nodes"


def _lone_answer(result: StudyResult, arms: Sequence[ArmResult]) -> list[str]:
    places = {arm.name: beside(result, arm, noise_bands(result)) for arm in arms}
    above = [name for name, place in places.items() if place and place.side == "above"]
    said = ["No answer yet: with one seed an arm nothing is tested."]
    if any(places.values()):
        said.append(f"Above the noise band: {_some(above, len(arms)) or 'no arm'}.")
    return said


def _candidates(result: StudyResult) -> list[ArmResult]:
    return [arm for arm in result.arms if arm.arm.role == "arm" and arm.verdict != "baseline"]


def _of(arms: Sequence[ArmResult], verdicts: Sequence[str]) -> list[str]:
    return [arm.name for arm in arms if arm.verdict in verdicts]


def _some(names: Sequence[str], of: int = 0) -> str:
    """The names as words; where they are many, their number. "" for none."""
    if len(names) > 1 and len("".join(names)) > _NAMED:
        return f"{len(names)} of {of} arms" if of else f"{len(names)} arms"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def advise(result: StudyResult, speeds: Speeds | None = None) -> list[Advice]:
    """The paragraph, sentence by sentence. `speeds`: measured tokens/s by bandwidth and arm."""
    if result.margin is None:
        return [Advice("Nothing yet: the baseline has no finished run.", 2)]
    wrong = [c.arm for c in result.controls if c.wrong]
    if wrong:
        return [Advice(f"Nothing: the control {', '.join(wrong)} has the wrong verdict.", 1)]
    arms = _candidates(result)
    if one_seed(result):
        open_arms = [*_open(result, arms, None), *_more_seeds(result)]
        return [_untested(result), *_provisional(result), *open_arms, *_bad(arms)]
    candidates = [arm for arm in arms if arm.verdict in GOOD]
    best = _cheapest(candidates)
    return [
        *_provisional(result),
        _main(result, best, bool(candidates)),
        *_by_speed(result, candidates, speeds or {}),
        *_open(result, arms, best),
        *_more_seeds(result),
        *_bad(arms),
    ]


def _provisional(result: StudyResult) -> list[Advice]:
    lone = one_seed(result)
    waiting = [
        f"{c.arm} ({c.verdict})" for c in result.controls if c.waiting and not (lone and c.untested)
    ]
    if not waiting:
        return []
    if lone:
        return [Advice(f"A control is not decided yet: {', '.join(waiting)}.", 1)]
    return [Advice(f"Provisional: a control is not decided yet, {', '.join(waiting)}.", 1)]


def _untested(result: StudyResult) -> Advice:
    base = result.study.baseline
    text = f"No arm is advised over {base}: with one seed an arm nothing is tested."
    return Advice(text, 7)


def cost(arm: ArmResult) -> float | None:
    """Bytes a step between nodes, or over all links on one node, as a share of the baseline's."""
    return arm.bytes_total if arm.bytes_inter is None else arm.bytes_inter


def _cheapest(candidates: Sequence[ArmResult]) -> ArmResult | None:
    known = [arm for arm in candidates if cost(arm) is not None]
    if not known:
        return None
    least = min(_cost(arm) for arm in known)
    near = [arm for arm in known if _cost(arm) <= least + _TIE]
    return min(near, key=_upper_end)


def _main(result: StudyResult, best: ArmResult | None, candidates: bool) -> Advice:
    base = result.study.baseline
    if best is None and candidates:  # a single rank: nobody sends anything
        return Advice(f"Stay with {base}: it sends nothing, so no arm sends less.", 3)
    if best is None:
        return Advice(f"Stay with {base}: no other arm's gap is shown to be inside the margin.", 2)
    return Advice(f"Use {_named(best)}: it is {_found(result, best)}", 3)


def _by_speed(result: StudyResult, candidates: Sequence[ArmResult], speeds: Speeds) -> list[Advice]:
    names = {arm.name for arm in candidates}
    said = []
    for bandwidth, measured in speeds.items():
        base = measured.get(result.study.baseline)
        rates = {name: rate for name, rate in measured.items() if name in names}
        if base is None or not rates:
            continue
        fastest = max(rates, key=lambda name: rates[name])
        ratio = rates[fastest] / base
        if ratio > 1 + FASTER:
            text = f"By speed, {bandwidth}: {fastest}, {ratio:.2f}× the tokens/s of the baseline."
        else:
            text = f"By speed, {bandwidth}: the baseline; no candidate was measured to be faster."
        said.append(Advice(text, 4))
    return said


def _open(result: StudyResult, arms: Sequence[ArmResult], best: ArmResult | None) -> list[Advice]:
    limit = 1.0 if best is None else _cost(best)
    tempting = [
        arm
        for arm in arms
        if arm.verdict in OPEN
        and arm is not best
        and (value := cost(arm)) is not None
        and value < limit
    ]
    if not tempting:
        return []
    if one_seed(result):
        shares = [f"{arm.name} ({percent(cost(arm))})" for arm in sorted(tempting, key=_cost)]
        return [Advice(f"Worth more seeds, by the bytes that they send: {_listed(shares)}.", 5)]
    named = _listed([f"{arm.name} ({arm.note})" if arm.note else arm.name for arm in tempting])
    return [Advice(f"Worth more seeds: {named}.", 5)]


def _more_seeds(result: StudyResult) -> list[Advice]:
    study, took = result.study, [(run.summary or {}).get("seconds") for run in result.runs]
    known = [seconds for seconds in took if seconds is not None]
    planned = max(len(study.seeds), study.max_seeds)
    still_open = any(arm.verdict in OPEN for arm in result.every)
    if not known or planned >= _SEEDS or not still_open or median(known) > _QUICK:
        return []
    more = (_SEEDS - planned) * len(result.arms) * median(known) / 60
    text = (
        f"A run took {median(known):.0f} s (median): {_SEEDS} seeds an arm in place of {planned} "
        f"take {more:.0f} more minutes, one run at a time; plan them for the next study."
    )
    return [Advice(text, 8)]


def _bad(arms: Sequence[ArmResult]) -> list[Advice]:
    worse = [arm for arm in arms if arm.verdict == WORSE]
    lost = [arm.name for arm in arms if arm.verdict == "diverged"]
    said = []
    if worse:
        named = _listed([f"{arm.name} ({gap_text(arm)})" for arm in worse])
        said.append(Advice(f"Do not use, worse: {named}.", 6))
    if lost:
        said.append(Advice(f"Do not use, diverged: {_listed(lost)}.", 6))
    return said


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _cost(arm: ArmResult) -> float:
    value = cost(arm)
    return float("inf") if value is None else value


def _upper_end(arm: ArmResult) -> float:
    assert arm.gap is not None
    return arm.gap.interval[1] if arm.gap.interval else arm.gap.mean
