"""Weights that nodes keep (recipe.sharding): what they equal, what differences lose
and bring back, what a failed step leaves alone, and how runs go on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.collectives.shared import Told
from tests.engines.fsdp_parity import DIFFERENCES, KEPT, Q4, Q8, configured, kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch, build_uneven
from tests.runs.test_checkpoint import engine_of, train, virtual_of, written
from tests.small_runs import small
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.train.trainer import run


def virtual(recipe: dict[str, Any], **settings: Any) -> VirtualEngine:
    """On 2 × 2, weights gathered in bf16."""
    base = configured("zero3_bf16", 2, 2)
    made = load(RecipeConfig, {"name": "case", **recipe})
    config: Config = replace(base, recipe=made, train=replace(base.train, **settings))
    model = build_uneven()
    return VirtualEngine(model, build_plan(model, config), config)


def trained(engine: VirtualEngine) -> list[Any]:
    heldout = [batch(99, i, 0) for i in range(3)]
    return [*train(engine, 0, 4), engine.evaluate(4, heldout, True), kept(engine)]


def same(a: list[Any], b: list[Any]) -> bool:
    tensors = all(torch.equal(t, b[-1][n]) for n, t in a[-1].items())
    return a[:-1] == b[:-1] and a[-1].keys() == b[-1].keys() and tensors


@pytest.mark.parametrize(
    ("bits", "own"), [({}, {}), ({"weights_update": Q4}, {"weights": Q4})], ids=["raw", "4 bits"]
)
def test_one_way_to_the_node_is_zero3(bits: dict[str, Any], own: dict[str, Any]) -> None:
    """With raw bytes inside the node, gathering from what it keeps changes no bit."""
    assert same(trained(virtual({**KEPT, **bits})), trained(virtual({"hops": 2, **own})))


def test_between_nodes_weights_travel_once_a_step() -> None:
    plan = virtual({**KEPT, "weights_update": Q8}, micro_steps=3).plan
    moved = plan.step_bytes()
    whole = sum(u.update.nbytes for u in plan.units)
    assert moved["weights_update"] == Traffic(0, 4 * whole)  # 4 ranks, to one other node each
    forward = sum(u.forward.nbytes for u in plan.units)
    assert moved["weights_forward"] == Traffic(3 * 4 * 2 * forward, 0)  # 2 rows to one neighbour
    assert moved["weights_backward"].inter == 0 < moved["weights_backward"].intra
    assert plan.quantized_share()["weights_update"] > 0.5
    assert "weights_update" not in virtual({}).plan.step_bytes()


def test_whole_weights_get_the_same_differences_and_are_gathered_once_a_step() -> None:
    whole = {**DIFFERENCES, "sharding": {"weights": "none", "update": "differences"}}
    recipes = [{**recipe, "weights_update": Q4} for recipe in (DIFFERENCES, whole)]
    cut, once = (virtual(recipe, micro_steps=2) for recipe in recipes)
    moved, less = cut.plan.step_bytes(), once.plan.step_bytes()
    assert moved.pop("weights_forward") == less.pop("weights_forward") * 2
    assert moved.pop("weights_backward").intra > 0 == less.pop("weights_backward").intra
    assert less == moved
    assert same(trained(cut), trained(once))


def far(engine: VirtualEngine) -> float:
    """The largest distance of what nodes keep from the masters, where bits are sent."""
    names = [n for u in engine.plan.units for n in u.remembered]
    pairs = [(engine.cell.sources[n], engine.cell.master[n].detach()) for n in names]
    return max(float((kept - master).abs().max()) for kept, master in pairs)


def test_what_a_difference_loses_is_part_of_the_next_one() -> None:
    """Once the masters stay, every step brings the node 4 bits nearer to them."""
    settings = {"weight_decay": 0.0, "param_dtype": "fp32"}
    engine = virtual({**DIFFERENCES, "weights_update": Q4}, **settings)
    engine.step(0, 1e-1, partial(batch, 0), telemetry=False)
    found = [far(engine)]
    for step in range(1, 5):
        engine.step(step, 0.0, partial(batch, step), telemetry=False)
        found.append(far(engine))
    assert all(later < before / 10 for before, later in pairwise(found)), found


def test_small_steps_cost_little() -> None:
    """A difference's error is a share of the step, that of the weights a share of the weights."""
    lost = {}
    for update in ("weights", "differences"):
        sharding = {"weights": "node", "update": update}
        engine = virtual({"hops": 2, "sharding": sharding, "weights_update": Q4})
        engine.step(0, 1e-3, partial(batch, 0), telemetry=False)
        names = [s.name for u in engine.plan.units for s in u.update.segments]
        lost[update] = sum(
            float((engine.cell.sources[n] - engine.cell.master[n].detach()).square().sum())
            for n in names
        )
    assert lost["differences"] < lost["weights"] / 100


def beside() -> list[bool]:
    engine, streams = engine_of("differences", 2, 1), Told()
    updates = engine.kept.updates
    engine.kept.under_way.streams = streams
    for update in updates:
        update.streams = streams
    train(engine, 0, 1)
    own = [u.arrived for u in updates]
    encodes, sends = "weights_update", engine.kept.under_way.lane
    ready = [mark for on, what, mark in streams.log if (on, what) == (encodes, "mark")]
    ready = [mark for mark in ready if mark not in own and mark < own[-1]]
    new = [mark for on, what, mark in streams.log if (on, what) == ("main", "mark")]
    gone = [mark for on, what, mark in streams.log if (on, what) == (sends, "mark")]
    wanted: list[tuple[str, str, int]] = []
    for i in range(len(own)):
        wanted += [
            ("main", "mark", new[i]),
            (encodes, "wait", new[i]),
        ]  # the unit's masters are new
        wanted += [(encodes, "mark", ready[i]), (sends, "wait", ready[i]), (sends, "mark", gone[i])]
        if i:  # while the next one travels
            wanted += [(encodes, "wait", gone[i - 1]), (encodes, "mark", own[i - 1])]
    wanted += [(encodes, "wait", gone[-1]), (encodes, "mark", own[-1])]
    wanted += [(encodes, "mark", own[-1] + 1), (encodes, "wait", own[-1] + 1)]
    found = [streams.log[-len(wanted) :] == wanted]
    streams.log.clear()
    train(engine, 1, 2)
    waits = [mark for on, what, mark in streams.log if (on, what) == ("main", "wait")]
    assert waits[0] == own[0], "the root gathers first"
    found.append(set(waits) == set(own) and waits[-len(own) :] == own)  # before masters change
    now = [u.arrived for u in updates]
    streams.log.clear()
    engine.state_dict()
    found.append([mark for _, _, mark in streams.log[: len(now)]] == now)
    engine.step(2, 1e-2, partial(batch, 2), telemetry=True)
    found.append(all(on == "main" for on, _, _ in streams.log))
    return found


def test_new_weights_travel_beside_the_next_forward() -> None:
    """On a stream of their own, the root's first; each gather waits for its own unit's, and
    the next update for all. Where rounding is looked at, they travel in turn."""
    assert run_world(2, beside) == [True] * 4


# ---------------------------------------------------------------------- a step that fails


def held(engine: Any) -> dict[str, Tensor]:
    """A copy of what a rank keeps."""
    if isinstance(engine, VirtualEngine):
        return {n: t.clone() for n, t in engine.cell.sources.items()}
    rows = [u.update.kept for u in engine.wrapped.installed]
    return {n: row.rows.clone() for unit in rows for n, row in unit.items()}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    same = all(torch.equal(t, wanted[n]) for n, t in found.items())
    return same and found.keys() == wanted.keys()


def after_a_bad_step(engine: Any) -> list[bool]:
    """Whether masters and what is kept are as before, and a repeat ends as if nothing had been."""
    train(engine, 0, 2)
    before = kept(engine), held(engine)
    hook = engine.model.register_forward_hook(lambda module, inputs, loss: loss * torch.inf)
    with pytest.raises(NonFiniteError):
        train(engine, 2, 3)
    hook.remove()
    stays = equal(kept(engine), before[0]), equal(held(engine), before[1])
    train(engine, 2, 3)
    return [*stays, not equal(held(engine), before[1])]


def bad_steps() -> dict[str, list[bool]]:
    return {case: after_a_bad_step(engine_of(case, 2, 1)) for case in ("kept", "differences")}


def test_a_step_that_is_not_finite_changes_nothing_that_is_kept() -> None:
    assert after_a_bad_step(virtual_of("differences_drawn", 2, 2)) == [True] * 3
    assert run_world(2, bad_steps) == {"kept": [True] * 3, "differences": [True] * 3}


# ---------------------------------------------------------------------- going on


def every_way_on(folder: str) -> dict[str, list[Any]]:
    """Steps 3 to 5 of an undisturbed run, of one that resumed, of the virtual engine that went on
    from the real one's checkpoint, and of the real one that went on from the virtual one's, with
    one block a unit where the first run had more; and what all of them hold in the end."""
    found = {}
    for case, blocks in {"kept": 1, "differences": 2, "differences_whole": 1}.items():
        engine, again = (engine_of(case, 2, 1, blocks_per_unit=blocks) for _ in range(2))
        store = Checkpoints(Path(folder) / case, 1, shared=True)
        train(engine, 0, 3)
        store.save(3, engine.state_dict())
        results = [train(engine, 3, 5)]
        store.wait()
        saved = Saved(store.path(3))
        twin, back = virtual_of(case, 2, 1), engine_of(case, 2, 1)
        again.load_checkpoint(saved)
        twin.load_state_dict(saved.state())
        back.load_state_dict(twin.state_dict())
        ways = [again, twin, back]
        results += [train(e, 3, 5) for e in ways]
        end = kept(engine)
        found[case] = [results, [equal(kept(e), end) for e in ways], bool(saved.kept_names)]
    return found


def test_every_engine_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    for case, (results, ends, remembers) in run_world(2, every_way_on, str(tmp_path)).items():
        assert [r == results[0] for r in results] == [True] * 4, case
        assert ends == [True] * 3
        assert remembers == (case != "kept"), "weights by themselves follow from the masters"


def from_others(folder: str) -> list[bool]:
    """A checkpoint without what nodes keep, all of it or of one weight: they begin with its
    masters, rounded. And nodes that hold other bits save nothing."""
    plain = virtual_of("zero3_bf16", 2, 1)
    train(plain, 0, 2)
    real, twin = engine_of("differences", 2, 1), virtual_of("differences", 2, 1)
    if real.rank == 0:
        written(Path(folder), 2, plain)
    torch.distributed.barrier()
    real.load_checkpoint(Saved(Path(folder) / "step-00000002"))
    twin.load_state_dict(plain.state_dict())
    found = [equal(kept(real), kept(twin)), train(real, 2, 4) == train(twin, 2, 4)]
    found.append(equal(kept(real), kept(twin)))
    less, gone = twin.state_dict(), "layers.0.up.weight"
    less["kept"] = {n: t.clone() for n, t in less["kept"].items() if n != gone}
    if real.rank == 0:
        store = Checkpoints(Path(folder) / "less", 1)
        store.save(4, less)
        store.wait()
    torch.distributed.barrier()
    real.load_checkpoint(Saved(Path(folder) / "less" / "step-00000004"))
    twin.load_state_dict(less)
    master = twin.cell.master[gone].detach().to(twin.cell.sources[gone].dtype)
    found.append(equal(kept(real), kept(twin)) and torch.equal(twin.cell.sources[gone], master))
    if real.rank == 1:
        real.wrapped.installed[0].update.kept["layers.0.up.weight"].rows[0, 3] += 1
    with pytest.raises(RuntimeError, match=r"node 1 .*layers\.0\.up\.weight"):
        real.state_dict()
    return found


def test_runs_begin_with_other_recipes_states(tmp_path: Path) -> None:
    assert run_world(2, from_others, str(tmp_path)) == [True] * 4


def on_another_cluster(folder: str) -> bool:
    """What nodes keep is the same weights, however many there are."""
    saved = Saved(Path(folder) / "step-00000003")
    engine = engine_of("differences", 3, 1)
    engine.load_checkpoint(saved)
    return equal(kept(engine), kept(Loaded(saved)))


class Loaded:
    """A checkpoint's own tensors, as `kept` asks an engine for them."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved

    def state_dict(self) -> Any:
        return self.saved.state()


def test_another_number_of_nodes_reads_what_was_kept(tmp_path: Path) -> None:
    engine = virtual_of("differences", 2, 2)
    train(engine, 0, 3)
    written(tmp_path, 3, engine)
    assert run_world(3, on_another_cluster, str(tmp_path))


@pytest.mark.parametrize("recipe", ["w4_diff", "sdp4bit"])
def test_runs_are_measured_with_the_weights_that_wires_bring(tmp_path: Path, recipe: str) -> None:
    """In two pieces as well: the last held-out loss is that of one start."""
    config = small(tmp_path, f"recipe={recipe}", "train.steps=4", "train.param_dtype=bf16")
    summary = run(config)
    rows = {row.weights: row.heldout_loss for row in evaluate([tmp_path / "run"])}
    assert rows["wire"] == summary["heldout_loss"] != summary["heldout_loss_master"]
    assert rows["master"] == summary["heldout_loss_master"]
    assert summary["bytes"]["weights_update"]["inter"] > 0
    piece = replace(config.run, dir=str(tmp_path / "pieces"), piece_steps=2)
    assert run(replace(config, run=piece))["outcome"] == "unfinished"
    again = run(replace(config, run=piece))
    assert [again[k] for k in ("heldout_loss", "loss", "heldout_loss_master")] == [
        summary[k] for k in ("heldout_loss", "loss", "heldout_loss_master")
    ]
