"""Points of the grid recipe.sharding: copies stay equal, bytes are those counted by hand, and equal
sums give equal losses. The parity table has every point on both engines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp_jobs import real, steps, virtual
from tests.engines.fsdp_parity import RAW_GRID, configured, kept
from tests.engines.fsdp_world import run_world
from tests.engines.test_kept import equal
from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.config.load import load
from zpp_lab.config.recipe import POINTS
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints


def cut(*point: str, nodes: int = 2, local: int = 2, **train: Any) -> Config:
    sharding = dict(zip(("weights", "grads", "optimizer"), point, strict=True))
    recipe = {"name": "cut", "hops": 2, "sharding": sharding}
    cluster = {"nodes": nodes, "gpus_per_node": local}
    train = {"lr": 1e-2, "clip": 0.5, "micro_steps": 2, **train}
    engine = {"name": "fsdp", "device": "cpu"}
    return load(Config, {"recipe": recipe, "cluster": cluster, "train": train, "engine": engine})


# ---------------------------------------------------------------------- copies


def copies(folder: str) -> dict[str, list[Any]]:
    """Of each case whether ranks of one place hold equal bits, whether our collectives serve, and
    how a run goes on that was saved: here, and in the virtual engine."""
    found = {}
    for case in ("grid_node_node_node", "grid_none_none_none"):
        config = configured(case, 2, 2)
        engine = real(config)
        steps(engine, 3)
        own = [p.to_local().flatten() for p in engine.parameters.values()]
        every: list[Any] = [None] * 4
        torch.distributed.all_gather_object(every, own)
        pairs = [(0, 2), (1, 3)] if engine.shards == 2 else [(0, 1), (0, 2), (0, 3)]
        alike = all(map(torch.equal, every[a], every[b]) for a, b in pairs)
        checkpoints = Checkpoints(Path(folder) / case, 1, shared=True)
        checkpoints.save(3, engine.state_dict())
        checkpoints.wait()
        after = engine.step(3, 1e-2, partial(batch, 3), telemetry=False)
        saved, other, twin = next(checkpoints.newest_first()), real(config), virtual(config)
        other.load_checkpoint(saved)
        twin.load_state_dict(saved.state())
        ways = [e.step(3, 1e-2, partial(batch, 3), telemetry=False) for e in (other, twin)]
        same = [(w.loss, w.grad_norm) == (after.loss, after.grad_norm) for w in ways]
        ends = [equal(kept(e), kept(engine)) for e in (other, twin)]
        found[case] = [alike, len(engine.wrapped.installed) > 0, *same, *ends]
    return found


def test_copies_stay_equal_and_every_engine_goes_on(tmp_path: Path) -> None:
    assert set(map(all, run_world(4, copies, str(tmp_path)).values())) == {True}
    for case in tmp_path.iterdir():
        whole = Saved(case / "step-00000003").state()["weights"]
        assert {n: t.shape for n, t in whole.items()} == {
            n: p.shape for n, p in build_uneven().named_parameters()
        }


# ---------------------------------------------------------------------- bytes


def test_bytes_by_hand() -> None:
    """On 3 × 2 ranks, with two micro-steps."""

    def of(*point: str) -> tuple[dict[str, Traffic], int, int, int]:
        plan = build_plan(build_uneven(), cut(*point, nodes=3))
        rows = [sum(u.forward.nbytes for u in us) for us in (plan.units, plan.units[:-1])]
        return plan.step_bytes(), *rows, sum(u.hops[0].nbytes for u in plan.units)

    moved, row, back, grads = of("node", "node", "node")
    assert moved["weights_forward"] == Traffic(6 * 1 * row, 0) * 2
    assert moved["weights_backward"] == Traffic(6 * 1 * back, 0) * 2
    assert moved["grads_intra"] == Traffic(6 * 1 * grads, 0) * 2
    assert moved["grads_inter"] == Traffic(0, 6 * 2 * grads), "once a step"
    moved, _, _, grads = of("none", "none", "none")
    assert moved["weights_forward"] == moved["weights_backward"] == Traffic(0, 0)
    assert moved["grads_intra"] == Traffic(6 * 1 * grads, 0) * 2, "there and back"
    assert moved["grads_inter"] == Traffic(0, 6 * 2 * grads)
    moved, _, _, grads = of("none", "node", "world")
    assert moved["grads_intra"] == Traffic(6 * 1 * 3 * grads, 0) * 2
    assert moved["grads_inter"] == Traffic(0, 6 * 2 * grads)
    every, _, _, _ = of("none", "world", "world")
    assert every["grads_inter"] == moved["grads_inter"] * 2


# ---------------------------------------------------------------------- losses


def losses(case: str, **train: Any) -> list[float]:
    config = configured(case, 2, 2)
    config = replace(config, train=replace(config.train, **train))
    return [result[0] for result in steps(virtual(config), 3)[0]]


def test_equal_sums_give_equal_losses() -> None:
    """To the bit. With one reduction all points sum alike; with several micro-steps those do whose
    gradients are cut alike."""
    found = [losses(case, micro_steps=1) for case in RAW_GRID]
    assert found == [found[0]] * len(POINTS)
    by_grads: dict[str, list[list[float]]] = {}
    for case, point in zip(RAW_GRID, POINTS, strict=True):
        by_grads.setdefault(point[1], []).append(losses(case, param_dtype="fp32"))
    assert {grads: len(each) for grads, each in by_grads.items()} == {
        "none": 3,
        "node": 4,
        "world": 3,
    }
    for each in by_grads.values():
        assert each == [each[0]] * len(each)
    assert len({str(each[0]) for each in by_grads.values()}) > 1, "sums differ in their order"


# ---------------------------------------------------------------------- errors


class Now(torch.nn.Module):
    """Uses one of its weights in the micro-steps alone whose tokens are 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.now = (torch.nn.Parameter(torch.randn(8, 4)) for _ in range(2))

    def units(self) -> list[tuple[str, torch.nn.Module]]:
        return []

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        used = self.always if bool(tokens.any()) else self.always + self.now
        return used.square().mean()


def now_and_then() -> list[str]:
    said = []
    for make in (real, virtual):
        engine = make(cut("none", "node", "node"), Now())
        batches = lambda rank, micro: (torch.full((2, 4), micro),) * 2  # noqa: E731
        with pytest.raises(ValueError) as error:
            engine.step(0, 1e-2, batches, telemetry=False)
        said.append(str(error.value))
    return said


def test_sums_that_would_stay_in_the_node_are_an_error() -> None:
    for said in run_world(4, now_and_then):
        assert "now had a gradient in some micro-steps" in said
        assert "use recipe.sharding.grads=world" in said
