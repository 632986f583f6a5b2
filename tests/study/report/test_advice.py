from __future__ import annotations

from pathlib import Path

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.advice import advise, answer
from zpp_lab.study.judge.stats import summarize
from zpp_lab.study.judge.verdict import ArmResult, StudyResult


def arm(
    name: str,
    verdict: str,
    gap: float = 0.0,
    inter: float = 1.0,
    role: str = "arm",
    note: str = "",
) -> ArmResult:
    gaps = {1: gap - 0.001, 2: gap, 3: gap + 0.001}
    summary = None if verdict in ("baseline", "diverged") else summarize(list(gaps.values()), 0.01)
    config = ArmConfig(name, role=role)  # type: ignore[arg-type]
    run = Run(Path(name), name, 1, {"recipe": {"name": f"recipe_{name}"}})
    return ArmResult(config, {1: run}, verdict, note, gaps, summary, 2.3, inter, inter, 0.01)


BASE = arm("zero3", "baseline", role="baseline")


def result(*arms: ArmResult, margin: float | None = 0.01) -> StudyResult:
    every = [BASE, *arms]
    study = StudyConfig("s", "?", [a.arm for a in every], [1, 2, 3])
    return StudyResult(study, every, margin)


def said(found: StudyResult, rule: int, speeds: dict | None = None) -> str:
    return " ".join(one.text for one in advise(found, speeds) if one.rule == rule)


def test_the_cheapest_candidate_is_advised() -> None:
    found = result(
        arm("w8", "on par", 0.001, 0.5),
        arm("w4", "on par", 0.002, 0.3),
        arm("w2", "worse", 0.5, 0.1),
        arm("w3", "undecided", 0.004, 0.2, note="needs about 9 seeds"),
        arm("w6", "undecided", 0.004, 0.4),
    )
    for told in (said(found, 3), answer(found)[0]):
        assert {"w4", "zero3", "30.0%", "+0.0020"} <= set(told.replace(":", "").split())
    assert answer(found)[0].startswith("w4 ")
    assert said(found, 5) == "Worth more seeds: w3 (needs about 9 seeds)."
    assert "w2 (+0.5000" in said(found, 6)


def test_arms_are_ranked_by_gap_between_their_baseline_and_the_controls() -> None:
    broken = arm("broken", "worse", 1.0, 0.1, "negative_control")
    found = result(broken, arm("w2", "worse", 0.5), arm("gone", "diverged"), arm("w8", "on par"))
    assert [one.name for one in found.ranked] == ["zero3", "w8", "w2", "gone", "broken"]


def test_a_wrong_control_silences_the_advice() -> None:
    wrong = arm("broken", "on par", role="negative_control")
    advice = advise(result(arm("w8", "on par", 0.0, 0.5), wrong))
    assert [(one.rule, "broken" in one.text) for one in advice] == [(1, True)]
    waiting = arm("broken", "undecided", role="negative_control")
    found = result(arm("w8", "on par", 0.0, 0.5), waiting)
    assert said(found, 1).startswith("Provisional")
    assert said(found, 3).startswith("Use w8")


def test_controls_are_never_advised() -> None:
    found = result(arm("order", "on par", 0.0, 0.1, "order_control"))
    assert said(found, 2) == (
        "Stay with zero3: no other arm's gap is shown to be inside the margin."
    )


def test_without_a_baseline_nothing_is_said() -> None:
    (only,) = advise(result(arm("w8", "not run"), margin=None))
    assert only.text.startswith("Nothing yet")


def test_speed_decides_at_each_bandwidth() -> None:
    found = result(arm("w8", "on par", 0, 0.5), arm("w4", "on par", 0, 0.3), arm("w2", "worse", 1))
    speeds = {
        "25 Gbit/s": {"zero3": 100.0, "w8": 150.0, "w4": 210.0, "w2": 500.0},
        "400 Gbit/s": {"zero3": 100.0, "w8": 101.0},
        "none": {"w8": 99.0},
    }
    text = said(found, 4, speeds)
    assert "By speed, 25 Gbit/s: w4, 2.10× the tokens/s of the baseline." in text
    assert "By speed, 400 Gbit/s: the baseline" in text  # 1 % is no lead
    assert "none" not in text
