from __future__ import annotations

from pathlib import Path

from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.answer import answer
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


NEGATIVE = "negative_control"
BASE = arm("zero3", "baseline", role="baseline")


def result(*arms: ArmResult, margin: float | None = 0.01) -> StudyResult:
    every = [BASE, *arms]
    study = StudyConfig("s", "?", [a.arm for a in every], [1, 2, 3])
    return StudyResult(study, every, margin)


def test_the_cheapest_usable_arm_leads_the_answer() -> None:
    found = result(
        arm("w8", "on par", 0.001, 0.5),
        arm("w4", "on par", 0.002, 0.3),
        arm("w2", "worse", 0.5, 0.1),
        arm("w3", "undecided", 0.004, 0.2, note="needs about 9 seeds"),
    )
    first, *more = answer(found)
    assert {"w4", "zero3", "30.0%", "+0.0020"} <= set(first.replace(":", "").split())
    assert first.startswith("w4 ")
    assert [line.split()[-1].rstrip(".") for line in more] == ["w8", "w2", "w3"]


def test_arms_are_ranked_by_gap_between_their_baseline_and_the_controls() -> None:
    broken = arm("broken", "worse", 1.0, 0.1, "negative_control")
    found = result(broken, arm("w2", "worse", 0.5), arm("gone", "diverged"), arm("w8", "on par"))
    assert [one.name for one in found.ranked] == ["zero3", "w8", "w2", "gone", "broken"]


def test_a_wrong_control_silences_the_answer() -> None:
    (only,) = answer(result(arm("w8", "on par", 0.0, 0.5), arm("broken", "on par", role=NEGATIVE)))
    assert "broken" in only
    waiting = arm("broken", "undecided", role=NEGATIVE)
    first, *_ = answer(result(arm("w8", "on par", 0.0, 0.5), waiting))
    assert first.startswith("Provisional")
    assert {"broken", "w8"} <= set(first.split())


def test_controls_are_no_answer() -> None:
    (only,) = answer(result(arm("order", "on par", 0.0, 0.1, "order_control")))
    assert "order" not in only.split()


def test_without_a_baseline_there_is_no_answer() -> None:
    (only,) = answer(result(arm("w8", "not run"), margin=None))
    assert "zero3" in only.split()
