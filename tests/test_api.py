"""`zpp_lab.shard` in a foreign training loop: a molecular encoder trains with quantized wires."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from examples.molecules import MoleculeEncoder, molecules, train
from tests.engines.fsdp_world import run_world
from zpp_lab.api import _named, _recipe, init, recipe, shard
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.engines.fsdp.mesh import Ranks
from zpp_lab.files import amount, conf_dir, percents

KEPT_SUMS = ("recipe.sharding.weights=node", "recipe.sharding.grads=node")


TWO_NODES = ClusterConfig(nodes=2, gpus_per_node=1)


def loop(recipe_name: str) -> list[Any]:
    """Losses of the example's loop, and what went over the wires."""
    model = _model()
    named = recipe_name if recipe_name == "zero3" else _small(recipe_name)
    losses, sharded = train(model, named, TWO_NODES, steps=4)
    sent = {wire: list(t) for wire, t in sharded.bytes.items()}
    return [losses, sent, len(sharded.wrapped.installed)]


def test_ranks_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        init("gloo")


def _model() -> MoleculeEncoder:
    torch.manual_seed(0)
    return MoleculeEncoder(width=32, layers=2)


def hand_written() -> list[float]:
    """The same loop with averaged gradients and no sharding, for comparison."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(4):
        loss = model(molecules(step, dist.get_rank()))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def eval_between() -> list[float]:
    """Forwards without gradients, and without a backward, change nothing in training."""
    results = []
    for disturbed in (False, True):
        model = _model()
        sharded = shard(model, _small("zeropp"), TWO_NODES, units=list(model.layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if disturbed:
                with torch.no_grad():
                    model(molecules(99, dist.get_rank()))
            loss = model(molecules(step, dist.get_rank()))
            loss.backward()
            sharded.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append(loss.item())
    return results


def divided() -> list[float]:
    """The gradients' norm with FSDP2's own settings of division and of when to reduce."""

    def norm(micro_steps: int, factor: float | None, forced: bool, skip: bool) -> float:
        model = _model()
        cluster = ClusterConfig(nodes=2, gpus_per_node=2)
        sharded = shard(model, "zero3_reordered", cluster, units=list(model.layers))
        for unit in sharded.wrapped.by_name.values():
            unit.set_force_sum_reduction_for_comms(forced)
            if factor is not None:
                unit.set_gradient_divide_factor(factor)
        for micro in range(micro_steps):
            model.set_requires_gradient_sync(micro == micro_steps - 1 or not skip)
            model(molecules(micro, dist.get_rank())).backward()
        return sharded.clip_grad_norm_(1e9).item()

    return [
        norm(1, None, False, False),
        norm(1, 2.0, False, False),
        norm(1, 2.0, True, False),
        norm(1, None, True, False),
        norm(3, None, False, False),
        norm(3, None, False, True),
    ]


def node_sums() -> list[str]:
    """What a second micro-step says to sums that stay in the node: where the loop does not tell
    which one is the last, and where FSDP2 is told."""
    said = []
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)
    for tells in (False, True):
        model = _model()
        shard(model, recipe("zero3_reordered", *KEPT_SUMS), cluster, units=list(model.layers))
        try:
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1 or not tells)
                model(molecules(micro, dist.get_rank())).backward()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def landed() -> list[Any]:
    """Plain FSDP2's reductions: whose they are, and whether gradients are FSDP2's own, after two
    micro-steps and with weights of either dtype."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        grads = []
        for own in (False, True):
            model = _model().to(dtype)
            sharded = shard(model, "zero3", TWO_NODES, units=list(model.layers), param_dtype="bf16")
            for unit in sharded.wrapped.by_name.values():
                found += [type(g._reduce_scatter_comm).__name__ for g in _groups(unit)]
                if own:
                    unit.set_custom_reduce_scatter(DefaultReduceScatter())
            for micro in range(2):
                model(molecules(micro, dist.get_rank())).backward()
            grads.append([p.grad.to_local() for p in model.parameters() if p.grad is not None])
        assert {g.dtype for g in grads[0]} == {dtype}
        found.append(all(map(torch.equal, *grads)) and any(g.any() for g in grads[0]))
    return found


def _groups(unit: Any) -> list[Any]:
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in groups or [state._fsdp_param_group] if g is not None]


def summarized() -> list[Any]:
    """What each rank prints when a model is sharded, and what the plan says of its bytes."""
    printed = StringIO()
    with redirect_stderr(printed):
        sharded = shard(_model(), _small("zeropp"), "2x2", param_dtype="bf16")
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, printed.getvalue())
    quantized = sharded.plan.quantized_share()
    wires = {
        wire: [amount(sum(sent)), percents([quantized[wire]])]
        for wire, sent in sharded.plan.step_bytes().items()
    }
    return [of_ranks, wires, repr(sharded)]


def kept_bytes() -> list[Any]:
    """What all ranks sent from one update to the next with node-replicated weights, and the plan's
    bytes."""
    model = _model()
    sharded = shard(model, _small("amsp_node"), TWO_NODES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        sharded.reset_bytes()
        model(molecules(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(sharded.bytes))
    sent = {wire: [sum(own[wire][i] for own in every) for i in (0, 1)] for wire in every[0]}
    return [sent, {wire: list(t) for wire, t in sharded.plan.step_bytes().items()}]


def unfilled() -> list[str]:
    """What a gather of node-replicated weights raises before the nodes got them."""
    sharded = shard(_model(), _small("amsp_node"), "2x2")
    said = []
    for unit in sharded.wrapped.installed:
        try:
            unit.gather.pack([], backward=False)
        except ValueError as error:
            said.append(str(error))
    return said


def of_two_ranks() -> dict[str, Any]:
    """Jobs whose answers need no node of several ranks."""
    return {
        "plain": hand_written(),
        **{name: loop(name) for name in ("zero3", "zero3_reordered", "zeropp")},
        "evaluated": eval_between(),
        "landed": landed(),
        "kept_bytes": kept_bytes(),
    }


def of_four_ranks() -> dict[str, Any]:
    return {
        "divided": divided(),
        "node_sums": node_sums(),
        "wrong": wrong_meshes(),
        "twice": twice(),
        "cut": cut(),
        "summarized": summarized(),
        "unfilled": unfilled(),
    }


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """One start of ranks serves all jobs of a world."""
    found: dict[str, Any] = run_world(2, of_two_ranks)
    return found | run_world(4, of_four_ranks)


def _small(name: str) -> Any:
    return recipe(name, "recipe.weights.block_size=16", "recipe.grads.block_size=16")


def test_zero3_follows_the_hand_written_loop(answers: dict[str, Any]) -> None:
    losses, _, installed = answers["zero3"]
    assert installed == 0, "FSDP2 is untouched"
    assert losses == pytest.approx(answers["plain"], rel=1e-4)


def test_zeropp_learns_with_fewer_bytes(answers: dict[str, Any]) -> None:
    raw, raw_sent, _ = answers["zero3_reordered"]
    losses, sent, installed = answers["zeropp"]
    assert installed == 3
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(raw[0], rel=0.05)
    assert sum(map(sum, sent.values())) < 0.6 * sum(map(sum, raw_sent.values()))


def test_bytes_of_node_replicated_weights_are_the_plans(answers: dict[str, Any]) -> None:
    sent, planned = answers["kept_bytes"]
    assert sent == planned
    assert sent["weights_update"][1] > 0


def test_node_replicated_weights_that_were_never_filled_are_not_used(
    answers: dict[str, Any],
) -> None:
    assert len(answers["unfilled"]) == 3
    assert all("recipe.sharding.weights" in said for said in answers["unfilled"])


def test_evaluation_leaves_no_trace(answers: dict[str, Any]) -> None:
    quiet, disturbed = answers["evaluated"]
    assert quiet == disturbed


def test_fsdp2s_own_settings_of_the_reduction_hold(answers: dict[str, Any]) -> None:
    usual, factor, factor_forced, forced, every, once = answers["divided"]
    assert factor == factor_forced == 2 * usual, "four ranks, divided by two"
    assert forced == usual
    assert once == pytest.approx(every, rel=1e-5)
    assert once > 1.5 * usual


def test_sums_in_the_node_need_to_know_the_last_micro_step(answers: dict[str, Any]) -> None:
    untold, told = answers["node_sums"]
    assert "set recipe.sharding.grads=world, or model.set_requires_gradient_sync" in untold
    assert told == ""


def test_plain_gradients_are_fsdp2s_own_wherever_they_lie(answers: dict[str, Any]) -> None:
    assert set(answers["landed"]) == {"LandedReduce", True}


def wrong_meshes() -> list[str]:
    """What `shard` says to each."""
    said = []
    cluster = ClusterConfig(nodes=4, gpus_per_node=1)
    for given in (ClusterConfig(nodes=2, gpus_per_node=n) for n in (1, 4)):
        try:
            shard(_model(), "zero3", given)
        except ValueError as error:
            said.append(str(error))
    for names, shape, given in (
        (("a", "b"), (2, 2), None),
        (("nodes", "gpus", "dp"), (2, 2, 1), None),
        (("gpus", "nodes"), (2, 2), None),
        (("nodes", "gpus"), (2, 2), cluster),
        (("dp", "tp"), (2, 2), cluster),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        try:
            shard(_model(), "zero3", given, mesh=mesh, tp=1)
        except ValueError as error:
            said.append(str(error))
    return said


def twice() -> list[str]:
    """What `shard` says to a model that it, or FSDP2, has sharded."""
    said = []
    for first in (lambda model: shard(model, "zero3", "2x2"), fully_shard):
        model = _model()
        first(model)
        try:
            shard(model, "zero3", "2x2")
        except ValueError as error:
            said.append(str(error))
    return said


def cut() -> list[list[int]]:
    """Nodes × GPUs of one dimension, as torchrun lies it over hosts, and as it is asked for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for local in ("4", "2", "1"):
        os.environ["LOCAL_WORLD_SIZE"] = local
        found += [Ranks.pick(m, None).cluster for m in (None, mesh, mesh["tp"])]
    del os.environ["LOCAL_WORLD_SIZE"]
    found.append(Ranks.pick(mesh, ClusterConfig(nodes=2, gpus_per_node=1)).cluster)
    return [[c.nodes, c.gpus_per_node] for c in found]


def test_a_mesh_says_which_ranks(answers: dict[str, Any]) -> None:
    one, two = [1, 2], [2, 1]
    assert answers["cut"] == [[1, 4], one, one, [2, 2], two, one, [4, 1], two, two, two]


def test_a_wrong_mesh_is_told_how_to_write_it(answers: dict[str, Any]) -> None:
    fixes = [
        "2 × 1 needs 2 processes",
        "2 × 4 needs 8 processes",
        'init_device_mesh(DEVICE, (NODES, GPUS), mesh_dim_names=("nodes", "gpus"))',
        "name either nodes and gpus, or dp",
        "nodes",
        "cluster=",
        "cluster of 2",
    ]
    for fix, said in zip(fixes, answers["wrong"], strict=True):
        assert fix in said


def test_a_model_is_sharded_once(answers: dict[str, Any]) -> None:
    assert len(answers["twice"]) == 2
    assert all("zpp_lab.shard" in said for said in answers["twice"])


def test_rank_0_summarizes_the_recipe_in_one_line(answers: dict[str, Any]) -> None:
    (first, *others), wires, shown = answers["summarized"]
    assert shown == "Sharded(recipe='zeropp', ranks=2 × 2, units=3)"
    assert others == [""] * 3
    assert first.count("\n") == 1
    for wire, (sent, quantized) in wires.items():
        assert f"{wire} {sent} ({quantized} quantized)" in first
    assert "2 × 2" in first
    assert "bf16" in first


def test_a_recipe_is_a_name_a_file_or_settings(tmp_path: Path) -> None:
    file = conf_dir() / "recipe" / "zeropp.yaml"
    found = [
        _recipe(given) for given in ("zeropp", file, str(file), yaml.safe_load(file.read_text()))
    ]
    assert found == [recipe("zeropp")] * 4
    ruled = {"weights": {"codec": "block"}, "rules": [{"name": "w_up", "set": {"bits": 4}}]}
    assert _recipe(ruled).rules[0].set.bits == 4  # a rule's bits are enough for codec=block
    with pytest.raises(ValueError):
        _recipe(tmp_path / "no.yaml")
    with pytest.raises(ValueError, match=r"weights\.bit: .*\bbits\b"):
        _recipe({"weights": {"bit": 8}})
    with pytest.raises(ValueError, match="wires: "):
        _recipe({"wires": {"grads_intra": {"bits": 4}}})


def test_units_are_found() -> None:
    """Every module of a class that a list repeats, of lists in lists the outer one's."""
    assert [name for name, _ in _named(_model(), None)] == ["layers.0", "layers.1"]
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in "ab"))
    assert [name for name, _ in _named(nn.ModuleDict({"x": inner}), None)] == ["x.0", "x.1"]
    assert _named(nn.Linear(2, 2), None) == []


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(ValueError):
        shard(nn.Linear(2, 2), "zero3", "1x1", units=[nn.ReLU()])
    with pytest.raises(ValueError, match="recipe=None"):
        shard(nn.Linear(2, 2), None, "1x1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cluster='2 by 2'"):
        shard(nn.Linear(2, 2), "zero3", "2 by 2")
    with pytest.raises(ValueError, match="not-a-recipe"):
        recipe("not-a-recipe")
    with pytest.raises(ValueError, match=r"recipe\.acts"):
        shard(nn.Linear(2, 2), {"acts": {"bits": 8}}, "1x1")  # nothing would carry them
    with pytest.raises(ValueError, match=r"cluster\.pp=2"):
        shard(nn.Linear(2, 2), "zero3", ClusterConfig(1, 2, pp=2))
