"""`zpp-lab dashboard`: a file without a key, pages with one, and every way it can go wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import FakeWandb
from zpp_lab.cli.main import main
from zpp_lab.config.compose import load_study
from zpp_lab.study.wandb_pages import command
from zpp_lab.study.wandb_pages.spec import make_spec, read_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")


def test_offline_it_writes_the_folders_pages(
    study_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(study_root), "--entity", "team"]) == 0
    file = study_root / "dashboard.json"
    assert f"zpp-lab dashboard --apply {file}" in capsys.readouterr().out
    spec = read_spec(file)
    assert (spec["study"], spec["project"], spec["entity"]) == ("fake", "mine", "team")
    verdicts = spec["text"]
    assert "| w4 |" in verdicts
    assert "worse" in verdicts


def test_a_server_that_refuses_is_one_line(
    study_root: Path, dead_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Any) -> list[str]:
        raise ConnectionError("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zpp_lab.study.wandb_pages.command.apply", refuse)
        assert main(["dashboard", str(study_root)]) == 1
    assert "(ConnectionError" in capsys.readouterr().err
    assert (study_root / "dashboard.json").exists()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ValueError, match=r"zpp_lab\[dashboard\]"):
        command.pages(make_spec(load_study("smoke"), project="p"), "e")


def test_pages_are_sent_with_gaps_over_tokens_and_time(fake_wandb: FakeWandb) -> None:
    assert len(command.apply(make_spec(load_study("smoke"), project="p", entity="e"))) == 2
    for view in fake_wandb.views:
        for name in ("gap_vs_zero3/heldout_loss", "tokens", "seconds"):
            assert name in view["spec"]


@pytest.mark.parametrize(
    ("own", "there"),
    [("stage=2 sharding.update=differences", True), ("sharding.weights=node", True), ("", False)],
)
def test_panels_of_new_weights_where_an_arm_sends_them(own: str, there: bool) -> None:
    study = load_study("smoke")
    overrides = [*study.arms[-1].overrides, *(f"recipe.{word}" for word in own.split())]
    arms = [*study.arms[:-1], replace(study.arms[-1], overrides=overrides)]
    spec = make_spec(replace(study, arms=arms), project="p")
    assert ("weights_update" in json.dumps(spec)) == there


@pytest.mark.parametrize("words", [["no_such_study"], ["--apply", "spec.json"], ["."]])
def test_mistakes_are_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps(make_spec(load_study("smoke"), project="p")))
    assert main(["dashboard", *words]) == 2
    said = capsys.readouterr().err
    assert any(fix in said for fix in ("no_such_study", "WANDB_API_KEY", "study.yaml"))
