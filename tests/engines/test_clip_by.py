"""train.clip_by=unit: each unit is clipped by its own norm and updated within backward."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engines.fsdp_jobs import virtual
from tests.engines.fsdp_world import run_world
from tests.engines.place_jobs import adapters, by_unit, clipped, not_finite_by_unit
from tests.engines.test_branches import Branches, twice
from tests.engines.uneven import batch
from tests.small_runs import small
from tests.train.test_resume import killed
from zpp_lab.codecs.numerics import clip_factor, total_norm
from zpp_lab.config.compose import compose
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.train.trainer import run


def test_two_ranks_equal_the_virtual_engine() -> None:
    assert run_world(2, by_unit, ["split", "8bit_states"], 2, 1) == {}


def test_adapters_on_a_frozen_base() -> None:
    assert run_world(2, partial(adapters, micro_steps=1, clip=0.01, clip_by="unit")) == ""


def test_a_unit_that_runs_twice_is_refused() -> None:
    config = clipped("split", 2, 1, "device", 0.01, "unit")
    with pytest.raises(ValueError, match=r"blocks\.1.*train\.clip_by=norm"):
        virtual(config, Branches(twice)).step(0, 1e-2, partial(batch, 0), telemetry=False)


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    own = partial(small, tmp_path, "train.clip_by=unit", "train.clip=0.05", "cluster=2x1")
    run(own(f"run.dir={tmp_path / 'whole'}"))
    killed(own(), 7)
    run(own())
    whole, resumed = (read(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    assert [unmeasured(row) for row in resumed] == [unmeasured(row) for row in whole]
    with pytest.raises(ValueError, match=r"train\.clip_by"):
        run(own("train.clip_by=norm"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zeropp_every", "stage2", "memory_first", "hadamard_left"])
def test_recipes(case: str) -> None:
    assert run_world(4, by_unit, [case], 2, 2) == {}


@pytest.mark.slow
def test_one_node_and_one_rank() -> None:
    assert run_world(2, by_unit, ["split_zero3"], 1, 2) == {}
    assert run_world(1, by_unit, ["split_zero3"], 1, 1) == {}


def test_each_unit_has_a_factor_of_its_own() -> None:
    """The step's gradients before and after clipping, unit by unit."""
    engine = virtual(clipped("split", 2, 1, "device", 0.01, "unit"))
    seen: list[dict[str, torch.Tensor]] = []
    clip, change = engine._clip_units, engine.cell.update

    def before(step: int, grads: dict[str, torch.Tensor]) -> None:
        seen.append({name: grad.clone() for name, grad in grads.items()})
        clip(step, grads)

    def after(grads: dict[str, torch.Tensor], lr: float, step: int) -> None:
        seen.append({name: grad.clone() for name, grad in grads.items()})
        change(grads, lr, step)

    engine._clip_units, engine.cell.update = before, after  # type: ignore[method-assign]
    engine.step(0, 1e-2, partial(batch, 0), telemetry=False)
    whole, factors = seen[0], set()
    for unit in engine.plan.units:
        own = {p.name: whole[p.name] for p in unit.unit.parameters if p.name in whole}
        factor = clip_factor(total_norm(engine.cell.squares(own)), 0.01)
        factors.add(float(factor))
        assert all(torch.equal(seen[1][name], grad * factor) for name, grad in own.items())
    assert len(factors) == len(engine.plan.units)
    assert max(factors) < 1


def test_a_norm_that_is_not_finite_names_its_unit() -> None:
    device, *others = run_world(2, not_finite_by_unit)
    assert "train.clip_by=unit" in device
    assert others == [device]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.micro_steps=2"], "train.micro_steps"),
        (["train.clip=0"], r"train\.clip"),
        (["engine=deepspeed"], "engine=deepspeed"),
        (["engine.offload=true"], "engine.offload"),
        (["train.masters=split", "engine.place={gradients: 1}"], "engine.place"),
        (["cluster.tp=2"], r"cluster\.tp"),
        (["recipe=w4_diff", "cluster=2x2"], r"recipe\.sharding\.weights"),
    ],
)
def test_what_cannot_be_clipped_by_unit_is_named(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compose(["engine=fsdp", "train.param_dtype=bf16", "train.clip_by=unit", *words])
