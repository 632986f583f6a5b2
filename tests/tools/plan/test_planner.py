"""`zpp-lab plan` as a user types it: what it prints, its exit code and its advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.load import written
from zpp_lab.tools.plan import planner
from zpp_lab.tools.plan.cost.machine import Bus, load_machine
from zpp_lab.train.memory.advice import advise
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook

LARGE = ["model=1_3b", "cluster=1x4", "train.param_dtype=bf16", "data.seq_len=2048"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "gpu_memory", lambda: None)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_small_run_fits_and_its_wires_are_the_plan(capsys) -> None:
    code, found = planned(capsys, "recipe=zeropp")
    assert (code, found["fits"], found["advice"]) == (0, True, [])
    assert found["device"] == 80 * GIB
    assert found["wires"]["weights_backward"]["inter"] == 0 < found["wires"]["grads_inter"]["inter"]
    assert found["parameters"] == 393_856
    on_gpu = [i for i in found["items"] if i["place"] == "gpu"]
    assert found["peak"] == sum(i[found["peak_moment"]] for i in on_gpu)


def test_tensor_parts_have_wires_memory_and_time(capsys) -> None:
    parts = ["cluster.tp=2", "recipe.acts.bits=8", "--machine", "h200"]
    whole, found = (planned(capsys, *LARGE, *more)[1] for more in ([], parts))
    assert 0 < found["time"]["links"]["max"]["parts_s"] < found["time"]["links"]["max"]["step_s"]
    assert found["time"]["graph"]
    assert found["parameters"] == whole["parameters"]
    assert {"acts_forward", "acts_backward", "tp_raw"} <= found["wires"].keys()
    weights, logits = (
        [next(i["loss"] for i in plan["items"] if i["name"] == name) for plan in (whole, found)]
        for name in ("master weights, fp32", "logits and loss")
    )
    assert weights[1] == pytest.approx(weights[0], rel=0.01)  # over as many ranks
    assert logits[1] == pytest.approx(logits[0] / 2, rel=0.01)  # of half the vocabulary
    assert main(["plan", *LARGE, *parts]) == 0
    assert "cluster.tp=2" in capsys.readouterr().out
    pipe = ["cluster.pp=2", "recipe.stage=2", "train.micro_steps=4", "engine.schedule=interleaved"]
    assert not planned(capsys, *LARGE, *pipe, *parts[-2:])[1]["time"]["links"]  # no figures


def test_what_does_not_fit_is_answered_in_order(capsys) -> None:
    code, found = planned(capsys, *LARGE, "train.batch_size=16", "--gpu-gib", "14")
    assert (code, found["fits"]) == (1, False)
    advice = [one["overrides"] for one in found["advice"]]
    assert advice[:2] == [["model.checkpoint_activations=true"], ["model.loss_chunk=1024"]]
    peaks = [found["peak"], *(one["peak"] for one in found["advice"] if not one["instead"])]
    assert peaks == sorted(peaks, reverse=True)
    assert found["advice"][-1]["fits"]


def test_advice_keeps_the_tokens_of_a_step() -> None:
    outlook = Outlook.of(compose([*LARGE, "train.batch_size=16"]), 10 * GIB)
    halved = [a for a in advise(outlook) if a.overrides[0].startswith("train.batch_size")]
    assert halved
    for one in halved:
        train = one.outlook.config.train
        assert train.batch_size * train.micro_steps == 16


def test_a_first_hop_that_remembers_too_much_is_told_of_the_second() -> None:
    words = [*LARGE, "model=13b", "cluster=8x8", "train.batch_size=1", "recipe=g2_ef"]
    words += ["model.checkpoint_activations=true", "model.loss_chunk=1024"]
    outlook = Outlook.of(compose(words), 40 * GIB)
    (one,) = advise(outlook)
    assert one.overrides == ("recipe.grads_intra.memory.kind=none",)
    held = [o.estimate.item("error-feedback residuals").most for o in (outlook, one.outlook)]
    assert one.outlook.fits
    assert held[0] == 9 * held[1]  # W rows and N rows become N rows, of 8 × 8 ranks


def test_offload_and_more_ranks_are_alternatives() -> None:
    outlook = Outlook.of(compose([*LARGE, "model=13b", "train.batch_size=1"]), 7 * GIB)
    offloaded, more = list(advise(outlook))[-2:]
    assert offloaded.overrides == ("engine.offload=true",)
    assert not more.outlook.config.engine.offload
    assert more.instead
    assert more.outlook.fits
    assert more.outlook.config.cluster.nodes in (16, 32, 64)


def test_as_little_as_fits_goes_to_host_memory() -> None:
    words = [
        *LARGE,
        "model=13b",
        "train.batch_size=1",
        "cluster.nodes=1",
        "cluster.gpus_per_node=1",
    ]
    words += ["engine=fsdp", "recipe=zero3"]
    words += ["model.checkpoint_activations=true", "model.loss_chunk=1024"]
    outlook = Outlook.of(compose([*words, *BF16]), 66 * GIB)
    *_, state, masters, place = advise(outlook)
    assert (state.overrides, masters.overrides) == (
        ("train.optimizer_state=8bit",),
        ("train.masters=split",),
    )
    assert place.outlook.fits
    assert place.overrides == ("engine.place=auto",)
    assert "gradients" in place.outlook.placed


@pytest.mark.parametrize(("gib", "code"), [(80, 0), (0.5, 1)])
def test_the_answer_comes_first(gib: float, code: int, capsys) -> None:
    words = ["recipe=zeropp", "cluster=2x2", "--memory-gib", str(gib)]
    assert planned(capsys, *words)[1]["fits"] == (not code)
    assert main(["plan", *words]) == code
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("does not fit: " if code else "fits: ")
    assert f"{gib:.2f} GiB" in first
    advised = [i for i, line in enumerate(rest) if line.lstrip().startswith("try ")]
    tables = [i for i, line in enumerate(rest) if "each rank holds" in line]
    assert len(advised) == code
    assert all(i < tables[0] for i in advised)


BF16 = ["train.param_dtype=bf16", "train.reduce_dtype=bf16"]


def test_a_machine_adds_predicted_times_by_link(capsys) -> None:
    words = ["recipe=zeropp", "cluster=2x2", *BF16, "--machine", "h200"]
    _, found = planned(capsys, *words, "--link-gbps", "0.001,10,max")
    times = found["time"]["links"]
    assert list(times) == ["0.001", "10", "max"]
    steps = [times[link]["step_s"] for link in times]
    assert steps == sorted(steps, reverse=True)
    assert times["0.001"]["bound"] == "between nodes"
    assert main(["plan", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted on h200, ms" in shown
    assert "with engine.blocks_per_unit=4" in shown  # the host is the bound there


def test_without_figures_of_the_bus_there_is_no_step_time(capsys) -> None:
    words = ["recipe=zero3", "engine=fsdp", *BF16, "train.masters=split", "engine.place=host"]
    code, found = planned(capsys, *words, "--machine", "h200")
    assert (code, found["time"]["links"]) == (0, {})
    assert main(["plan", *words, "--machine", "h200"]) == 0
    assert "bench calibrate" in capsys.readouterr().out


def test_a_placement_is_explained(capsys, tmp_path: Path) -> None:
    bus = Bus(to_device=50e9, to_host=50e9, both=90e9, pin_s_per_gib=0.5)
    path = tmp_path / "placed.json"
    replace(load_machine("h200"), bus=bus).save(path)
    words = [*LARGE, *BF16, "engine=fsdp", "recipe=zero3", "cluster.nodes=1", "train.batch_size=1"]
    words += ["cluster.gpus_per_node=1", "train.masters=split", "engine.place=auto"]
    words = [*(word for word in words if word != "cluster=1x4"), "model.layers=6"]
    memory = ["--gpu-gib", "7", "--machine", str(path)]
    code, found = planned(capsys, *words, "engine.host_gib=4000", *memory)
    assert code == 0
    assert found["units_in_host_memory"] == found["place"]
    assert 0 < found["host"] <= found["host_limit"] < 4000 * GIB
    assert found["peak"] <= found["device"] * 15 / 16
    assert found["deepest"]["parameters"] >= found["parameters"]
    (time,) = found["time"]["links"].values()
    assert time["bus_s"] > 0
    assert time["flush_s"] > 0
    assert main(["plan", *words, *memory]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "engine.host_gib" in shown  # as nobody has said how much there is
    assert f"engine.place={written(found['place'])}" in shown
    assert f"{found['deepest']['layers']}layers" in shown
