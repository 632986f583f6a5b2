"""Tensor parts in processes of their own, over gloo: every bit is the virtual engine's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.engines.cells_world import PARTS, both_dtypes, compare, compared, real, size, steps, twin
from tests.engines.fsdp_jobs import complaint
from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import batch, made, same, train
from tests.engines.test_stages import Shape
from zpp_lab.engines.base import Engine
from zpp_lab.engines.optim.shards import local
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints

FAST: dict[Shape, tuple[str, ...]] = {
    (1, 4, 2, 1): ("mixed", "raw_bf16", "qwen2", "qwen3"),
    (1, 2, 2, 1): ("acts8", "qwen3", "llama"),
    (1, 4, 4, 1): ("acts8",),
}
SHAPE: Shape = (1, 4, 2, 1)
SOME_NODES = ("zeropp", "differences", "node")  # need several nodes with several GPUs of a cell


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_parts_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, FAST[shape])
    assert said == dict.fromkeys(FAST[shape], "")


def poisoned(name: str, value: float) -> list[str]:
    """What both engines say of a step with this weight in the second part."""
    engine, virtual = real("acts8", SHAPE), twin("acts8", SHAPE)
    assert engine.parts is not None
    with torch.no_grad():
        virtual.cells[1].master[name].fill_(value)
        if engine.parts.part == 1:
            local(engine.parameters[name]).fill_(value)
    both: tuple[Engine, ...] = engine, virtual
    return [complaint(partial(one.step, 0, 1e-2, partial(batch, 0), False)) for one in both]


@pytest.mark.parametrize(
    ("name", "value"), [("head.weight", 1e38), ("layers.0.mlp.w_up.weight", float("nan"))], ids=str
)
def test_both_engines_find_the_same_value_that_is_not_finite(name: str, value: float) -> None:
    real_one, virtual_one = run_world(4, poisoned, name, value)
    assert real_one == virtual_one != "nothing"


def shared(folder: str, keep: int) -> Checkpoints:
    return Checkpoints(Path(folder), keep, shared=True)


def written(folder: str, case: str) -> dict[str, bool]:
    """What two tensor parts on two ranks each save: they resume from it, as the virtual engine
    does, and a whole model reads it. Each check by name."""
    torch.use_deterministic_algorithms(True)
    first, store, (_, more) = real(case, SHAPE), shared(folder, keep=2), PARTS[case]
    start = made((1, 4, 1), {}, **more)
    train(start, 0, 1)
    before = start.state_dict()
    first.load_state_dict(before)
    store.save(1, first.state_dict())
    store.wait()
    dist.barrier()
    back = Saved(store.path(1)).state()
    found = {"the same tensors": same({k: back[k] for k in before}, before)}
    steps(first, 1, 3)
    store.save(3, first.state_dict())
    store.wait()
    dist.barrier()
    undisturbed, saved = steps(first, 3, 5), Saved(store.path(3))
    other, virtual = real(case, SHAPE), twin(case, SHAPE)
    found["step"] = other.load_checkpoint(saved) == 3
    virtual.load_state_dict(saved.state())
    found["goes on"] = steps(other, 3, 5) == undisturbed == steps(virtual, 3, 5)
    whole = made((1, 2, 1), {}, **more)
    whole.load_state_dict(saved.state())
    found["whole"] = same(whole.state_dict(), saved.state())
    return found


@pytest.mark.parametrize("case", ["mixed", "qwen2"])
def test_checkpoints_hold_whole_tensors_whatever_the_parts(case: str, tmp_path: Path) -> None:
    said = run_world(4, written, str(tmp_path), case)
    assert all(said.values()), said
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (1, 4, 2, 1), (1, 4, 4, 1), (2, 4, 2, 1)], ids=str)
def test_all_recipes_with_real_parts(shape: Shape) -> None:
    several, alone = shape[0] > 1, size(shape) == shape[2]
    cases = [case for case in PARTS if several or case not in SOME_NODES]
    cases = [case for case in cases if not case.startswith(("compiled", "traced"))]
    weights = ("mixed", "qwen2")  # a cell of one sends none
    cases = both_dtypes(case for case in cases if not alone or case not in weights)
    said = compared(shape, cases)
    assert said == dict.fromkeys(cases, "")


def graphs_of_regions() -> dict[str, Any]:
    """Both engines with compiled blocks, traced, but not built: what differs, and the graphs of the
    real one."""
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        found: dict[str, Any] = compare((1, 2, 2, 1), ["traced"])
        counters.clear()
        engine = real("traced", (1, 2, 2, 1))
    steps(engine, 0, 2)
    found["step"] = counters["stats"]["unique_graphs"]
    found["breaks"] = dict(counters["graph_break"])
    return found


def test_compiled_parts_share_a_graph_for_each_region() -> None:
    """Attention, MLP, and what lies between; exchanges are in none of them."""
    assert run_world(2, graphs_of_regions) == {"traced": "", "step": 3, "breaks": {}}


COMPILED: dict[Shape, list[str]] = {
    (1, 2, 2, 1): both_dtypes(["compiled"]),
    (2, 2, 2, 1): [*both_dtypes(["compiled"]), "compiled_mixed"],
    (1, 4, 2, 2): ["compiled"],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_compiled_parts_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, COMPILED[shape])
    assert said == dict.fromkeys(COMPILED[shape], "")
