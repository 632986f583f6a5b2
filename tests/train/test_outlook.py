"""engine.place=auto: as little as suffices leaves the GPU, and a run keeps what was chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.small_runs import small
from zpp_lab.config.compose import compose
from zpp_lab.config.flat import every_setting
from zpp_lab.config.load import written
from zpp_lab.config.residence import LEAVING, Residence, movable
from zpp_lab.config.schema import Config
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.tools.plan.dry_run import summary_line
from zpp_lab.train.launch.launcher import train
from zpp_lab.train.memory import shards
from zpp_lab.train.memory.advice import advise, settled
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.forecast import host_bytes, memory_need
from zpp_lab.train.memory.outlook import PINNED, ROOM, Outlook, deepest, expected

LARGE = [
    *("model=13b", "model.vocab_size=32000", "engine=fsdp", "recipe=zero3", "cluster.nodes=1"),
    *("cluster.gpus_per_node=1", "train.param_dtype=bf16", "train.reduce_dtype=bf16"),
    *("train.batch_size=8", "data.seq_len=2048", "model.checkpoint_activations=true"),
    *("model.loss_chunk=2048", "engine.place=auto"),
]
SPLIT = ["train.masters=split", "train.optimizer_state=8bit"]
KINDS = {
    "split": SPLIT,
    "fp32 moments": SPLIT[:1],
    "fp32 masters": SPLIT[1:],
    "neither": [],
    "by unit": [*SPLIT, "train.clip_by=unit"],
    "nodes keep weights": [*SPLIT, "recipe=w4_diff", "cluster.nodes=2", "cluster.gpus_per_node=4"],
}


def config(kind: str = "split", *words: str) -> Config:
    return compose([*LARGE, *KINDS[kind], *words])


def far(outlook: Outlook) -> tuple[int, ...]:
    """Units by plane, the plane that goes last first."""
    return tuple(outlook.placed.get(plane, 0) for plane in LEAVING[::-1])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*KINDS]), st.floats(8, 400), st.floats(8, 400), st.floats(1, 300))
def test_a_choice_keeps_to_the_budget_and_more_memory_never_moves_more(
    kind: str, one: float, other: float, host: float
) -> None:
    small_gpu, large_gpu = (
        Outlook.of(config(kind), int(gib * GIB), int(host * GIB)) for gib in sorted((one, other))
    )
    for found in (small_gpu, large_gpu):
        assert found.budget <= found.device * (1 - 1 / ROOM) + 1
        assert found.fits == (found.estimate.peak <= found.budget and not found.over[1])
        assert set(found.placed) <= set(movable(found.config.train))
        same = replace(found.config.engine, place=found.config.engine.place)
        assert Outlook.of(replace(found.config, engine=same), found.device).estimate == (
            found.estimate
        )
    assert far(large_gpu) <= far(small_gpu)
    assert large_gpu.fits or not small_gpu.fits


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_stays_on_the_device(kind: str) -> None:
    assert Outlook.of(config(kind), 1000 * GIB).config.engine.place == "device"


@pytest.mark.parametrize("gib", [22, 44, 60, 72, 80, 100])
def test_no_unit_leaves_in_vain(gib: int) -> None:
    """Planes go in their order. Of none that has left could one unit more stay."""
    found = Outlook.of(config(), gib * GIB)
    assert found.fits
    assert list(found.placed) == [*LEAVING][: len(found.placed)]
    for plane, count in found.placed.items():
        less: Any = {**found.placed, plane: count - 1}
        other = replace(found.config, engine=replace(found.config.engine, place=less))
        assert Outlook.of(other, 0).estimate.peak > found.budget


def test_phases_share_a_placement() -> None:
    words = [
        "cluster.gpus_per_node=2",
        "recipe=zero3",
        "recipe.phases=[{after: 2, weights: {bits: 4}}]",
    ]
    found = Outlook.of(config("split", *words), 40 * GIB)
    assert found.fits
    assert len(found.phases) == 2
    assert all(phase.estimate.peak <= found.budget for phase in found.phases)
    assert {str(phase.config.engine.place) for phase in found.phases} == {
        str(found.config.engine.place)
    }


def test_the_deepest_model_fits_and_one_layer_more_does_not() -> None:
    words = ["engine.gpu_gib=40", "engine.host_gib=128"]
    found = deepest(expected(config("split", *words)))
    assert found is not None
    layers = found.config.model.layers
    assert found.fits
    assert not expected(config("split", *words, f"model.layers={layers + 1}")).fits
    assert deepest(replace(found, device=GIB)) is None


def test_forecasts_know_what_auto_will_mean() -> None:
    own = config("split", "engine.gpu_gib=60", "engine.host_gib=128")
    found = expected(own)
    assert found.host == int(PINNED * 128 * GIB)
    need = memory_need(own)
    assert need is not None
    assert (need.nbytes, host_bytes(own)) == (found.estimate.peak, found.estimate.host)
    assert f"engine.place=auto: {written(found.config.engine.place)}" in summary_line(own)
    with pytest.raises(ValueError, match=r"engine\.place"):
        Residence.of(own)


def test_a_plan_takes_each_node_for_a_host() -> None:
    own = config("nodes keep weights", "engine.gpu_gib=80", "engine.host_gib=128")
    assert expected(own).host == int(PINNED * 128 * GIB) // own.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("split", ["engine.place=host"]),
        ("neither", ["engine.place=device", "engine.offload=true"]),
    ],
)
def test_a_dry_run_warns_where_the_host_has_too_little(kind: str, words: list[str]) -> None:
    for gib, warns in ((1, True), (1000, False)):
        own = config(kind, *words, f"engine.host_gib={gib}")
        assert ("engine.host_gib" in summary_line(own)) == warns


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        ("neither", ["engine.gpu_gib=80"], "train.masters=split"),
        ("split", ["engine.gpu_gib=17"], r"train\.batch_size=\d+ train\.micro_steps="),
        ("split", ["engine.gpu_gib=44", "engine.host_gib=64"], r"train\.clip_by=unit"),
        ("fp32 moments", ["engine.gpu_gib=48", "engine.host_gib=88"], "optimizer_state=8bit"),
        (
            "split",
            [
                "engine.gpu_gib=24",
                "engine.host_gib=48",
                "model.weights=pretrained",
                "model.path=FOLDER",
            ],
            r"model\.lora\.rank=16 .*, or .*cluster\.nodes=",
        ),
    ],
)
def test_a_run_that_does_not_fit_is_told_what_would(
    kind: str, words: list[str], named: str, tmp_path: Path
) -> None:
    host = [] if "engine.host_gib" in str(words) else ["engine.host_gib=1000"]
    with pytest.raises(ValueError, match=named):
        settled(config(kind, *words, *host, f"run.dir={tmp_path}"))


def test_host_memory_that_does_not_suffice_is_counted() -> None:
    outlook = Outlook.of(config("fp32 moments"), 60 * GIB, 30 * GIB)
    assert outlook.over[0] == 0 < outlook.over[1]
    *_, last = advise(outlook)
    assert last.outlook.fits


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cluster.tp=2", "cluster.gpus_per_node=2"], r"cluster\.tp"),
        (["engine.offload=true"], r"engine\.offload"),
        (["train.optimizer_place=host", "train.optimizer_state=8bit"], r"train\.optimizer_place"),
        (["engine.share_gpus=mps"], r"engine\.share_gpus"),
    ],
)
def test_what_auto_cannot_place_is_named(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compose([*LARGE, *words])


# ---------------------------------------------------------------------- a run keeps its choice


def test_a_start_that_finds_a_checkpoint_keeps_the_placement(tmp_path: Path) -> None:
    own = partial(config, "split", f"run.dir={tmp_path}", "engine.host_gib=200")
    first, _ = settled(own("engine.gpu_gib=60"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(every_setting(first)))
    again, _ = settled(own("engine.gpu_gib=80"))
    assert again.engine.place != first.engine.place  # nothing depends on it yet
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    kept, _ = settled(own("engine.gpu_gib=80"))
    assert kept.engine.place == first.engine.place
    over, _ = settled(own("engine.gpu_gib=80", "run.resume=false"))
    assert over.engine.place == again.engine.place


@pytest.mark.slow
def test_a_run_trains_and_resumes_with_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "STAGE", 1)  # else all of so small a model passes at a time

    def run(name: str, *words: str) -> Config:
        (tmp_path / name).mkdir(exist_ok=True)
        shape = ["engine=fsdp", "cluster.nodes=1", "cluster.gpus_per_node=2", *SPLIT[:1]]
        shape += ["model.layers=6", "train.param_dtype=bf16", "data.vocab_size=256"]
        return small(tmp_path / name, *shape, *words)

    peaks = [
        Outlook.of(run("auto", f"engine.place={p}"), 0).estimate.peak for p in ("device", "host")
    ]
    assert peaks[1] < peaks[0]
    gib = (sum(peaks) / 2 * ROOM / (ROOM - 1)) / GIB
    auto = partial(run, "auto", "engine.place=auto")
    train(auto(f"engine.gpu_gib={gib}", "run.piece_steps=5"))
    stored = yaml.safe_load((tmp_path / "auto" / "run" / "config.yaml").read_text())
    place = stored["engine"]["place"]
    assert isinstance(place, dict)
    assert written(place) in capsys.readouterr().out
    train(auto("engine.gpu_gib=80"))
    assert (
        yaml.safe_load((tmp_path / "auto" / "run" / "config.yaml").read_text())["engine"]["place"]
        == place
    )
    train(run("device"))
    steps = [
        [unmeasured(row) for row in read(tmp_path / name / "run" / "metrics.jsonl")]
        for name in ("auto", "device")
    ]
    assert steps[0] == steps[1]
