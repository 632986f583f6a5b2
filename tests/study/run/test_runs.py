from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from tests.study.fake_runs import ARMS, FakeArm, write_run
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.schema import RecipeConfig, RuleConfig
from zpp_lab.runs.reader import find_runs, last_step, read_json, read_metrics, read_run, read_study
from zpp_lab.study.judge.arms import study_of
from zpp_lab.study.judge.verdict import judge_study
from zpp_lab.study.run import attempts

ZERO3, W4 = ARMS[0], ARMS[5]


def test_finds_run_folders_anywhere_but_not_inside_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "deep" / "er" / "b", W4, 2, steps=2)
    write_run(tmp_path / "a", ZERO3, 1, steps=2)
    write_run(tmp_path / "a" / "checkpoints" / "x", ZERO3, 1, steps=2)
    (tmp_path / "empty").mkdir()
    found = find_runs(tmp_path)
    assert [(run.arm, run.seed, run.outcome) for run in found] == [
        ("zero3", 1, "finished"),
        ("w4", 2, "finished"),
    ]
    assert found[1].config["recipe"]["weights"]["bits"] == 4
    with pytest.raises(ValueError):
        find_runs(tmp_path / "none")


def test_metrics_of_a_killed_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ZERO3, 1, steps=5)
    path = tmp_path / "a" / "metrics.jsonl"
    assert last_step(tmp_path / "a") == 5
    path.write_text(path.read_text()[:-10])
    assert [row["step"] for row in read_metrics(tmp_path / "a")] == [1, 2, 3, 4]
    assert last_step(tmp_path / "a") == 4
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "garbage\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path / "a")
    assert read_metrics(tmp_path) == []
    assert last_step(tmp_path) == 0


def test_a_run_that_failed_before_its_config_is_told_by_its_folder(tmp_path: Path) -> None:
    for name in ("seed7", "other"):
        (tmp_path / "w4" / name).mkdir(parents=True)
    failure = json.dumps({"outcome": "crashed", "error": "no data"})
    (tmp_path / "w4" / "seed7" / "failure.json").write_text(failure)
    (run,) = find_runs(tmp_path)
    assert (run.arm, run.seed, run.outcome) == ("w4", 7, "crashed")
    (tmp_path / "w4" / "other" / "failure.json").write_text(failure)
    assert find_runs(tmp_path) == [run]  # a refused start does not stand in a report's way
    with pytest.raises(ValueError, match="seed"):
        read_run(tmp_path / "w4" / "other")


def test_plain_runs_become_arms_by_recipe_and_settings(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"base{seed}", ZERO3, seed, steps=2)
        for bits in (4, 2):
            arm = FakeArm("zero3", "", gap=0.5, weight_bits=bits)
            write_run(tmp_path / f"w{bits}-{seed}", arm, seed, steps=2)
    study, runs, notes = study_of("sweep", find_runs(tmp_path))
    names = [arm.name for arm in study.arms]
    assert names[0] == study.baseline == "zero3"
    assert names[1].startswith("zero3 weights.bits=2")
    assert study.seeds == [1, 2, 3]
    assert len(runs) == 9
    assert not notes
    assert judge_study(study, runs).arms[0].verdict == "baseline"


@pytest.mark.parametrize(
    "recipe",
    [
        RecipeConfig(weights=CodecConfig(codec="lattice")),
        RecipeConfig(rules=[RuleConfig(set=CodecConfig(bits=2))]),
    ],
)
def test_a_quantized_run_is_no_baseline_whatever_it_is_called(
    recipe: RecipeConfig, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        config = write_run(tmp_path / name, ZERO3, 1, steps=2)
    (tmp_path / "b" / "config.yaml").write_text(
        yaml.safe_dump(asdict(replace(config, recipe=recipe)))
    )
    study, runs, _ = study_of("x", find_runs(tmp_path)[1:])
    assert [run.arm for run in runs] != [study.baseline]
    study, runs, _ = study_of("x", find_runs(tmp_path))
    assert study.baseline == "zero3"
    assert {run.arm: run.dir.name for run in runs}["zero3"] == "a"


def test_an_arm_of_the_users_own_name_keeps_it(tmp_path: Path) -> None:
    """Also where it begins as a sweep's does, such as "w4 weights.block_size=64"."""
    for arm, lr in (("w4 tuned", 1e-3), ("w4 train.lr=0.002", 2e-3), ("w4 train.lr=0.004", 4e-3)):
        config = write_run(tmp_path / arm, W4, 1, steps=2)
        run = replace(config.run, arm=arm)
        config = replace(config, run=run, train=replace(config.train, lr=lr))
        (tmp_path / arm / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    study, _, _ = study_of("x", find_runs(tmp_path))
    names = {arm.name for arm in study.arms}
    assert "w4 tuned" in names
    assert {name for name in names if "train.lr=" in name} == names - {"w4 tuned", "zero3"}


def test_a_study_file_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("name: a\nnew_thing: 5\n")
    with pytest.raises(ValueError, match=r"(?s)study\.yaml: .*new_thing: "):
        read_study(tmp_path)


def test_a_file_that_goes_while_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start removes failure.json; a report may be reading just then."""
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert read_json(tmp_path / "failure.json") is None
    assert attempts.attempts(tmp_path) == []
