"""engine.blocks_per_unit: blocks that travel together. No bit and no byte depends on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.engines.fsdp_jobs import CPU, asked, real, virtual
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.test_branches import Branches, every, through, twice, unused
from tests.engines.test_fsdp_node import node
from tests.engines.uneven import Uneven, batch
from zpp_lab.bench.step_engines import PlainFsdp2
from zpp_lab.checkpoint.write import Checkpoints
from zpp_lab.config import ModelConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.in_turn import InTurn
from zpp_lab.engines.units import grouped
from zpp_lab.models import build_model

TINY = ModelConfig(dim=16, layers=3, heads=2, kv_heads=1, ffn=24, vocab_size=37)


def uneven(layers: int = 3) -> Uneven:
    torch.manual_seed(0)
    return Uneven(layers=layers)


def decoder(**changes: Any) -> nn.Module:
    return build_model(replace(TINY, **changes), 37, seed=3)


# name → (recipe of the parity table, settings of the engine, model)
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "hpZ, every": ("zeropp_every", {}, uneven),
    "last": ("zeropp_last", {}, uneven),
    "stage 1": ("stage1", {}, uneven),
    "stage 2": ("stage2", {"prefetch": 2}, uneven),
    "backward of its own": ("backward_other_codec", {"prefetch": 2}, partial(uneven, 5)),
    "stochastic": ("stochastic", {"gather": "flat", "prefetch": 0}, uneven),
    "raw": ("zero3", {}, uneven),
    "offload": ("zeropp_bf16", {"offload": True}, uneven),
    "computed again": ("zeropp_every", {}, partial(decoder, checkpoint_activations=True)),
}


def outcome(engine: Any, count: int = 3) -> Any:
    """Steps with evaluations between them."""
    done, held = [], []
    for step in range(count):
        engine.model.step = step
        result = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
        done.append((result.loss, result.grad_norm, dict(result.bytes)))
        if step != 1:
            heldout = [batch(9, i, 0) for i in range(5)]
            held += [engine.evaluate(step + 1, heldout, wire) for wire in (True, False)]
    return done, held, kept(engine)


def parity() -> dict[str, str]:
    """What differs between the real engine with two blocks a unit and the virtual one with one."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, (case, settings, model) in CASES.items():
        single, pairs = (configured(case, 2, 2, blocks_per_unit=n, **settings) for n in (1, 2))
        two = outcome(real(pairs, model()))
        if asked():
            found[name] = differs(two, outcome(virtual(single, model())))
    return found


def test_the_real_engine_equals_the_virtual_one_with_single_blocks() -> None:
    assert run_world(4, parity) == dict.fromkeys(CASES, "")


@pytest.mark.parametrize("name", CASES)
def test_the_virtual_engine_has_the_same_bits_with_any_number(name: str) -> None:
    case, settings, model = CASES[name]
    single, *more = (
        outcome(virtual(configured(case, 2, 2, blocks_per_unit=n, **settings), model()))
        for n in (1, 2, 3)
    )
    assert [differs(single, one) for one in more] == ["", ""]


# ---------------------------------------------------------------------- what runs


def last_alone(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 2, 3)


def both_twice(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 0, 1, 0, 1, 2, 3)


def alternately(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 0, 1, *((2, 3) if model.step % 2 else ()))


WHOLE: dict[str, tuple[Any, int]] = {  # how the model runs, and its frozen blocks
    "a unit unused": (last_alone, 0),
    "a unit twice": (both_twice, 0),
    "half a unit frozen": (every, 1),
    "a unit and a half frozen": (every, 3),
    "in every other step": (alternately, 0),
}


def side_way(model: Branches, x: Tensor) -> Tensor:
    """Block 1 runs, but the loss depends on block 0 alone."""
    first = model.blocks[0](x)
    model.blocks[1](first)
    return through(model, first, 2, 3)


def backwards(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 1, 0, 2, 3)


REFUSED: dict[str, tuple[Any, str]] = {
    "unused": (unused, "unit blocks.2-3: its block 2 ran where block 1 was next"),
    "twice": (twice, "unit blocks.0-1: its block 2 ran where block 1 was next"),
    "half": (lambda m, x: through(m, x, 0, 1, 2), "unit blocks.2-3: a forward ran only 1 of"),
    "backwards": (backwards, "unit blocks.0-1: its block 2 ran where block 1 was next"),
    "side way": (side_way, "unit blocks.0-1: backward reached one of its blocks before the last"),
}


def what_runs() -> dict[str, str]:
    torch.use_deterministic_algorithms(True)
    config = configured("zeropp", 2, 2, blocks_per_unit=2, prefetch=0)
    found = {}
    for name, (path, frozen) in WHOLE.items():
        mine = outcome(real(config, Branches(path, frozen)))
        if asked():
            found[name] = differs(mine, outcome(virtual(config, Branches(path, frozen))))
    for name, (path, _) in REFUSED.items():
        found[name] = refusal(real(config, Branches(path)))
    return found


def refusal(engine: Any) -> str:
    try:
        engine.step(0, 1e-2, partial(batch, 0), telemetry=False)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_whole_units_may_run_as_they_like_and_parts_are_refused() -> None:
    found = run_world(4, what_runs)
    assert {name: found[name] for name in WHOLE} == dict.fromkeys(WHOLE, "")
    config = configured("zeropp", 2, 2, blocks_per_unit=2)
    for name, (path, says) in REFUSED.items():
        assert says in found[name]
        assert "use engine.blocks_per_unit=1" in found[name]
        assert refusal(virtual(config, Branches(path))) == found[name]


def test_a_block_that_backward_runs_again_is_no_forward() -> None:
    """A checkpoint around the whole call of a block calls it again, last block first."""
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x.sum()

    model = Model()
    InTurn({"both": list(blocks), "root": [model]})
    for _ in range(2):
        model(torch.ones(1, 4)).backward()
    with pytest.raises(ValueError, match="its block 2 ran where block 1 was next"):
        blocks[1](torch.ones(1, 4))


# ---------------------------------------------------------------------- checkpoints and baselines


def resumed(folder: str) -> list[str]:
    """Three steps, of which another number of blocks takes the last; then HSDP alike."""
    torch.use_deterministic_algorithms(True)
    found = []
    for name, make in {
        "ours": lambda n: configured("zeropp", 2, 2, blocks_per_unit=n),
        "node": lambda n: node(blocks_per_unit=n),
    }.items():
        engine = real(make(1), uneven())
        stored = Checkpoints(Path(folder, name), 1, shared=True)
        for step in range(2):
            engine.step(step, 1e-2, partial(batch, step), telemetry=False)
        stored.save(2, engine.state_dict())
        stored.wait()
        other = real(make(2), uneven())
        other.load_checkpoint(next(stored.newest_first()))
        ends = []
        for each in (engine, other):
            r = each.step(2, 1e-2, partial(batch, 2), telemetry=False)
            ends.append(([(r.loss, r.grad_norm, dict(r.bytes))], [], kept(each)))
        found.append(differs(*ends))
    return found


def test_a_run_may_go_on_with_another_number(tmp_path: Path) -> None:
    assert run_world(4, resumed, str(tmp_path)) == ["", ""]


def plain_arm() -> list[Any]:
    """FSDP2 by itself: which blocks share a group, and how far a step is from our engine's."""
    config = replace(configured("zero3_bf16", 1, 2, blocks_per_unit=2), model=TINY)
    timed = PlainFsdp2(config, CPU)
    states = [id(fully_shard.state(block)) for block in timed.model.layers]  # type: ignore[attr-defined]
    timed.step(0, partial(batch, 0))
    finite = all(bool(torch.isfinite(p.to_local()).all()) for p in timed.model.parameters())
    return [[states.index(s) for s in states], finite]


def test_the_plain_arm_of_a_bench_has_the_same_units() -> None:
    assert run_world(2, plain_arm) == [[0, 0, 2], True]


# ---------------------------------------------------------------------- plans


def test_names_sizes_and_bytes() -> None:
    model = uneven(5)
    names = [g.name for g in grouped(model.units(), 2)]
    assert names == ["layers.0-1", "layers.2-3", "layers.4"]
    assert [g.name for g in grouped([("a.0", model), ("b.0", model)], 3)] == ["a.0-b.0"]
    single, three = (
        build_plan(model, configured("zeropp_every", 2, 2, blocks_per_unit=n)) for n in (1, 3)
    )
    assert [u.unit.name for u in three.units] == ["layers.0-2", "layers.3-4", "root"]
    assert [u.unit.blocks for u in three.units] == [3, 2, 1]
    assert [p for u in three.units for p in u.unit.parameters] == [
        p for u in single.units for p in u.unit.parameters
    ]
    assert three.step_bytes() == single.step_bytes()
    assert three.units[-1] == single.units[-1]


def test_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.blocks_per_unit=0: use 1 .* or more"):
        configured("zeropp", 2, 2, blocks_per_unit=0)
