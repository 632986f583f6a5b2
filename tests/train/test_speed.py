"""What a record says of speed: MFU is a formula over a known peak, and is left out elsewhere."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.engines.fsdp_world import run_world
from tests.small_runs import small
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of
from zpp_lab.models import build_model
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.train import speed, trainer
from zpp_lab.train.speed import Meter, peak_flops, step_flops
from zpp_lab.train.trainer import run

CPU = torch.device("cpu")


@pytest.mark.parametrize("more", [(), ("model.checkpoint_activations=true",)])
def test_flops_are_those_that_torch_counts_without_what_is_done_again(more: tuple) -> None:
    config = compose(["model=tiny", "cluster=1x2", "train.batch_size=2", "data.seq_len=32", *more])
    own = step_flops(plan_of(config), config, 256)
    model = build_model(config.model, 256, device="cpu", seed=1)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops()
    if more:
        assert own < 2 * counted
        return
    m = config.model
    half = m.layers * 3 * 2 * 32 * m.dim * 2 * 32  # of attention's square, which torch counts whole
    assert own == 2 * (counted - half)


def test_peaks_are_of_whole_gpus_that_somebody_has_looked_up() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB")
    assert [peak_flops(name) for name in names] == [989e12, 989e12, 756e12, 312e12]
    unknown = ("", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H300", "AMD Instinct MI300X", "NVIDIA L400")
    assert [peak_flops(name) for name in unknown] == [None] * 5


def test_mfu_is_flops_over_seconds_gpus_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def meter(*words: str) -> Meter:
        config = compose(["model=tiny", "cluster=1x2", "train.param_dtype=bf16", *words])
        return Meter(plan_of(config), config, CPU, 256)

    assert meter().facts() is None
    assert "mfu" not in meter().step(1.0, {})
    monkeypatch.setattr(speed, "peak_flops", lambda gpu: 1e12)
    one, two = meter(), meter("engine=fsdp")
    assert (one.gpus, two.gpus) == (1, 2)  # the virtual engine plays all ranks on one
    flops = one.facts()["flops_per_step"]
    assert one.step(0.5, {})["mfu"] == 2 * two.step(0.5, {})["mfu"] == flops / 0.5 / 1e12
    for without in ("train.param_dtype=fp32", "engine.share_gpus=mps"):
        assert meter(without).facts() is None


def on_each_rank(*configs: Config) -> str:
    """What all ranks say while they run these."""
    with redirect_stdout(io.StringIO()) as said:
        for config in configs:
            run(config, dist.get_rank())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said.getvalue())
    return "".join(every)


@pytest.mark.parametrize("engine", ["virtual", "fsdp"])
def test_a_profile_is_a_trace_of_each_process_and_changes_no_bit(
    tmp_path: Path, engine: str
) -> None:
    words = [f"engine={engine}", "cluster=1x2", "train.steps=5", "train.eval_every=5"]
    whole = small(tmp_path, *words, f"run.dir={tmp_path / 'plain'}")
    configs = whole, small(tmp_path, *words, "train.profile=2:3")
    said = run_world(1 if engine == "virtual" else 2, on_each_rank, *configs)
    plain, traced = (
        [unmeasured(line) for line in read(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "run")
    )
    assert plain == traced
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [f.name for f in files] == [f"rank{r}.json" for r in range(len(files))]
    assert len(files) == (1 if engine == "virtual" else 2)
    for file in files:
        named = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert named >= {"step 2", "step 3", "aten::mm"}
        assert not named & {"step 1", "step 4"}
    assert said.count("profile of steps 2 to 3") == said.count("memory snapshot") == 1


def test_a_step_that_may_begin_early_is_named_and_timed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the trainer asks for comes between; the time between counts to the later one."""
    build, log, named, clock = trainer.build_engine, trainer.Tracker.log, [], [0.0]

    def built(*args: Any) -> Any:
        engine = build(*args)
        own = engine.step

        def step(number: int, *args: Any) -> Any:
            clock[0] += 10
            named.extend([number + 1] if args[-1] is not None else [])
            return own(number, *args)

        engine.step = step
        return engine

    def logged(*args: Any) -> None:
        clock[0] += 1
        log(*args)

    monkeypatch.setattr(trainer, "build_engine", built)
    monkeypatch.setattr(trainer.Tracker, "log", logged)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    # counted from 0: telemetry in 0 and 9; before 5 and 10 an evaluation, before 6 a checkpoint
    words = ["eval_every=5", "checkpoint_every=6", "profile=3:4"]
    config = small(tmp_path, *(f"train.{word}" for word in words), "tracking.telemetry_every=10")
    run(config)
    assert named == [1, 3, 7, 8, 11]  # the trace is of 2 and 3
    rates = [row["tokens_per_second"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    fresh = {0, 6}  # the first, and the one after a checkpoint
    assert rates == [config.tokens_per_step / (10 if i in fresh else 11) for i in range(12)]
