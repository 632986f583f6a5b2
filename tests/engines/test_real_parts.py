"""Tensor parts in processes of their own, over gloo: every bit is the virtual engine's."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.fsdp_jobs import complaint
from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import ACTS8, MIXED, VOCAB, batch, configured, made, same, train
from zpp_lab.collectives import transport
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, TP_RAW
from zpp_lab.engines.base import Engine
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints

Q8 = {"bits": 8, "block_size": 32}


def hf(**options: Any) -> dict[str, Any]:
    """A model of transformers, as settings."""
    own = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own |= {"num_key_value_heads": 4, "intermediate_size": 48}
    return {"name": "hf", "options": {**own, **options}}


BF16 = {"param_dtype": "bf16"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw": ({}, {}),
    "raw_bf16": ({}, BF16),
    "acts8": (ACTS8, BF16),
    "acts8_fp32": (ACTS8, {}),
    "mixed": (MIXED, BF16),
    "sham": ({"acts": {"codec": "sham", "bits": 4, "block_size": 32}}, BF16),
    "hadamard": ({"acts": {"bits": 4, "block_size": 32, "hadamard": 32}}, BF16),
    "zeropp": (
        {"weights": Q8, "grads": {"bits": 4, "block_size": 32}, "hops": 2, "secondary": True}
        | ACTS8,
        BF16,
    ),
    "stage2": ({"stage": 2} | ACTS8, BF16),
    "last": (ACTS8, {**BF16, "accumulate": "last"}),
    "reversed": ({"order": "reversed"} | ACTS8, BF16),
    "qk_norm": (ACTS8, {**BF16, "model": {"qk_norm": True, "tied_head": True}}),
    "qwen2": (
        MIXED,
        {**BF16, "model": hf(model_type="qwen2", tie_word_embeddings=True, pad_token_id=200)},
    ),
    "qwen3": (ACTS8, {**BF16, "model": hf(model_type="qwen3", head_dim=8)}),
    "llama": (ACTS8, {"model": hf(model_type="llama")}),
    "units": (ACTS8, {**BF16, "engine": {"blocks_per_unit": 2}}),
    "differences": (
        {
            "sharding": {"weights": "node", "update": "differences"},
            "weights_update": {"bits": 4, "block_size": 32},
        }
        | ACTS8,
        BF16,
    ),
    "states": (ACTS8, {**BF16, "optimizer_state": "bf16"}),
    "host_states": (ACTS8, {**BF16, "optimizer_state": "bf16", "optimizer_place": "host"}),
    "node": ({"shard": "node"} | ACTS8, BF16),
}
FAST = {(1, 4, 2): ("mixed", "raw_bf16", "qwen2", "qwen3"), (1, 2, 2): ("acts8", "qwen3", "llama")}
SHAPE = (1, 4, 2)
SOME_NODES = ("zeropp", "differences", "node")  # need several nodes with several GPUs of a cell


def settings(case: str, shape: tuple[int, int, int], name: str) -> Config:
    recipe, more = CASES[case]
    engine = {"name": name, **more.get("engine", {})}
    engine |= {"ordered": True} if name == "fsdp" else {}
    return configured(shape, recipe, **{**more, "engine": engine})


def real(case: str, shape: tuple[int, int, int]) -> FsdpEngine:
    engine = build_engine(settings(case, shape, "fsdp"), VOCAB, torch.device("cpu"))
    assert isinstance(engine, FsdpEngine)
    return engine


def run(engine: Engine, readers: int) -> list[Any]:
    """Steps, with telemetry in the second, and evaluations."""
    found: list[Any] = []
    for step in range(3):
        done = engine.step(step, 1e-2, partial(batch, step), step == 1)
        found.append((done.loss, done.grad_norm, dict(done.bytes), done.telemetry))
        if step != 1:
            held = [batch(99, i, 0) for i in range(readers + 1)]
            found.append(engine.evaluate(step + 1, held, wire=step == 2))
    return found


def own_state(engine: FsdpEngine) -> dict[str, Tensor]:
    found = {f"{n}": local(p.detach()).clone() for n, p in engine.parameters.items()}
    for name, p in engine.parameters.items():
        for key, value in engine.optimizer.state[p].items():
            found[f"{key} of {name}"] = local(value).clone()
    return found


def shard_state(engine: VirtualEngine, part: int, rank: int) -> dict[str, Tensor]:
    """What the rank of that part's cell has in a real run."""
    cell, shards = engine.cells[part], engine.plan.recipe.shards
    found: dict[str, Tensor] = {}
    for name, p in cell.master.items():
        first, last = own_rows(tuple(p.shape), shards, rank % shards)
        found[name] = p.detach()[first:last]
        for key, value in cell.optimizer.state[p].items():
            found[f"{key} of {name}"] = value[first:last] if value.ndim else value
    return found


def compare(shape: tuple[int, int, int], cases: list[str]) -> dict[str, str]:
    """Case → what differs ("" when nothing); to be run on every rank."""
    torch.use_deterministic_algorithms(True)
    tp, found = shape[2], {}
    for case in cases:
        engine = real(case, shape)
        done, readers = run(engine, engine.cluster.world), engine.cluster.world
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (done, own_state(engine)))
        if dist.get_rank():
            continue
        twin = made(shape, CASES[case][0], **CASES[case][1])
        wanted = run(twin, readers)
        found[case] = ""
        for rank, (other, state) in enumerate(every):
            mine = shard_state(twin, rank % tp, rank // tp)
            pairs = [(n, torch.equal(state[n], mine[n])) for n in mine]
            if state.keys() != mine.keys() or other != wanted or not all(ok for _, ok in pairs):
                bad = [n for n, ok in pairs if not ok]
                found[case] += f"rank {rank}: {bad[:3]} {_first(other, wanted)}; "
    return found


def _first(found: list[Any], wanted: list[Any]) -> str:
    pairs = zip(found, wanted, strict=True)
    return next((f"{a} is not {b}" for a, b in pairs if a != b), "")


def sizes(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1]


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_parts_have_the_virtual_ones_bits(shape: tuple[int, int, int]) -> None:
    said = run_world(sizes(shape), compare, shape, list(FAST[shape]))
    assert said == dict.fromkeys(FAST[shape], "")


class Ops(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def seen() -> dict[str, bool]:
    """What torch's groups send between parts is what the ledger counts; DTensor sends nothing."""
    engine = real("acts8", SHAPE)
    assert engine.parts is not None
    tp, sent, start = SHAPE[2], Counter[str](), transport._start
    among = engine.parts.transport
    assert isinstance(among, ProcessGroups)

    def counting(group: Any, names: tuple[str, ...]) -> Any:
        run = start(group, names)

        def called(out: Tensor, given: Tensor, *rest: Any) -> Any:
            each = given.nbytes // (tp if names == transport.STARTS["all_to_all"] else 1)
            sent["parts" if group in among.gathers.values() else "cell"] += (tp - 1) * each
            return run(out, given, *rest)

        return called

    transport._start = counting
    try:
        with Ops() as ops:
            done = engine.step(0, 1e-2, partial(batch, 0), False)
    finally:
        transport._start = start
    counted = sum(sum(done.bytes[w]) for w in (ACTS_FORWARD, ACTS_BACKWARD, TP_RAW))
    return {
        "between parts": counted == engine.parts.world * sent["parts"],
        "some in cells": sent["cell"] > 0,
        "none by DTensor": not any("c10d_functional" in name for name in ops.seen),
        "operators": any("aten" in name for name in ops.seen),
    }


def test_groups_saw_the_bytes_of_the_ledger_and_dtensor_moved_nothing() -> None:
    said = run_world(4, seen)
    assert all(said.values()), said


def poisoned(name: str, value: float) -> list[str]:
    """What both engines say of a step with this weight in the second part."""
    engine, twin = real("acts8", SHAPE), made(SHAPE, ACTS8, **BF16)
    assert engine.parts is not None
    with torch.no_grad():
        twin.cells[1].master[name].fill_(value)
        if engine.parts.part == 1:
            local(engine.parameters[name]).fill_(value)
    both: tuple[Engine, ...] = engine, twin
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
    first, store, (recipe, more) = real(case, SHAPE), shared(folder, keep=2), CASES[case]
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
    other, twin = real(case, SHAPE), made(SHAPE, recipe, **more)
    found["step"] = other.load_checkpoint(saved) == 3
    twin.load_state_dict(saved.state())
    found["goes on"] = steps(other, 3, 5) == undisturbed == steps(twin, 3, 5)
    whole = made((1, 2, 1), {}, **more)
    whole.load_state_dict(saved.state())
    found["whole"] = same(whole.state_dict(), saved.state())
    return found


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    done = [engine.step(s, 1e-2, partial(batch, s), False) for s in range(first, last)]
    return [(r.loss, r.grad_norm) for r in done]


@pytest.mark.parametrize("case", ["mixed", "qwen2"])
def test_checkpoints_hold_whole_tensors_whatever_the_parts(case: str, tmp_path: Path) -> None:
    said = run_world(4, written, str(tmp_path), case)
    assert all(said.values()), said
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 4, 4), (1, 2, 2), (2, 4, 2)], ids=str)
def test_all_recipes_with_real_parts(shape: tuple[int, int, int]) -> None:
    several, alone = shape[0] > 1, sizes(shape) == shape[2]
    cases = [case for case in CASES if several or case not in SOME_NODES]
    weights = ("mixed", "qwen2")  # a cell of one sends none
    cases = [case for case in cases if not alone or case not in weights]
    said = run_world(sizes(shape), compare, shape, cases)
    assert said == dict.fromkeys(cases, "")
