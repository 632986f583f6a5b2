"""Some arms of a study alone."""

from __future__ import annotations

import pytest

from zpp_lab.cli.main import main
from zpp_lab.config.compose import load_study
from zpp_lab.study.run.plan import matching, some_arms


def test_arms_come_with_their_baselines() -> None:
    study = load_study("scale")
    some = some_arms(study, ["broken_1m", "zero3_reordered_*"])
    assert [arm.name for arm in some.arms] == [
        *(f"zero3_{size}" for size in ("1m", "10m", "125m", "350m")),
        *(f"zero3_reordered_{size}" for size in ("1m", "10m", "125m", "350m")),
        "broken_1m",
    ]
    assert [arm.name for arm in some_arms(study, ["broken_1m"]).arms] == [
        "zero3_1m", "zero3_10m", "broken_1m",
    ]  # fmt: skip
    assert some_arms(study, ["*"]) == study


def test_a_pattern_without_an_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "bits", "--arms", "zero3,w5*", "--dry-run"]) == 2
    assert "--arms w5*: no such arm; there are: zero3, zero3_reordered" in capsys.readouterr().err


def test_alone_needs_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "bits", "--alone", "--dry-run"]) == 2
    assert "--alone goes with --arms" in capsys.readouterr().err
    assert matching(load_study("bits"), ["w4*", "zero3"]) == ["zero3", "w4", "w4g4"]
