"""What the pages show: losses, gap, bytes, errors and verdicts, of this study's runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.config.compose import load_study
from zpp_lab.config.study import ArmConfig, StudyConfig
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
