"""What encoders remember: when it is written, what it costs, what it is good for."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.fsdp_jobs import asked
from tests.engines.fsdp_world import run_world
from tests.engines.test_virtual import assert_same_bits, engine
from tests.engines.uneven import batch
from tests.runs.test_checkpoint import engine_of, shared, train, virtual_of, whole
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.engines.watch import Watch
from zpp_lab.runs.checkpoint.read import Saved

Q2 = {"bits": 2, "block_size": 16}


def remembering(nodes: int = 2, local: int = 2, train: Any = None, **recipe: Any) -> Config:
    values = {
        "recipe": {"name": "case", "hops": 2, "grads": {**Q2, "memory": {"kind": "residual"}}}
        | recipe,
        "cluster": {"nodes": nodes, "gpus_per_node": local},
        "train": {"lr": 1e-2, **(train or {})},
    }
    return load(Config, values)


def steps(made: VirtualEngine, first: int, last: int) -> list[float]:
    return [made.step(s, 1e-2, partial(batch, s), telemetry=False).loss for s in range(first, last)]


def remembered(made: Any) -> dict[str, Tensor]:
    memories = made.cell.memories if isinstance(made, VirtualEngine) else made.memories
    return {name: t.clone() for name, t in memories.state().items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(t, wanted[n]) for n, t in found.items()
    )


def test_a_step_that_is_not_finite_leaves_them_as_they_were() -> None:
    """Also where another unit had been reduced before; and the repeated step, which names the
    rank, meets what the first try met."""
    config, calls = remembering(train={"micro_steps": 2}), count()
    made, good = engine(config), engine(config)
    bad = {21, 29}  # of 8 backwards a step: in step 2, and when that is repeated
    made.cell.weights["layers.0.up.weight"].register_hook(
        lambda g: g * (torch.inf if next(calls) in bad else 1.0)
    )
    steps(made, 0, 2), steps(good, 0, 2)
    before = remembered(made)
    assert same(before, remembered(good))
    with pytest.raises(NonFiniteError, match=r"step 2: .*layers\.0\.up\.weight on rank"):
        steps(made, 2, 3)
    assert same(remembered(made), before)
    assert steps(made, 2, 4) == steps(good, 2, 4)
    assert_same_bits(made.cell.master, good.cell.master)


def test_evaluation_writes_none() -> None:
    made, alone = engine(remembering()), engine(remembering())
    steps(made, 0, 1), steps(alone, 0, 1)
    before = remembered(made)
    for wire in (True, False):
        made.evaluate(1, [batch(9, i, 0) for i in range(3)], wire)
    assert same(remembered(made), before)
    assert steps(made, 1, 3) == steps(alone, 1, 3)


def test_parameters_without_a_gradient_have_none() -> None:
    made = engine(remembering(exempt={"max_ndim": 0}))
    steps(made, 0, 1)
    own = made.cell.memories.state()
    assert {name.split(".", 1)[1] for name in own} == set(made.cell.master) - {"unused", "frozen"}
    assert {name.split(".")[0] for name in own} == {"grads_intra", "grads_inter"}


def test_a_reset_in_every_step_is_no_memory() -> None:
    memory = {"kind": "residual", "store": "fp32", "reset_every": 1}
    with_it, without = remembering(grads={**Q2, "memory": memory}), remembering(grads=Q2)
    assert steps(engine(with_it), 0, 3) == steps(engine(without), 0, 3)
    never = remembering(grads={**Q2, "memory": {**memory, "reset_every": 0}})
    assert steps(engine(never), 0, 3) != steps(engine(without), 0, 3)


def test_a_later_micro_step_adds_what_the_one_before_has_lost() -> None:
    """Two reductions of the same gradient: what arrives twice is nearer to it than twice what
    arrives once."""

    def error(memory: dict[str, str]) -> float:
        grads = {**Q2, "memory": memory} if memory else Q2
        made = engine(remembering(2, 1, {"micro_steps": 2}, grads=grads, hops=1))
        plain = engine(remembering(2, 1, {"micro_steps": 2}, grads={}, hops=1))
        found = []
        for each in (made, plain):
            each.cell.memories.start(0)
            _, (total,) = each._gradients(0, lambda rank, micro: batch(0, rank, 0), [Watch()])
            found.append(torch.cat([total[n].flatten() for n in sorted(total)]))
        return float((found[0] - found[1]).norm() / found[1].norm())

    assert error({"kind": "residual", "store": "fp32"}) < 0.8 * error({})


@pytest.mark.parametrize("codec", ["block", "sign"])
def test_coarse_codes_learn_more_with_a_memory(codec: str) -> None:
    """The mean of the last losses; huge blocks, so that codes lose nearly all of a gradient."""
    losses = {}
    wide = {"codec": codec, "bits": {"block": 2}.get(codec), "block_size": 8192}
    for name, grads in (
        ("raw", {}),
        ("plain", wide),
        ("memory", {**wide, "memory": {"kind": "residual"}}),
    ):
        made = engine(remembering(2, 1, {"clip": 0.0}, grads=grads, hops=1))
        losses[name] = sum(steps(made, 0, 40)[-10:]) / 10
    assert losses["raw"] < losses["plain"]
    assert losses["memory"] - losses["raw"] < 0.6 * (losses["plain"] - losses["raw"])


def of_ranks(folder: str, cases: list[str]) -> dict[str, Any]:
    """Of each case: bytes that a rank keeps and what the plan says of them; whether a run that
    goes on from a checkpoint ends as an undisturbed one, of this engine and of the other."""
    found = {}
    for case in cases:
        made, store = engine_of(case, 2, 2), shared(f"{folder}/{case}", keep=1)
        train(made, 0, 3)
        own = sum(t.untyped_storage().nbytes() for t in made.memories.state().values())
        planned = sum(
            own.nbytes for key, own in made.plan.memories.items() if "unused" not in key[1]
        )
        store.save(3, made.state_dict())
        store.wait()
        undisturbed, saved = train(made, 3, 5), Saved(store.path(3))
        other = engine_of(case, 2, 2)
        assert other.load_checkpoint(saved) == 3
        ended = [train(other, 3, 5) == undisturbed]
        held = whole(other.state_dict())
        if asked():
            virtual, written = virtual_of(case, 2, 2), virtual_of(case, 2, 2)
            virtual.load_state_dict(saved.state())
            ended.append(train(virtual, 3, 5) == undisturbed)
            virtual.load_state_dict(saved.state() | {"memory": {}})
            ended.append(train(virtual, 3, 5) != undisturbed)
            written.load_state_dict(held)
            ended.append(same(held["memory"], written.state_dict()["memory"]))
        found[case] = {"bytes": own == planned > 0, "ended": ended}
        found[case]["unharmed"] = unharmed(other) and train(other, 5, 6) == train(made, 5, 6)
    return found


def unharmed(made: Any) -> bool:
    """Whether a step with a bad weight of rank 0 leaves all as it was, but for that weight."""
    weight = made.parameters["layers.0.up.weight"].to_local().detach()
    good, before = weight.clone(), remembered(made)
    if made.rank == 0:
        weight[0] = torch.inf
    with pytest.raises(NonFiniteError, match="step 5: weights_forward"):
        train(made, 5, 6)
    weight.copy_(good)
    return same(remembered(made), before)


@pytest.mark.parametrize(
    "case", ["memory_loco", pytest.param("memory_second", marks=pytest.mark.slow)]
)
def test_ranks_keep_what_is_planned_and_go_on_with_the_same_bits(case: str, tmp_path: Path) -> None:
    said = run_world(4, of_ranks, str(tmp_path), [case])[case]
    assert said == {"bytes": True, "ended": [True] * 4, "unharmed": True}
