"""recipe.shard=node: sharded inside nodes and copied across them, by an untouched FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp_jobs import CPU, real, steps, virtual
from tests.engines.fsdp_parity import configured
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints


def node(nodes: int = 2, local: int = 2, **values: Any) -> Config:
    recipe = {"name": "node", "shard": "node", **values.pop("recipe", {})}
    cluster = {"nodes": nodes, "gpus_per_node": local}
    train = {"lr": 1e-2, "clip": 0.5, "micro_steps": 2}
    engine = {"name": "fsdp", "device": "cpu", **values}
    return load(Config, {"recipe": recipe, "cluster": cluster, "train": train, "engine": engine})


def trained(folder: str) -> list[Any]:
    """How far from the virtual engine's two hops, whether nodes agree, and what was resumed."""
    engine = real(node())
    mine = steps(engine)[0]
    two_hops = configured("zero3_two_hops", 2, 2)
    two_hops = load(Config, {**as_dict(two_hops), "train": {**as_dict(node())["train"]}})
    theirs = steps(virtual(two_hops))[0]
    far = max(abs(a[i] - b[i]) for a, b in zip(mine, theirs, strict=True) for i in (0, 1))
    alike = True
    for p in engine.parameters.values():
        own = p.to_local().flatten()
        every: list[Any] = [None] * 4
        torch.distributed.all_gather_object(every, own)
        alike &= torch.equal(every[0], every[2]) and torch.equal(every[1], every[3])
    checkpoints = Checkpoints(Path(folder), 1, shared=True)
    checkpoints.save(3, engine.state_dict())
    checkpoints.wait()
    after = engine.step(3, 1e-2, partial(batch, 3), telemetry=False)
    other = real(node())
    other.load_checkpoint(next(checkpoints.newest_first()))
    again = other.step(3, 1e-2, partial(batch, 3), telemetry=False)
    return [far, alike, len(engine.wrapped.installed), after == again, ordered()]


def as_dict(config: Config) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(config)


def test_it_trains_as_two_hops_do_and_resumes(tmp_path: Path) -> None:
    far, alike, installed, resumed, said = run_world(4, trained, str(tmp_path))
    assert far < 1e-5
    assert alike
    assert installed == 0
    assert resumed
    assert "engine.ordered=true with recipe.shard=node" in said, "its sums cannot be ordered"
    whole = Saved(tmp_path / "step-00000003").state()["weights"]
    assert {n: t.shape for n, t in whole.items()} == {
        n: p.shape for n, p in build_uneven().named_parameters()
    }


def test_bytes_by_hand() -> None:
    plan = build_plan(build_uneven(), node(3, 2))
    row, back = (sum(u.forward.nbytes for u in us) for us in (plan.units, plan.units[:-1]))
    grads = sum(u.hops[0].nbytes for u in plan.units)
    moved = plan.step_bytes()
    assert moved["weights_forward"] == Traffic(6 * 1 * row, 0) * 2
    assert moved["weights_backward"] == Traffic(6 * 1 * back, 0) * 2
    assert moved["grads_intra"] == Traffic(6 * 1 * grads, 0) * 2
    assert moved["grads_inter"] == Traffic(0, 6 * grads * 2 * 2 // 3) * 2


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"secondary": True}, "does not go with recipe.secondary=true"),
        ({"hops": 2}, "recipe.hops=2"),
        ({"order": "reversed"}, "recipe.order=reversed"),
        ({"grads": {"bits": 8}}, "baseline without codecs, but grads_intra, grads_inter"),
    ],
)
def test_contradictions_are_errors(recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_plan(build_uneven(), node(recipe=recipe))


def ordered() -> str:
    config, model = node(ordered=True), build_uneven()
    try:
        FsdpEngine(model, build_plan(model, config), config, CPU)
    except ValueError as error:
        return str(error)
    return "nothing"
