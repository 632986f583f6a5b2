"""Stages in processes of their own, over gloo and torch's schedules: every bit is the virtual
engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import configured
from tests.engines.test_real_parts import own_state, run
from tests.engines.test_stages import MIXED, PIPE8, Shape, staged
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine

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
    "states": (PIPE8, BF16 | {"optimizer_state": "bf16"}),
    "recomputed": (PIPE8, BF16 | {"model": {"checkpoint_activations": True}}),
    "reversed": (PIPE8 | {"order": "reversed"}, BF16),
}


def real(case: str, shape: Shape) -> FsdpEngine:
    recipe, more = CASES[case]
    *parts, pp = shape
    engine = {"name": "fsdp", "ordered": True} | more.get("engine", {})
    model = {"layers": 4} | more.get("model", {})
    more = {**more, "engine": engine, "model": model, "cluster": {"pp": pp}}
    config = configured(tuple(parts), recipe, **{"micro_steps": 4} | more)  # type: ignore[arg-type]
    made = build_engine(config, 256, torch.device("cpu"))
    assert isinstance(made, FsdpEngine)
    return made


def twin(case: str, shape: Shape) -> VirtualEngine:
    recipe, more = CASES[case]
    return staged(shape, recipe, **{"micro_steps": 4} | more)


def shard_state(engine: VirtualEngine, rank: int) -> dict[str, Tensor]:
    """What a rank has in a real run."""
    cluster, shards = engine.config.cluster, engine.plan.recipe.shards
    place = cluster.place(rank)
    cell = engine.cells[place["pp"] * cluster.tp + place["tp"]]
    reader = cluster.members({"node", "gpu"}, rank).index(rank)
    found: dict[str, Tensor] = {}
    for name, p in cell.master.items():
        first, last = own_rows(tuple(p.shape), shards, reader % shards)
        found[name] = p.detach()[first:last]
        for key, value in cell.optimizer.state[p].items():
            found[f"{key} of {name}"] = value[first:last] if value.ndim else value
    return found


def compare(shape: Shape, cases: list[str]) -> dict[str, str]:
    """Case → what differs ("" when nothing); to be run on every rank."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for case in cases:
        engine = real(case, shape)
        done, readers = run(engine, engine.cluster.world), engine.cluster.world
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (done, own_state(engine)))
        if dist.get_rank():
            continue
        wanted_by = twin(case, shape)
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
    (2, 2, 1, 2): ("mixed", "interleaved_last"),
}
SLOW: dict[Shape, tuple[str, ...]] = {
    (1, 2, 1, 2): ("raw", "raw_bf16", "pipe8", "pipe8_fp32", "sham", "hadamard", "recomputed"),
    (2, 2, 1, 2): tuple(c for c in CASES if not c.startswith("differences")),
    (1, 4, 2, 2): ("raw", "acts8", "pipe8"),
    (2, 4, 2, 2): ("acts8", "mixed", "last", "interleaved"),
    (4, 1, 1, 2): ("differences", "pipe8"),
    (4, 2, 1, 2): ("differences_g4",),
    (4, 1, 1, 4): ("raw_bf16", "pipe8"),
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
