"""`zpp-lab bench step`: arms, the order of turns, floors and files; and the real thing on gloo."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.fsdp_world import run_world
from tests.tools.links.shared import refusal
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.study.speed.results import read_speeds
from zpp_lab.tools.bench.step import results, run
from zpp_lab.tools.bench.step.arms import (
    COMPUTE,
    KERNELS,
    Arm,
    arms,
    compared,
    paired,
    with_compute,
)
from zpp_lab.tools.bench.step.run import Pace, StepBench, main
from zpp_lab.tools.bench.step.session import SessionError
from zpp_lab.tools.links.nodes import OneHost
from zpp_lab.train.launch import processes
from zpp_lab.train.launch.gpus import Placement

TINY = [
    "model.dim=32",
    "model.ffn=48",
    "model.vocab_size=64",
    "data.seq_len=8",
    "train.param_dtype=fp32",
    "train.reduce_dtype=fp32",
    "train.batch_size=1",
]


def test_without_gpus_the_cpu_must_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="--cpu"):
        main(["--nodes", "1", "--out", str(tmp_path / "out"), "model=tiny"])
    assert not (tmp_path / "out").exists()


class Fake:
    """Ranks that answer at once: 0.5 s a step, and arm `fails` not at all."""

    fails: str | None = None
    error = SessionError("rank 1: it is broken")
    asked: list[tuple[str, str, int]] = []

    def __init__(self, hosts: Any, placement: Placement, arms: list[Arm], folder: Path) -> None:
        self.arms, self.world = arms, placement.cluster.world

    def ask(self, limit: float, do: str, arm: int = 0, steps: int = 0) -> list[dict[str, Any]]:
        name = self.arms[arm].name
        Fake.asked.append((do, name, steps))
        if do == "steps" and name == Fake.fails and steps > 1:
            raise Fake.error
        wires = {"weights_forward": [10, 20]} if name == "zeropp" else None
        slow = [{"seconds": [0.1 * (r + 1)] * steps, "bytes": wires} for r in range(self.world)]
        idle = [None if name == "fsdp2" else 0.01] * steps
        more = {"peak": 2**30, "device": "none", "waiting": idle}
        return [{**a, **more, "replayed": name in (KERNELS, "zeropp")} for a in slow]

    def close(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.asked, Fake.fails = [], None
    monkeypatch.setattr(run, "Session", Fake)
    return Fake


def bench(folder: Path, words: list[str], tag: str = "", **changes: Any) -> StepBench:
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)
    pace = Pace(**{"steps": 3, "rounds": 2, "turn_seconds": 8, "limit": 9, "budget": 99, **changes})
    every = with_compute(arms(words, [*TINY, "cluster=1x2"]))
    made = StepBench(OneHost(), Placement(cluster), every, pace, folder, tag=tag)
    made.run([None])
    return made


def read_rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return {row["arm"]: row for row in csv.DictReader(file)}


def test_arms_take_turns_and_the_files_say_what_came_out(
    fake: type[Fake], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bench(tmp_path, ["fsdp2", "zeropp"])
    assert made.cells["zeropp", None].waiting == [0.01] * 6
    assert made.cells["fsdp2", None].waiting == []  # nobody told
    floors = {name: made._floor_of(cell) for (name, _), cell in made.cells.items()}
    assert floors == {COMPUTE: COMPUTE, KERNELS: KERNELS, "fsdp2": COMPUTE, "zeropp": KERNELS}
    timed = [name for do, name, steps in fake.asked if do == "steps" and steps == 3]
    assert timed == [COMPUTE] * 2 + [KERNELS] * 2 + ["fsdp2", "zeropp"] * 2
    assert ("drop", COMPUTE, 0) in fake.asked
    assert ("drop", KERNELS, 0) in fake.asked
    turns = [(do, steps) for do, _, steps in fake.asked if do in ("drain", "steps")]
    assert turns == [("drain", 0), ("steps", 1), ("steps", 3)] * 8  # nothing of another arm travels
    rows = read_rows(tmp_path)
    assert rows["zeropp"]["step_s"] == "0.2"  # the slowest rank's
    assert rows["zeropp"]["steps"] == "6"
    assert float(rows["zeropp"]["tokens_per_s"]) == 2 * 8 / 0.2
    assert rows["zeropp"]["wire_bytes"] == "weights_forward:10+20"
    assert rows["fsdp2"]["engine"] == "fsdp2"
    assert rows["fsdp2"]["peak_gib"] == "1"
    assert rows["fsdp2"]["share_of_floor"] == "1"
    found = {m.arm: m for m in read_speeds(tmp_path)}
    assert list(found) == ["fsdp2", "zeropp"]
    assert (found["zeropp"].tokens_per_s, found["zeropp"].gbps) == (80.0, None)
    assert found["zeropp"].machine.startswith("one host of ")
    path = tmp_path / "results.csv"
    assert (rows["zeropp"]["waiting_s"], rows["fsdp2"]["waiting_s"]) == ("0.01", "")
    for columns in (2, 4, 5, 6, 8):  # of files from before the last so many
        older = [row[:-columns] for row in csv.reader(path.open())]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(older)
        bench(tmp_path, ["qsdp"])  # another call adds to the files
        assert list(read_rows(tmp_path)) == ["fsdp2", "zeropp", COMPUTE, KERNELS, "qsdp"]
    assert "tokens/s" in capsys.readouterr().out


def test_tensor_parts_and_stages_have_rows_of_their_own(fake: type[Fake], tmp_path: Path) -> None:
    bench(tmp_path, ["zero3"])
    both = ["zero3: recipe=zero3 cluster.tp=2 train.micro_steps=2"]  # as many tokens a step
    bench(tmp_path, ["w8", *both])
    with (tmp_path / "results.csv").open() as file:
        rows = [(r["arm"], r["tp"], r["pp"], r["compute_s"]) for r in csv.DictReader(file)]
    assert ("zero3", "1", "1", "0.2") in rows
    assert ("zero3", "2", "1", "") in rows  # a rank alone computes all of the model
    assert [m.arm for m in read_speeds(tmp_path)] == ["zero3", "w8", "zero3 tp=2"]
    lines = list(csv.reader((tmp_path / "results.csv").open()))
    with (tmp_path / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows(line[:-2] for line in lines)  # as older files are
    assert [row["tp"] for row in results.read_rows(tmp_path / "results.csv")][-1] == "2"


DIFF = (
    "diff_g84h: recipe=g8_4_hadamard recipe.sharding.weights=node "
    "recipe.sharding.update=differences recipe.weights_update.bits=4"
)


def beside(words: list[str], *overrides: str) -> dict[str, str]:
    """Twins by the names of all arms that are timed."""
    settings = [*TINY, *(overrides or ["cluster=2x1"])]
    return {arm.name: arm.twin for arm in compared(arms(words, settings), settings)}


def test_plain_arms_and_twins_come_by_themselves() -> None:
    plain = dict.fromkeys(["fsdp2", "fsdp2+node", "hsdp", "fsdp2+node+graph"], "")
    assert beside([DIFF]) == {**plain, "amsp_node": "", "diff_g84h": "amsp_node"}
    assert beside(["w4", "w8"]) == {**plain, "zero3": "", "w4": "zero3", "w8": "zero3"}  # once
    assert beside(["amsp_node", DIFF]) == {**plain, "amsp_node": "", "diff_g84h": "amsp_node"}
    larger = DIFF.replace(":", "_4:", 1) + " engine.blocks_per_unit=4"
    assert beside([DIFF, larger])["diff_g84h_4"] == "diff_g84h_4_raw"  # its own units
    assert beside(["zeropp"], "cluster=1x2") == {
        "fsdp2": "",
        "fsdp2+graph": "",
        "zeropp_raw": "",
        "zeropp": "zeropp_raw",
    }
    assert list(beside(["kept: fsdp2+node model.loss_chunk=0"])) == ["fsdp2", "hsdp", "kept"]
    assert beside(["ds: recipe=zeropp engine=deepspeed"])["ds"] == ""  # a peer
    raw = "amsp_node_4: recipe=amsp_node engine.blocks_per_unit=4"
    named = paired(arms([DIFF, raw, larger, "zeropp"], [*TINY, "cluster=2x1"]))
    assert {arm.name: arm.twin for arm in named} == {
        "diff_g84h": "",
        "amsp_node_4": "",
        "diff_g84h_4": "amsp_node_4",
        "zeropp": "",
    }
    with pytest.raises(ValueError, match="rename it"):
        beside(["zeropp_raw: recipe=w4", "zeropp"])


def test_tensor_parts_and_stages_have_baselines_of_their_own() -> None:
    parts = [*TINY, "cluster=1x2", "cluster.tp=2"]
    words = ["acts8: recipe=zero3 recipe.acts.bits=8"]
    assert beside(words, *parts[-2:]) == {
        "tp": "",
        "tp+async": "",
        "tp+graph": "",
        "tp+async+graph": "",
        "zero3": "",
        "acts8": "zero3",
    }
    on_cpu = [*parts[-2:], "engine.device=cpu"]
    assert list(beside(words, *on_cpu)) == ["tp", "zero3", "acts8"]
    assert [arm.name for arm in with_compute(arms(["zero3"], parts))] == ["zero3"]  # no floor
    pipe = ["cluster=2x1", "cluster.pp=2"]
    both = ["a: recipe=zero3 recipe.stage=2", "b: recipe=zero3 recipe.stage=2 recipe.acts.bits=4"]
    assert beside(both, *pipe) == {"a": "", "b": "a"}
    one = [*parts[:-1], "cluster.tp=1"]
    for word, settings in (("fsdp2", parts), ("tp", one), ("tp", [*TINY, *pipe])):
        with pytest.raises(ValueError, match=r"cluster\.tp"):
            arms([word], settings)
    for word in ("tp", "zero3"):
        with pytest.raises(ValueError, match=r"model\.ffn"):
            arms([word], [*parts, "model.ffn=515"])
    whole = arms(["whole: fsdp2 cluster.tp=1"], parts)[0]
    assert whole.config.cluster.readers == 2


def _plain_parts(compiled: bool) -> float:
    """The largest difference of a loss or gradient from the whole model's, relative to it."""
    import torch

    from zpp_lab.models import build_model
    from zpp_lab.tools.bench.step.engines import PlainTp
    from zpp_lab.tools.bench.step.rank import random_batch

    own = ["cluster=1x4", "cluster.tp=2", "engine.device=cpu", "train.micro_steps=2"]
    own += ["model=tiny", f"engine.compile={str(compiled).lower()}"]
    config = arms([f"tp: tp {' '.join(own)}"], TINY)[0].config
    made = PlainTp(config, torch.device("cpu"))
    for name, p in made.model.named_parameters():
        if "norm" in name:  # drawn by each part for itself
            p.to_local().data.fill_(1.0)
    whole = build_model(config.model, 64, device="cpu", seed=0)
    drawn = {name: p.full_tensor().detach() for name, p in made.model.named_parameters()}
    whole.load_state_dict(drawn)
    made.passes([random_batch(config, 0, made.reader, micro) for micro in range(2)])
    for reader, micro in ((r, m) for r in range(2) for m in range(2)):
        (whole(*random_batch(config, 0, reader, micro)) / 4).backward()
    expected = dict(whole.named_parameters())
    found = {name: p.grad.full_tensor() for name, p in made.model.named_parameters()}
    off = {n: (g - expected[n].grad).abs().max() for n, g in found.items()}
    return max(float(off[n] / expected[n].grad.abs().max()) for n in found)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_plain_tensor_parallelism_has_the_whole_models_gradients(compiled: bool) -> None:
    assert run_world(4, _plain_parts, compiled) < 1e-5


def test_arms_without_memory_are_told_of_apart(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there was only one."""
    fake.fails = "zeropp"
    why = SessionError("rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(fake, "error", why)
    assert "--apart" in bench(tmp_path / "all", ["fsdp2", "zeropp"]).failed["zeropp"]
    pace = Pace(3, 2, 8, 9, 99)
    one = arms(["zeropp"], TINY)
    placed = Placement(ClusterConfig(nodes=1, gpus_per_node=2))
    alone = StepBench(OneHost(), placed, one, pace, tmp_path / "one")
    alone.run([None])
    assert alone.failed == {"zeropp": str(why)}


def test_sessions_share_a_daemon_and_a_rank_that_misses_it_gets_another(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One daemon for all arms that are timed apart; a new one after ranks that did not meet, or
    were killed."""
    events: list[str] = []

    @contextmanager
    def served(placement: Placement) -> Iterator[Placement]:
        events.append("begun")
        yield placement
        events.append("ended")

    class Late(fake):  # type: ignore[misc, valid-type]
        def __init__(self, hosts: Any, placement: Placement, arms: list[Arm], _: Path) -> None:
            super().__init__(hosts, placement, arms, _)
            events.append(arms[0].name)
            if events.count("hsdp") == 1 and arms[0].name == "hsdp":
                raise SessionError("rank 1: EmulationError: process 9 uses its GPU without MPS")

    monkeypatch.setattr(run, "Session", Late)
    monkeypatch.setattr(run, "served", served)
    fake.fails = "zeropp"
    every = arms(["fsdp2", "hsdp", "zeropp", "amsp_node"], [*TINY, "cluster=2x1"])
    apart = [replace(arm, session=arm.name) for arm in every]
    placed = Placement(ClusterConfig(nodes=2, gpus_per_node=1), ("0",), "mps")
    made = StepBench(OneHost(), placed, apart, Pace(3, 2, 8, 9, 99), tmp_path)
    made.run([None])
    assert list(made.failed) == ["zeropp"]
    assert events == [
        "begun", "fsdp2", "hsdp", "ended", "begun", "hsdp", "zeropp", "ended", "begun", "amsp_node",
        "ended",
    ]  # fmt: skip


def test_an_arm_that_fails_costs_only_itself(fake: type[Fake], tmp_path: Path) -> None:
    fake.fails = "fsdp2"
    made = bench(tmp_path, ["fsdp2", "zeropp"])
    assert made.failed == {"fsdp2": "rank 1: it is broken"}
    assert list(read_rows(tmp_path)) == [COMPUTE, KERNELS, "zeropp"]
    timed = [name for do, name, steps in fake.asked if do == "steps" and steps == 3]
    assert timed == [COMPUTE, COMPUTE, KERNELS, KERNELS, "fsdp2", "zeropp", "zeropp"]  # once each
    assert json.loads((tmp_path / "1x2.json").read_text())["failed"] == made.failed


def test_a_budget_ends_it_and_keeps_what_there_is(fake: type[Fake], tmp_path: Path) -> None:
    made = bench(tmp_path, ["fsdp2"], budget=1e-9)
    assert made.stopped
    assert not (tmp_path / "results.csv").exists()


def test_a_third_of_a_budget_is_kept_from_builds(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Slow(Fake):
        def ask(self, limit: float, do: str, **more: Any) -> list[dict[str, Any]]:
            now[0] += 25 if do == "build" else 0.1
            return super().ask(limit, do, **more)

    monkeypatch.setattr(run, "Session", Slow)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = bench(tmp_path, ["zeropp", "fsdp2", "zero3"])
    built = [name for do, name, _ in fake.asked if do == "build"]
    assert built == [COMPUTE, KERNELS, "zeropp"]
    assert made.failed == dict.fromkeys(["fsdp2", "zero3"], run.LATE)
    assert {name: row["steps"] for name, row in read_rows(tmp_path).items()} == dict.fromkeys(
        built, "6"
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_two_emulated_nodes_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte goes between nodes once: the gather saw two hosts, and the interface agrees."""
    from zpp_lab.config.compose import compose
    from zpp_lab.engines.build import build_plan
    from zpp_lab.models import build_model

    words = ["--nodes", "2", "--gpus-per-node", "2", "--link-gbps", "0.2", "--recipes", "zeropp"]
    pace = ["--steps", "2", "--rounds", "1", "--cpu", "--out", str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    assert main([*words, *pace, *TINY]) == 0
    row = read_rows(tmp_path)["zeropp"]
    config = compose(["recipe=zeropp", "cluster=2x2", "engine.gather=hierarchical", *TINY])
    planned = build_plan(build_model(config.model, 64, device="meta"), config).step_bytes()
    text = " ".join(f"{wire}:{t.intra}+{t.inter}" for wire, t in planned.items())
    assert row["wire_bytes"] == text
    ledger, measured = float(row["gb_sent_ledger"]), float(row["gb_sent_measured"])
    assert ledger == pytest.approx(sum(t.inter for t in planned.values()) / 2 / 1e9, rel=1e-4)
    assert ledger < measured < 3 * ledger  # headers, losses, the norm
    assert float(row["measured_gbps"]) < 0.4
    assert float(row["link_s"]) == pytest.approx(ledger * 8 / 0.2, rel=1e-4)
    facts = json.loads((tmp_path / "2x2.json").read_text())
    assert facts["network"]["nccl"]["NCCL_IB_DISABLE"] == "1"
    assert set(read_rows(tmp_path)) == {
        COMPUTE, "fsdp2", "fsdp2+node", "hsdp", "zeropp_raw", "zeropp",
    }  # fmt: skip
    assert row["twin"] == "zeropp_raw"
    assert row["call"]


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_nothing_is_left_of_a_bench_that_is_killed(tmp_path: Path) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "1", "--recipes", "zeropp", "--no-probe", "--cpu"]
    bench = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "zpp_lab.cli",
            "bench",
            "step",
            *words,
            "--out",
            str(tmp_path),
            *TINY,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    owner = processes.mark(bench.pid)
    ours = partial(processes.marked, lambda mark: mark == owner)
    deadline = time.monotonic() + 240
    while len(ours()) < 4:  # two holders and two ranks
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    bench.kill()
    bench.wait()
    deadline = time.monotonic() + 240
    while ours():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_compute_only_updates_a_ranks_part_from_the_gradient_of_its_batch() -> None:
    """The step that the floor is made of: forward, backward and AdamW on 1/W of each parameter."""
    import torch

    from zpp_lab.tools.bench.step.engines import ComputeOnly
    from zpp_lab.tools.bench.step.rank import random_batch

    config = with_compute(arms(["zeropp"], [*TINY, "cluster=1x2"]))[0].config
    made = ComputeOnly(config, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in made.weights.items()}
    made.step(0, lambda rank, micro: random_batch(config, 0, rank, micro))
    for name, p in made.weights.items():
        own = -(-p.numel() // 2)
        changed = (p.detach() != before[name]).view(-1)
        assert changed[:own].any(), name
        assert not changed[own:].any(), name
        assert p.grad is None
