"""Units that a step does not run, runs twice, or runs for nothing: both engines count alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines.fsdp_jobs import asked, real, virtual
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.test_virtual_naive import configured as virtual_config
from tests.engines.uneven import Block, batch
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import Wire
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine

Path = Callable[["Branches", Tensor], Tensor]


class Branches(nn.Module):
    """Four blocks between an embedding and a head; `path` says which of them run, and how."""

    def __init__(self, path: Path, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.path, self.step = path, 0
        self.embed = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList(Block(12, 21) for _ in range(4))
        self.head = nn.Linear(12, 37, bias=False)
        if frozen:
            for module in (self.embed, *self.blocks[:frozen]):
                module.requires_grad_(False)

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", b) for i, b in enumerate(self.blocks)]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.path(self, self.embed(tokens)))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def through(model: Branches, x: Tensor, *which: int) -> Tensor:
    for i in which:
        x = model.blocks[i](x)
    return x


def unused(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 0, 1, 3)


def twice(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 0, 1, 2, 1, 3)


def every(model: Branches, x: Tensor) -> Tensor:
    return through(model, x, 0, 1, 2, 3)


def mixture(model: Branches, x: Tensor) -> Tensor:
    """One branch in the first step, the other in the next, and so on."""
    return through(model, x, 0, 1 + model.step % 2, 3)


def for_nothing(model: Branches, x: Tensor) -> Tensor:
    """Block 1 runs, and the loss does not depend on it."""
    x = through(model, x, 0)
    through(model, x, 1)
    return through(model, x, 2, 3)


TWICE_LAST = r"blocks\.1: runs more.*set train\.accumulate=every"
Vain = dict[int, Wire]  # steps in which the real engine gathers block 1 once in vain

# name → (recipe of the parity table, path, frozen blocks, gathers in vain)
CASES: dict[str, tuple[str, Path, int, Vain]] = {
    "unused": ("zeropp", unused, 0, {}),
    "unused_stage2": ("stage2", unused, 0, {}),
    "unused_last": ("zeropp_last", unused, 0, {}),
    "twice": ("zeropp", twice, 0, {}),
    "frozen": ("backward_other_codec", every, 2, {}),
    "mixture": ("weights8", mixture, 0, {1: "weights_forward"}),  # it ran in every step before
    "mixture_every": ("zeropp_every", mixture, 0, {1: "weights_forward"}),
    "for_nothing": ("zeropp", for_nothing, 0, {0: "weights_backward"}),  # no loss reaches it
}


def outcome(engine: Any, steps: int) -> Any:
    done = []
    for step in range(steps):
        engine.model.step = step
        r = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
        done.append((r.loss, r.grad_norm, dict(r.bytes), r.telemetry))
    held = [engine.evaluate(steps, [batch(9, i, 0) for i in range(5)], wire=True)]
    return done, held, kept(engine)


def compared(names: list[str]) -> dict[str, str]:
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, (case, path, frozen, vain) in CASES.items():
        if name not in names:
            continue
        config = configured(case, 2, 2)
        steps = 3 if path is mixture else 2
        mine = outcome(real(config, Branches(path, frozen)), steps)
        if not asked():
            continue
        twin = outcome(virtual(config, Branches(path, frozen)), steps)
        for step, wire in vain.items():  # the virtual engine gathers nothing ahead
            twin[0][step][2][wire] += one_gather(config, wire)
        found[name] = differs(mine, twin)
    with pytest.raises(ValueError, match=TWICE_LAST):
        outcome(real(configured("zeropp_last", 2, 2), Branches(twice)), 1)
    return found | together(names)


# Several blocks travel together: name → (recipe, blocks a unit, path, frozen blocks). Three leave a
# unit of one.
TOGETHER: dict[str, tuple[str, int, Path, int]] = {
    "pairs": ("zeropp_last", 2, every, 0),
    "kept": ("differences", 3, every, 0),
    "plain": ("zero3_bf16_reduce", 2, every, 0),
    "unused_pair": ("stage2", 2, lambda m, x: through(m, x, 2, 3), 0),
    "twice_pair": ("zeropp_every", 2, lambda m, x: through(m, x, 0, 1, 0, 1, 2, 3), 0),
    "half_frozen": ("backward_other_codec", 2, every, 1),
}


def together(names: list[str]) -> dict[str, str]:
    found = {}
    for name, (case, blocks, path, frozen) in TOGETHER.items():
        if name not in names:
            continue
        config = configured(case, 2, 2, blocks_per_unit=blocks)
        mine = outcome(real(config, Branches(path, frozen)), 2)
        if asked():
            found[name] = differs(mine, outcome(virtual(config, Branches(path, frozen)), 2))
    return found


@pytest.mark.parametrize("case", ["memory_topk_bits", "differences_drawn"])
def test_no_bit_and_no_byte_depends_on_how_many_travel_together(case: str) -> None:
    configs = [configured(case, 2, 2, blocks_per_unit=n) for n in (1, 2, 3)]
    one, *more = (outcome(virtual(config, Branches(every)), 2) for config in configs)
    assert [differs(one, each) for each in more] == ["", ""]
    single, _, threes = (build_plan(Branches(every), config) for config in configs)
    assert [u.unit.name for u in threes.units] == ["blocks.0-blocks.2", "blocks.3", "root"]
    assert threes.step_bytes() == single.step_bytes()


def test_a_unit_that_runs_twice_cannot_wait_for_the_last_micro_step() -> None:
    with pytest.raises(ValueError, match=TWICE_LAST):
        outcome(virtual(configured("zeropp_last", 2, 2), Branches(twice)), 1)


@pytest.mark.parametrize(("path", "says"), [(unused, ""), (for_nothing, "backward")])
def test_a_unit_that_runs_in_part_is_refused(path: Path, says: str) -> None:
    config = configured("zeropp", 2, 2, blocks_per_unit=2)
    with pytest.raises(ValueError, match=rf"{says}.*set engine\.blocks_per_unit=1"):
        outcome(virtual(config, Branches(path)), 1)


def one_gather(config: Config, wire: Wire) -> Traffic:
    (block,) = (u for u in build_plan(Branches(every), config).units if u.unit.name == "blocks.1")
    return block.leg(wire).traffic


QUICK = ["unused_last", "twice", "frozen", "mixture", "for_nothing", "kept", "twice_pair"]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([*CASES, *TOGETHER], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_engines_agree_to_the_bit(names: list[str]) -> None:
    assert run_world(4, compared, names) == dict.fromkeys(names, "")


def virtual_bytes(path: Path, frozen: int = 0, **recipe: Any) -> Any:
    config = virtual_config(recipe, 2, 2)
    model = Branches(path, frozen)
    engine = VirtualEngine(model, build_plan(model, config), config)
    return engine.step(0, 1e-2, partial(batch, 0), telemetry=False).bytes


@pytest.mark.parametrize("wire", ["weights_forward", "weights_backward", "grads_intra"])
def test_an_unused_unit_sends_nothing(wire: Any) -> None:
    """Four equal blocks, three of which run; the rest of the model is the root's."""
    none, some, whole = (virtual_bytes(p)[wire].intra for p in (embed_only, unused, every))
    assert (some - none) * 4 == (whole - none) * 3


def embed_only(model: Branches, x: Tensor) -> Tensor:
    return x


def test_a_frozen_beginning_is_not_gathered_for_backward() -> None:
    whole, frozen = virtual_bytes(every), virtual_bytes(every, frozen=2)
    assert frozen["weights_forward"] == whole["weights_forward"]
    assert frozen["weights_backward"].intra * 2 == whole["weights_backward"].intra
    assert frozen["grads_intra"] < whole["grads_intra"] != Traffic(0, 0)


def test_ranks_that_run_other_units_are_refused() -> None:
    calls = iter(range(9))

    def uneven(model: Branches, x: Tensor) -> Tensor:
        return through(model, x, 0, 1 + next(calls) % 2)

    with pytest.raises(ValueError, match="rank 1"):
        virtual_bytes(uneven)
