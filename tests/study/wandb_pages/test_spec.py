"""What the pages show: losses, gap, bytes, errors and verdicts, of this study's runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.config.compose import load_study
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.study.report.style import study_looks
from zpp_lab.study.wandb_pages.spec import Spec, gap_names, make_spec, read_spec, write_spec


@pytest.fixture(scope="module")
def spec() -> Spec:
    return make_spec(load_study("smoke"), project="p", entity="e", verdicts="| w4 | on par |")


def panels(spec: Spec) -> Iterator[dict[str, Any]]:
    for section in spec["workspace"]["sections"]:
        yield from section["panels"]


def series(spec: Spec) -> dict[str, dict[str, Any]]:
    return {name: panel for panel in panels(spec) for name in panel.get("y", ())}


def test_the_study_is_named_and_its_runs_are_chosen_by_group(spec: Spec) -> None:
    assert (spec["study"], spec["project"], spec["entity"]) == ("smoke", "p", "e")
    runs = {key: value for key, value in spec["runs"].items() if key != "colors"}
    assert runs == {"group": "smoke", "not_job_type": "report", "group_by": "job_type"}


def test_arms_have_the_colours_of_the_reports_figures(spec: Spec) -> None:
    looks = study_looks(load_study("smoke"))
    assert spec["runs"]["colors"] == {arm: look.color for arm, look in looks.items()}
    arms = [ArmConfig("zero3"), *(ArmConfig(f"w{i}") for i in range(30))]
    study = StudyConfig("many", "?", arms=arms, seeds=[1])
    told = ["zero3", "w29", "w3"]
    colors = make_spec(study, project="p", told=told)["runs"]["colors"]
    assert colors == {arm: look.color for arm, look in study_looks(study, told).items()}
    assert list(colors) == told


def test_sections_hold_what_a_researcher_looks_for(spec: Spec) -> None:
    names = [section["name"] for section in spec["workspace"]["sections"]]
    assert names == ["Verdicts", "Loss", "Gap", "Bytes", "Errors"]
    drawn = series(spec)
    assert {"loss", "heldout_loss", "gap_vs_zero3/loss", "gap_vs_zero3/heldout_loss"} <= set(drawn)
    assert drawn["loss"]["x"] == "step"
    assert drawn["gap_vs_zero3/heldout_loss"]["x"] == "gap_vs_zero3/step"
    assert {f"bytes/{w}/inter" for w in ("weights_forward", "grads_inter")} <= set(drawn)
    found = {p["regex"] for p in panels(spec) if "regex" in p}
    assert "telemetry/grads_intra/[^/]+/nmse" in found
    assert {"kind": "table", "name": "verdicts"} in list(panels(spec))
    assert all(p["group_by"] == "job_type" for p in panels(spec) if p["kind"] in ("line", "bar"))


def test_the_report_opens_with_the_question_and_has_the_verdicts(spec: Spec) -> None:
    blocks = spec["report"]["blocks"]
    assert blocks[0]["text"].startswith(f"**{load_study('smoke').question}**")
    assert "±0.25%" in blocks[0]["text"]
    assert {"kind": "markdown", "text": "| w4 | on par |"} in blocks
    tables = [b for b in blocks if b["kind"] == "panels" and b["runs"] == "report"]
    assert tables[0]["panels"] == [{"kind": "table", "name": "verdicts"}]
    assert spec["report"]["description"] == load_study("smoke").question


def test_each_baseline_of_a_study_has_its_gap() -> None:
    arms = [
        ArmConfig("small", role="baseline"),
        ArmConfig("large", role="baseline"),
        ArmConfig("large_w4", against="large"),
    ]
    study = StudyConfig(name="s", question="q", arms=arms, seeds=[1], baseline="small")
    assert gap_names(study) == ["gap_vs_small", "gap_vs_large"]
    assert "gap_vs_large/loss" in series(make_spec(study, project="p"))


def test_a_file_comes_back_and_others_are_refused(spec: Spec, tmp_path: Path) -> None:
    write_spec(tmp_path / "a.json", spec)
    assert read_spec(tmp_path / "a.json") == spec
    for text in ("no json", "[]", '{"format": 99}'):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match="zpp-lab dashboard"):
            read_spec(tmp_path / "b.json")
