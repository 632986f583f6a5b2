"""`zpp-lab plan --gpus`: every split of the model over so many GPUs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.engines.build import plan_of
from zpp_lab.tools.plan import planner
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.tools.plan.search.layouts import layouts
from zpp_lab.train.memory.buffers import GIB

MODEL = [
    "model=10m",
    "model.layers=4",
    "model.heads=8",
    "model.kv_heads=8",
    "train.param_dtype=bf16",
    "data.seq_len=256",
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "gpu_memory", lambda: None)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *MODEL, *words, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def test_every_split_trains_as_many_tokens_a_step(capsys) -> None:
    words = ["--gpus", "8", "cluster=2x4", "recipe.acts.bits=8", "train.micro_steps=2"]
    made = found(capsys, *words, "--machine", "h200", "--link-gbps", "12,max")
    splits = [(one["dp"], one["tp"], one["pp"]) for one in made["layouts"]]
    assert {(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2), (2, 4, 1), (1, 4, 2)} <= set(splits)
    assert all(dp * tp * pp == 8 for dp, tp, pp in splits)
    times = [one["links"]["12"]["step_s"] for one in made["layouts"]]
    assert times == sorted(times)
    for one in made["layouts"]:
        config = compose(one["overrides"])  # as `zpp-lab train` would
        assert config.cluster.world == 8
        assert config.tokens_per_step == compose([*MODEL, *words[2:3], *words[4:]]).tokens_per_step
        assert one["wires"] == {w: t._asdict() for w, t in plan_of(config).step_bytes().items()}
        sent = sum(one["wires"].get(w, {}).get("intra", 0) for w in ("acts_forward", "tp_raw"))
        assert (sent > 0) == (one["tp"] > 1)
        assert (one["links"]["12"]["stages_s"] > 0) == (one["pp"] > 1)
        assert ("acts_pipe" in one["wires"]) == (one["pp"] > 1)
        time = predict(config, load_machine("h200"), 12.0)
        assert one["links"]["12"]["step_s"] == pytest.approx(time.step_s)
        micros = config.train.micro_steps
        assert one["bubble"] == (one["pp"] - 1) / (micros + one["pp"] - 1)


def test_a_named_dimension_stays(capsys) -> None:
    made = found(capsys, "--gpus", "16", "cluster.tp=2")
    assert {one["tp"] for one in made["layouts"]} == {2}
    assert {one["pp"] for one in made["layouts"]} >= {1, 2}
    assert compose(made["layouts"][0]["overrides"]).cluster.gpus_per_node == 8


def test_schedules_are_of_layouts_with_stages() -> None:
    words = [*MODEL, "recipe.stage=2", "cluster.tp=1"]
    found = {
        schedule: {one.cluster.pp: one.bubble for one in layouts([*words, schedule], 4, 80)[0]}
        for schedule in ("engine.schedule=gpipe", "engine.schedule=interleaved")
    }
    gpipe, interleaved = found.values()
    assert gpipe == {1: 0.0, 2: 1 / 3, 4: 3 / 7}
    assert interleaved == {1: 0.0, 2: 1 / 5}  # four stages of a layer each


def test_what_is_not_built_with_parts_is_left_out() -> None:
    words = ["model=13b", "train.param_dtype=bf16", "cluster.tp=2", "cluster.pp=1"]
    ((one,), refused, _) = layouts(words, 16, 80)
    assert not refused
    assert not one.outlook.config.model.checkpoint_activations
    assert not one.outlook.config.model.loss_chunk


def test_passes_grow_with_the_parts_as_far_as_they_fit() -> None:
    words = [*MODEL, "cluster.tp=4", "cluster.pp=1", "train.batch_size=8"]
    (large,), *_ = layouts(words, 4, 80)
    assert large.outlook.config.train.batch_size == 32
    assert large.outlook.config.train.micro_steps == 1
    (small,), *_ = layouts(words, 4, (large.outlook.estimate.peak - 1) / GIB)
    train = small.outlook.config.train
    assert (train.batch_size, train.micro_steps) == (16, 2)
    assert small.outlook.fits


def test_memories_that_settings_name_are_kept() -> None:
    placed = ["train.masters=split", "engine.place=host"]
    words = [*MODEL, *placed, "cluster.tp=1", "cluster.pp=1", "engine.gpu_gib=40"]
    (large,), _, assumed = layouts(words, 2, None)
    assert (large.outlook.device, large.outlook.fits, assumed) == (40 * GIB, True, False)
    (small,), *_ = layouts([*words, "engine.host_gib=0.01"], 2, None)
    assert not small.outlook.fits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "10", "cluster=2x4"], r"cluster\.gpus_per_node=4"),
        (["--gpus", "8", "cluster.tp=3"], r"cluster\.tp=3"),
        (["--gpus", "8", "cluster.pp=16"], r"cluster\.pp=16"),
        (["--gpus", "8", "cluster.tp=many"], r"cluster\.tp=many"),
        (["--gpus", "8", "cluster.tp=0"], r"cluster\.tp=0"),
        (["--gpus", "8", "cluster.tp=8", "model.heads=4", "model.kv_heads=4"], r"model\.heads=4"),
        (["--gpus", "8", "--fastest"], "--fastest"),
        (["--gpus", "8", "engine=deepspeed"], "engine=deepspeed"),
        (["--fastest", "--machine", "h200", "engine=deepspeed", "recipe=zero3"], "deepspeed"),
        (["--fastest", "--machine", "h200", "engine.place=auto"], "place=auto: --fastest"),
        (["--gpus", "8", "--link-gbps", "12"], "--machine"),
    ],
)
def test_what_does_not_divide_is_named(words: list[str], message: str, capsys) -> None:
    assert main(["plan", *MODEL, *words]) != 0
    assert re.search(message, capsys.readouterr().err)


def test_a_reason_for_all_layouts_is_said_once(capsys) -> None:
    assert main(["plan", "model=13b", "--gpus", "4", "--machine", "h200"]) != 0
    assert capsys.readouterr().err.count("train.param_dtype=bf16") == 1


def test_what_layouts_are_sorted_by_is_said(capsys) -> None:
    assert found(capsys, "--gpus", "4", "--machine", "h200")["sorted_by"] == "seconds"
    assert found(capsys, "--gpus", "4")["sorted_by"] == "bytes"
    assert main(["plan", *MODEL, "--gpus", "4"]) == 0
    assert "--machine" in capsys.readouterr().out


def test_splits_that_the_model_does_not_have_are_listed(capsys) -> None:
    made = found(capsys, "--gpus", "8", "model.heads=4", "model.kv_heads=4")
    assert any("model.heads=4" in reason for reason in made["refused"])
    assert 8 not in {one["tp"] for one in made["layouts"]}
