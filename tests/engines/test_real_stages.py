"""Stages in processes of their own, over gloo and torch's schedules: every bit is the virtual
engine's."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import device_count

from tests.engines.fsdp_jobs import complaint
from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import batch, configured, same, train
from tests.engines.test_real_parts import own_state, run, shared, steps
from tests.engines.test_stages import MIXED, PIPE8, Shape, staged
from zpp_lab.config.wires import ACTS_PIPE
from zpp_lab.engines.base import Engine
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.train.memory.estimate import passes_under_way

CPU = torch.device("cpu")
BF16 = {"param_dtype": "bf16"}
ACTS8 = {"acts": {"bits": 8, "block_size": 32}}
LAST = {"accumulate": "last"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw": ({"stage": 2}, {}),
    "raw_bf16": ({"stage": 2}, BF16),
    "pipe8": (PIPE8, BF16),
    "pipe8_fp32": (PIPE8, {}),
    "acts8": ({"stage": 2} | ACTS8, BF16),
    "stage1": ({"stage": 1, "acts_pipe": {"bits": 8, "block_size": 32}}, BF16),
    "mixed": (MIXED, BF16),
    "sham": ({"stage": 2, "acts_pipe": {"codec": "sham", "bits": 4, "block_size": 32}}, BF16),
    "hadamard": (
        {"stage": 2, "acts_pipe": {"codec": "normal", "bits": 4, "block_size": 32, "hadamard": 32}},
        BF16,
    ),
    "last": (MIXED, BF16 | LAST),
    "gpipe": (MIXED, BF16 | {"engine": {"schedule": "gpipe"}}),
    "interleaved": (MIXED, BF16 | {"engine": {"schedule": "interleaved"}}),
    "interleaved_last": (MIXED, BF16 | LAST | {"engine": {"schedule": "interleaved"}}),
    "differences": (
        {
            "stage": 2,
            "sharding": {"weights": "none", "update": "differences"},
            "weights_update": {"bits": 4, "block_size": 32},
        }
        | PIPE8,
        BF16,
    ),
    "differences_g4": (
        {
            "stage": 2,
            "sharding": {"weights": "none", "update": "differences"},
            "weights_update": {"bits": 4, "block_size": 32},
            "grads": {"bits": 4, "block_size": 32},
            "hops": 2,
        }
        | PIPE8,
        BF16,
    ),
    "phases": (
        PIPE8
        | {
            "phases": [
                {"after": 1, "grads": {"bits": 8, "block_size": 32, "rounding": "stochastic"}}
            ]
        },
        BF16,
    ),
    "states": (PIPE8, BF16 | {"optimizer_state": "bf16"}),
    "recomputed": (PIPE8, BF16 | {"model": {"checkpoint_activations": True}}),
    "compiled": (PIPE8, BF16 | {"engine": {"compile": True}}),
    "reversed": (PIPE8 | {"order": "reversed"}, BF16),
}


def built(case: str, shape: Shape, device: torch.device, **engine: Any) -> Engine:
    recipe, more = CASES[case]
    *parts, pp = shape
    engine |= {"device": device.type, "graph": False} | more.get("engine", {})
    model = {"layers": 4} | more.get("model", {})
    more = {**more, "engine": engine, "model": model, "cluster": {"pp": pp}}
    config = configured(tuple(parts), recipe, **{"micro_steps": 4} | more)  # type: ignore[arg-type]
    return build_engine(config, 256, device)


def real(case: str, shape: Shape, device: torch.device = CPU) -> FsdpEngine:
    made = built(case, shape, device, name="fsdp", ordered=True)
    assert isinstance(made, FsdpEngine)
    return made


def twin(case: str, shape: Shape, device: torch.device = CPU) -> VirtualEngine:
    made = built(case, shape, device)
    assert isinstance(made, VirtualEngine)
    return made


def shard_state(engine: VirtualEngine, rank: int) -> dict[str, Tensor]:
    """What a rank has in a real run."""
    cluster, shards = engine.config.cluster, engine.plan.recipe.shards
    place = cluster.place(rank)
    cell = engine.cells[place["pp"] * cluster.tp + place["tp"]]
    reader = cluster.members({"node", "gpu"}, rank).index(rank)
    found: dict[str, Tensor] = {}
    for name, p in cell.master.items():
        first, last = own_rows(tuple(p.shape), shards, reader % shards)
        found[name] = p.detach()[first:last].cpu()
        for key, value in cell.optimizer.state[p].items():
            found[f"{key} of {name}"] = (value[first:last] if value.ndim else value).cpu()
    return found


def compare(shape: Shape, cases: list[str], device: torch.device = CPU) -> dict[str, str]:
    """Case → what differs ("" when nothing); to be run on every rank."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for case in cases:
        engine = real(case, shape, device)
        done, readers = run(engine, engine.cluster.world), engine.cluster.world
        every: list[Any] = [None] * dist.get_world_size()
        own = {name: value.cpu() for name, value in own_state(engine).items()}
        dist.all_gather_object(every, (done, own))
        if dist.get_rank():
            continue
        wanted_by = twin(case, shape, device)
        wanted, found[case] = run(wanted_by, readers), ""
        for rank, (other, state) in enumerate(every):
            mine = shard_state(wanted_by, rank)
            bad = [n for n in mine if n not in state or not torch.equal(state[n], mine[n])]
            if state.keys() != mine.keys() or bad or other != wanted:
                pairs = zip(other, wanted, strict=True)
                said = next((f"{a} is not {b}" for a, b in pairs if a != b), "")
                found[case] += f"rank {rank}: {bad[:3]} {said}; "
    return found


FAST: dict[Shape, tuple[str, ...]] = {
    (1, 2, 1, 2): ("raw", "pipe8"),
    (2, 2, 1, 2): ("mixed", "interleaved_last", "states"),
}
SLOW: dict[Shape, tuple[str, ...]] = {
    (1, 2, 1, 2): (
        "raw",
        "raw_bf16",
        "pipe8",
        "pipe8_fp32",
        "sham",
        "hadamard",
        "recomputed",
        "compiled",
    ),
    (2, 2, 1, 2): tuple(c for c in CASES if not c.startswith(("differences", "compiled"))),
    (1, 4, 2, 2): ("raw", "acts8", "pipe8"),
    (2, 4, 2, 2): ("acts8", "mixed", "last", "interleaved"),
    (4, 1, 1, 2): ("differences", "pipe8"),
    (4, 2, 1, 2): ("differences_g4",),
    (4, 1, 1, 4): ("raw_bf16", "pipe8"),
    (4, 2, 1, 4): ("mixed", "last"),
}


def size(shape: Shape) -> int:
    return shape[0] * shape[1]


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_stages_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = run_world(size(shape), compare, shape, list(FAST[shape]))
    assert said == dict.fromkeys(FAST[shape], "")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLOW, ids=str)
def test_every_real_case_has_the_virtual_ones_bits(shape: Shape) -> None:
    said = run_world(size(shape), compare, shape, list(SLOW[shape]))
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


def main() -> None:
    """Compare on GPUs: torchrun --nproc-per-node 2 -m tests.engines.test_real_stages, or 4. Ranks
    share them where there are fewer."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world, rank, gpus = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), device_count()
    gpu, device = gpus > 0, CPU
    if gpu:
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    if 0 < gpus < world:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # NCCL refuses two ranks of a host on one GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    shapes: list[Shape] = [(1, 2, 1, 2)] if world == 2 else [(2, 2, 1, 2), (1, 4, 2, 2)]
    for shape in shapes:
        found = compare(shape, list(SLOW[shape]), device)
        if dist.get_rank() == 0:
            print(shape, found, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
