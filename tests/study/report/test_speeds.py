"""Which measurement an arm of a study has: by its recipe's settings, and why another has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from tests.study.report.fake_speeds import ZEROPP, Arm, rows, write_speeds
from zpp_lab.config.compose import compose
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.speed.results import read_speeds
from zpp_lab.study.speed.speeds import BLOCK, match, recipe_settings

LINK = {(2, 2): ("25",)}


def arm(name: str, overrides: list[str], engine: str = "virtual") -> ArmResult:
    config = asdict(compose([f"engine={engine}", *overrides]))
    run = Run(Path(name), name, 1, config)
    return ArmResult(ArmConfig(name), {1: run}, "on par")


def result(*arms: ArmResult) -> StudyResult:
    study = StudyConfig("s", "?", [a.arm for a in arms], [1], baseline=arms[0].name)
    return StudyResult(study, arms, 0.01)


def speeds(folder: Path, *arms: Arm) -> list[Any]:
    return read_speeds(write_speeds(folder, rows(arms, LINK)))


FSDP2 = Arm("fsdp2", 5.4, 0.14, "fsdp2")


def test_settings_decide_and_not_the_name(tmp_path: Path) -> None:
    measured = speeds(
        tmp_path,
        FSDP2,
        Arm("zpp", 0.9, 0.2, config=ZEROPP),
        Arm("w6", 1.0, 0.3, config={"recipe.weights.bits": 4}),
    )
    study = result(
        arm("plain", ["recipe=zero3"]),
        arm("eight_four", ["recipe=zeropp", "recipe.weights.block_size=256"]),
        arm("w6", ["recipe=w6"]),
        arm("w4", ["recipe=w4"]),
    )
    found = match(measured, study)
    assert found.matches == {"plain": ["fsdp2"], "eight_four": ["zpp"], "w4": ["w6"]}
    (place,) = found.by_place
    assert place == "25 Gb/s, 1_3b, 2 × 2"
    assert found.by_place[place]["eight_four"] == pytest.approx(8192 / 0.288, rel=1e-5)
    assert found.missing["w6"].startswith("w6 was measured with other settings: weights_backward")
    assert "bits 4 there, 6 here" in found.missing["w6"]


def test_a_step_in_other_micro_steps_has_no_measurement(tmp_path: Path) -> None:
    """The order control of two ranks is such an arm: it gathers and reduces twice a step."""
    plain, split = ["recipe=zero3"], ["recipe=zero3", "train.micro_steps=2"]
    found = match(speeds(tmp_path, FSDP2), result(arm("zero3", plain), arm("split", split)))
    assert found.matches == {"zero3": ["fsdp2"]}
    assert found.missing["split"] == "its step has 2 micro-steps, that of zero3 1"
    found = match(speeds(tmp_path, FSDP2), result(arm("zero3", split), arm("again", split)))
    assert list(found.matches) == ["zero3", "again"]


def test_engines_are_not_mixed(tmp_path: Path) -> None:
    peer = Arm("ds", 0.9, 0.4, "deepspeed", ZEROPP | {"engine.name": "deepspeed"})
    ours = Arm("zeropp", 0.9, 0.2, config=ZEROPP)
    half = ["recipe=zeropp", "engine.deterministic=false"]
    study = result(arm("zeropp", half), arm("theirs", half, "deepspeed"))
    assert match(speeds(tmp_path / "both", peer, ours), study).matches == {
        "zeropp": ["zeropp"],
        "theirs": ["ds"],
    }
    assert "engine=fsdp" in match(speeds(tmp_path / "one", peer), study).missing["zeropp"]


def test_a_table_by_hand_is_matched_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "arm,nodes,gpus_per_node,link_gbps,tokens_per_s\nzero3,4,8,100,1000\nw4,4,8,100,2500.5\n"
    )
    found = match(read_speeds(path), result(arm("zero3", []), arm("w4", ["recipe=w4"])))
    assert found.by_place == {"100 Gb/s, 4 × 8": {"zero3": 1000.0, "w4": 2500.5}}


def test_configs_of_older_tables_come_from_the_file_beside(tmp_path: Path) -> None:
    table = [row | {"config": ""} for row in rows([Arm("fast", 0.9, 0.2)], LINK)]
    write_speeds(tmp_path, table)
    study = result(arm("w4", ["recipe=w4"]))
    assert match(read_speeds(tmp_path), study).matches == {}
    config = asdict(compose(["recipe=w4"]))
    config["model"]["preset"] = "1_3b"
    (tmp_path / "2x2.json").write_text(json.dumps({"config": {"fast": config}}))
    assert match(read_speeds(tmp_path), study).matches == {"w4": ["fast"]}
    config["model"]["preset"] = "10m"  # a later call's: not this row's
    (tmp_path / "2x2.json").write_text(json.dumps({"config": {"fast": config}}))
    assert match(read_speeds(tmp_path), study).matches == {}


def test_defaults_are_those_of_the_codec() -> None:
    from zpp_lab.codecs.families.block import BlockCodec

    codec = BlockCodec()
    own = [f.name for f in fields(codec) if f.name != "bits"]
    assert {n: getattr(BLOCK, n) for n in own} == {n: getattr(codec, n) for n in own}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"weights": {"bits": 8}}, {"weights": {"bits": 8, "symmetric": True}}, True),
        ({"weights": {"bits": 8}}, {"weights_forward": {"bits": 8}}, False),
        ({}, {"exempt": {"max_ndim": 2}}, True),  # nothing is quantized: nothing is exempt
        ({"weights": {"bits": 8}}, {"weights": {"bits": 8}, "exempt": {"max_ndim": 2}}, False),
        ({"order": "reversed"}, {}, False),
        ({"name": "a"}, {"name": "b"}, True),
        ({"weights": {"codec": "none"}}, {}, True),
        ({"stage": 2}, {"sharding": {"weights": "none"}}, True),
        (
            {"stage": 1},
            {"sharding": dict.fromkeys(("weights", "grads", "optimizer"), "none")},
            False,
        ),
    ],
)
def test_what_a_recipe_does(one: Mapping[str, Any], other: Mapping[str, Any], same: bool) -> None:
    assert (recipe_settings(one) == recipe_settings(other)) is same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_s": "fast"}, r"line 2: tokens_per_s='fast': use a number above 0"),
        ({"nodes": "1.5"}, r"line 2: nodes='1.5': use a whole number"),
        ({"link_gbps": "-3"}, r"line 2: link_gbps"),
        ({"step_max_s": "nan"}, r"line 2: step_max_s"),
        ({"config": "{"}, r"line 2: config: "),
        ({"config": '{"recipe.bits": 4}'}, r"line 2: config: recipe.bits: "),
    ],
)
def test_faults_of_a_table_name_their_place(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    table = rows([FSDP2], LINK)
    table[0] |= change
    with pytest.raises(ValueError, match=message):
        read_speeds(write_speeds(tmp_path, table))
