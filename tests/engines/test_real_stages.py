"""Stages in processes of their own, over gloo and torch's schedules: every bit is the virtual
engine's."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import cells_world
from tests.engines.cells_world import BF16, STAGES, both_dtypes, compared, real, steps, twin
from tests.engines.fsdp_jobs import complaint
from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import batch, same, train
from tests.engines.test_real_parts import shared
from tests.engines.test_stages import Shape, staged
from tests.two_ranks import answers_of, two_gpus, two_ranks
from zpp_lab.config.wires import ACTS_PIPE
from zpp_lab.engines.base import Engine
from zpp_lab.engines.optim.shards import local
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.train.memory.estimate import passes_under_way

FAST: dict[Shape, tuple[str, ...]] = {
    (1, 2, 1, 2): ("raw", "pipe8"),
    (2, 2, 1, 2): ("mixed", "interleaved_last", "states"),
    (1, 4, 2, 2): ("acts8",),
}
NODES = ("differences", "differences_g4")  # need several nodes of a stage
WHOLE = ("recomputed", "compiled")  # no tensor parts; test_real_parts.py compiles some
SLOW: dict[Shape, list[str]] = {
    (1, 2, 1, 2): [
        *("raw", "raw_bf16", "pipe8", "pipe8_fp32", "sham", "hadamard", "recomputed", "compiled")
    ],
    (2, 2, 1, 2): both_dtypes(c for c in STAGES if c not in (*NODES, "compiled")),
    (1, 4, 2, 2): ["raw", "acts8", "pipe8"],
    (2, 4, 2, 2): both_dtypes(c for c in STAGES if c not in (*NODES, *WHOLE)),
    (4, 1, 1, 2): both_dtypes(["differences", "pipe8"]),
    (4, 2, 1, 2): both_dtypes(["differences_g4"]),
    (4, 1, 1, 4): ["raw_bf16", "pipe8"],
    (4, 2, 1, 4): ["mixed", "last"],
}


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_stages_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, FAST[shape])
    assert said == dict.fromkeys(FAST[shape], "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SLOW, ids=str)
def test_every_real_case_has_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, SLOW[shape])
    assert said == dict.fromkeys(SLOW[shape], "")


# ---------------------------------------------------------------------- bytes


def seen(shape: Shape, case: str) -> dict[str, bool]:
    """Whether the pipeline's group sent in a step what the ledger says, and no more passes are
    under way than the estimate of memory counts. Each check by name."""
    engine, sent = real(case, shape), Counter[str]()
    stages = engine.stages
    assert stages is not None
    forward, after = stages.forward, stages.after_backward

    def begun(*args: Any) -> Tensor:
        sent["now"] += 1
        sent["most"] = max(sent["most"], sent["now"])
        return forward(*args)

    def ended(*args: Any) -> None:
        sent["now"] -= 1
        after(*args)

    stages.forward, stages.after_backward = begun, ended  # type: ignore[method-assign]
    group, send = engine.stages.group, dist.ProcessGroup.send

    def counting(self: Any, tensors: list[Tensor], *args: Any) -> Any:
        if self is group or self == group:
            sent["bytes"] += sum(t.nbytes for t in tensors)
            sent["fp32"] += all(t.dtype == torch.float32 for t in tensors)
            sent["calls"] += 1
        return send(self, tensors, *args)

    engine.step(0, 1e-2, partial(batch, 0), False)  # torch's schedule asks its neighbours first
    dist.ProcessGroup.send = counting  # type: ignore[method-assign]
    found = engine.step(1, 1e-2, partial(batch, 1), False).bytes
    own = sum(engine.stages.pipe.ledger.step[ACTS_PIPE])
    total: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(total, sent["bytes"])
    counted = passes_under_way(engine.config, stages.pipe.plan.ranks, stages.place)
    fits: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fits, sent["most"] == counted)
    return {
        "passes": all(fits),
        "own": sent["bytes"] == own == sum(engine.plan.pipe.own(engine.stages.place)),  # type: ignore[union-attr]
        "all": sum(total) == sum(found[ACTS_PIPE]),
        "payloads": sent["fp32"] == sent["calls"] > 0,
        "plan": found == engine.plan.step_bytes(),
    }


@pytest.mark.parametrize("case", ["mixed", "gpipe", "interleaved"])
def test_the_group_saw_the_bytes_of_ledger_and_plan(case: str) -> None:
    said = run_world(4, seen, (2, 2, 1, 2), case)
    assert all(said.values()), said


# ---------------------------------------------------------------------- values, states


def poisoned(name: str, value: float) -> list[str]:
    """What both engines say of a step with this weight."""
    shape: Shape = (2, 2, 1, 2)
    engine, virtual = real("mixed", shape), twin("mixed", shape)
    with torch.no_grad():
        for cell in virtual.cells:
            if name in cell.master:
                cell.master[name].fill_(value)
        if name in engine.parameters:
            local(engine.parameters[name]).fill_(value)
    both: tuple[Engine, ...] = engine, virtual
    return [complaint(partial(one.step, 0, 1e-2, partial(batch, 0), False)) for one in both]


@pytest.mark.parametrize(
    ("name", "value"), [("head.weight", 1e38), ("layers.3.mlp.w_up.weight", float("nan"))], ids=str
)
def test_both_engines_find_the_same_value_that_is_not_finite(name: str, value: float) -> None:
    real_one, virtual_one = run_world(4, poisoned, name, value)
    assert real_one == virtual_one != "nothing"


def written(folder: str, shape: Shape, case: str) -> dict[str, bool]:
    """What stages save: they resume from it, as the virtual engine does, and a whole model reads
    it. Each check by name."""
    torch.use_deterministic_algorithms(True)
    first, store = real(case, shape), shared(folder, keep=2)
    start = staged((1, 4, 1, 1), {"stage": 2}, micro_steps=4, **BF16)
    train(start, 0, 1)
    before = start.state_dict()
    first.load_state_dict(before)
    store.save(1, first.state_dict())
    store.wait()
    dist.barrier()
    back = Saved(store.path(1)).state()
    found = {"the same tensors": same({k: back[k] for k in before}, before)}
    steps(first, 1, 2)
    store.save(2, first.state_dict())
    store.wait()
    dist.barrier()
    undisturbed, saved = steps(first, 2, 4), Saved(store.path(2))
    other, virtual = real(case, shape), twin(case, shape)
    found["step"] = other.load_checkpoint(saved) == 2
    virtual.load_state_dict(saved.state())
    found["goes on"] = steps(other, 2, 4) == undisturbed == steps(virtual, 2, 4)
    whole = staged((1, 4, 1, 1), {"stage": 2}, micro_steps=4, **BF16)
    whole.load_state_dict(saved.state())
    found["whole"] = same(whole.state_dict(), saved.state())
    return found


@pytest.mark.parametrize(
    ("shape", "case"), [((1, 4, 2, 2), "acts8"), ((2, 2, 1, 2), "interleaved")], ids=str
)
def test_checkpoints_hold_whole_tensors_whatever_the_stages(
    shape: Shape, case: str, tmp_path: Path
) -> None:
    said = run_world(4, written, str(tmp_path), shape, case)
    assert all(said.values()), said
    assert len(said) == 4


# ---------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=two_ranks), pytest.param(4, marks=two_gpus)]
)
def test_parts_and_stages_on_gpus(world: int, tmp_path: Path) -> None:
    """Two tensor parts, and two stages, over NCCL."""
    found = answers_of("tests.engines.cells_world", tmp_path, 400, world)
    wanted = dict.fromkeys(cells_world.names(world), "")
    assert {name: found.get(name, "missing") for name in wanted} == wanted, found["output"]
