"""Studies of rewards: a margin in points, and pages that speak of failures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.rl.test_reward_model import SMALL as PAIRS
from tests.train.rl.test_runs import SMALL
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import read_metrics, write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.export import run_rows
from zpp_lab.study.report.figures.curves import run_curves
from zpp_lab.study.report.report import build_report
from zpp_lab.study.run.plan import Planner
from zpp_lab.train.memory.forecast import foresee
from zpp_lab.train.trainer import run


def test_a_study_of_rewards_is_judged_in_points(tmp_path: Path) -> None:
    arms = {"raw": "recipe.name=raw", "r4": "recipe.weights_rollout.bits=4"}
    study = StudyConfig(
        name="tiny",
        question="?",
        baseline="raw",
        seeds=[1, 2],
        points=5,
        arms=[
            ArmConfig("raw", ["recipe=base"], role="baseline"),
            ArmConfig("r4", ["recipe=base", "recipe.weights_rollout.bits=4"]),
        ],
    )
    foreseen: dict[str, float | None] = {}
    for arm, override in arms.items():
        for seed in study.seeds:
            place = [f"run.dir={tmp_path / arm / f'seed{seed}'}", f"data.cache_dir={tmp_path}/data"]
            whose = [f"run.arm={arm}", "run.study=tiny", f"seed={seed}", "recipe=base"]
            more = ["rl.rewards=[format]", f"recipe.name={arm}", override, "train.steps=2"]
            config = compose([*SMALL, *place, *whose, *more])
            foreseen[arm] = foresee(config).step_bytes
            run(config)
    result = read_result(tmp_path, study)
    assert result.margin == 0.05
    assert not any("train.eval_tokens" in text for text in (*result.notes, result.arms[1].text))
    gaps = {arm.name: len(arm.gaps) for arm in result.arms}
    assert gaps["r4"] == 2
    for row in run_rows([result], [tmp_path]):  # rollouts count too
        sent = [row[name] for name in row if name.startswith("bytes_weights_rollout")]
        assert sum(sent) > 0
        every = (row[n] for n in row if n.startswith("bytes_") and n.endswith(("intra", "inter")))
        assert sum(every) == 2 * row["bytes_per_step"] == 2 * foreseen[row["arm"]]
        assert (row["quantized_weights_rollout"] > 0.9) == (row["arm"] == "r4")
    report = build_report(tmp_path, study)
    pictures = [p for p in report.figures if p.suffix == ".svg"]
    assert {"gap.svg", "gap_steps.svg", "loss.svg"} <= {p.name for p in pictures}
    write_study(tmp_path, study)
    assert main(["dashboard", str(tmp_path)]) == 0
    spec = json.loads((tmp_path / "dashboard.json").read_text())
    panels = [p for section in spec["sections"] for p in section["panels"]]
    shown = [name for panel in panels for name in panel.get("y", [])]
    assert {"rl/reward", "rl/kl", "rl/clipped", "rl/flat_groups", "rl/mismatch"} <= {*shown}
    assert "(failures)" in spec["text"]
    texts = [p.read_text() for p in (report.html, report.markdown, report.latex, *pictures)]
    for text in [*texts, report.table]:
        assert not re.search(r"\bnats\b", text)
        assert "erplexity" not in text
    for text in (report.markdown.read_text(), report.latex.read_text(), report.table):
        assert "5 points of success" in text
        assert "failures" in text
    curve = run_curves(result.arms[0].runs[1])
    rows = read_metrics(result.arms[0].runs[1].dir)
    assert curve.training[1] == 1 - rows[0]["rl"]["success"]
    assert curve.heldout[2] == rows[1]["heldout_loss"]


@pytest.mark.parametrize(
    ("overrides", "points", "named"),
    [
        (SMALL, None, "points.*task=rl"),
        ((), 5, "points.*task=text"),
        ((*SMALL, "rl.rewards=[learned]", "rl.learned=x"), 5, r"rl\.rewards"),
    ],
)
def test_points_need_a_success(
    tmp_path: Path, overrides: Sequence[str], points: float | None, named: str
) -> None:
    def planned(points: float | None) -> None:
        arms, given = [ArmConfig("raw", role="baseline")], [*overrides]
        study = StudyConfig("s", "?", arms, [1], given, baseline="raw", points=points)
        Planner(study, tmp_path, compose)

    with pytest.raises(ValueError, match=named):
        planned(points)
    if points is None:
        planned(5)


def test_a_learned_reward_that_says_what_success_is_gets_a_note() -> None:
    learned = (*SMALL, "rl.learned=x", "rl.weights=[1,0]")
    notes = [
        compose([*learned, f"rl.rewards={names}", *more]).notes
        for names, more in (
            ("[learned,exact]", []),
            ("[exact,learned]", []),
            ("[learned,exact]", ["task=text"]),
        )
    ]
    assert ["rl.rewards" in "".join(own) for own in notes] == [True, False, False]


def test_a_study_of_reward_models_speaks_of_pairs(tmp_path: Path) -> None:
    study = StudyConfig(
        name="tiny",
        question="?",
        baseline="raw",
        seeds=[1, 2],
        arms=[ArmConfig("raw", role="baseline"), ArmConfig("w4", ["recipe=w4"])],
    )
    for arm, recipe in {"raw": "base", "w4": "w4"}.items():
        for seed in study.seeds:
            place = [f"run.dir={tmp_path / arm / f'seed{seed}'}", f"data.cache_dir={tmp_path}/data"]
            whose = [f"run.arm={arm}", "run.study=tiny", f"seed={seed}", f"recipe={recipe}"]
            more = ["train.steps=2", "train.eval_tokens=100000", "data.max_bytes=0"]
            run(compose([*PAIRS, *place, *whose, f"recipe.name={arm}", *more]))
    result = read_result(tmp_path, study)
    (w4,) = [arm for arm in result.arms if arm.name == "w4"]
    assert len(w4.gaps) == 2
    assert w4.verdict != "not judged"
    assert w4.documents is not None
    text = build_report(tmp_path, study).markdown.read_text()
    assert "pair" in text
    assert "nats a token" not in text
    assert "Perplexity" not in text
