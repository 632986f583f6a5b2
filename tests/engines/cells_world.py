"""Tensor parts and stages in processes of their own: the tables of recipes on which every bit must
be the virtual engine's, and the comparison; also on GPUs. An answer is a line of JSON.

torchrun --standalone --nproc-per-node 2 -m tests.engines.cells_world ANSWERS (or 4)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import device_count
from torch.utils import deterministic

from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import ACTS8, MIXED, VOCAB, batch, configured
from tests.engines.test_stages import MIXED as PIPED
from tests.engines.test_stages import PIPE8, Shape
from zpp_lab.engines.base import Engine
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.virtual.engine import VirtualEngine

CPU = torch.device("cpu")
Table = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # name → (recipe, other settings)
Q8 = {"bits": 8, "block_size": 32}
BF16 = {"param_dtype": "bf16"}
LEAST = 4  # replays of `replayed`


def hf(**options: Any) -> dict[str, Any]:
    """A model of transformers, as settings."""
    own = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own |= {"num_key_value_heads": 4, "intermediate_size": 48}
    return {"name": "hf", "options": {**own, **options}}


def differences(weights: str) -> dict[str, Any]:
    """A recipe whose updates travel as differences in 4 bits."""
    sharding = {"weights": weights, "update": "differences"}
    return {"sharding": sharding, "weights_update": {"bits": 4, "block_size": 32}}


PARTS: Table = {
    "raw": ({}, {}),
    "raw_bf16": ({}, BF16),
    "acts8": (ACTS8, BF16),
    "acts8_fp32": (ACTS8, {}),
    "mixed": (MIXED, BF16),
    "drawn": ({"acts": {"bits": 4, "block_size": 32, "rounding": "stochastic"}}, BF16),
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
    "differences": (differences("node") | ACTS8, BF16),
    "states": (ACTS8, {**BF16, "optimizer_state": "bf16"}),
    "host_states": (ACTS8, {**BF16, "optimizer_state": "bf16", "optimizer_place": "host"}),
    "node": ({"shard": "node"} | ACTS8, BF16),
    "compiled": (ACTS8, {"micro_steps": 3, "engine": {"compile": True}}),
    "compiled_mixed": (
        MIXED,
        {**BF16, "model": {"qk_norm": True}, "engine": {"compile": True, "blocks_per_unit": 2}},
    ),
    "traced": (ACTS8, BF16 | {"engine": {"compile": True, "deterministic": False}}),
}
LAST = {"accumulate": "last"}
OVERLAP = {"engine": {"schedule": "1f1b_overlap"}}
STAGES: Table = {
    "raw": ({"stage": 2}, {}),
    "raw_bf16": ({"stage": 2}, BF16),
    "pipe8": (PIPE8, BF16),
    "pipe8_fp32": (PIPE8, {}),
    "acts8": ({"stage": 2} | ACTS8, BF16),
    "stage1": ({"stage": 1, "acts_pipe": {"bits": 8, "block_size": 32}}, BF16),
    "mixed": (PIPED, BF16),
    "sham": ({"stage": 2, "acts_pipe": {"codec": "sham", "bits": 4, "block_size": 32}}, BF16),
    "hadamard": (
        {"stage": 2, "acts_pipe": {"codec": "normal", "bits": 4, "block_size": 32, "hadamard": 32}},
        BF16,
    ),
    "last": (PIPED, BF16 | LAST),
    "gpipe": (PIPED, BF16 | {"engine": {"schedule": "gpipe"}}),
    "overlap": (PIPE8, BF16 | OVERLAP | {"micro_steps": 6}),
    "overlap_last": (PIPED, BF16 | LAST | OVERLAP | {"micro_steps": 6}),
    "overlap_one": (PIPED, BF16 | OVERLAP | {"micro_steps": 1}),
    "interleaved": (PIPED, BF16 | {"engine": {"schedule": "interleaved"}}),
    "interleaved_last": (PIPED, BF16 | LAST | {"engine": {"schedule": "interleaved"}}),
    "differences": (differences("none") | PIPE8, BF16),
    "differences_g4": (
        differences("none") | {"grads": {"bits": 4, "block_size": 32}, "hops": 2} | PIPE8,
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
    """Build an engine for a case of the tables, or for CASE@DTYPE."""
    *parts, pp = shape
    name, _, dtype = case.partition("@")
    recipe, more = (STAGES if pp > 1 else PARTS)[name]
    more = {**more, "param_dtype": dtype} if dtype else more
    engine = {"device": device.type, "graph": False} | engine | more.get("engine", {})
    more = {**more, "engine": engine, "cluster": {"pp": pp}}
    if pp > 1:
        more = (
            {"micro_steps": 4 if shape[2] == 1 else 2}
            | more
            | {"model": {"layers": 4} | more.get("model", {})}
        )
    config = configured(tuple(parts), recipe, **more)  # type: ignore[arg-type]
    return build_engine(config, VOCAB, device)


def real(
    case: str, shape: Shape, device: torch.device = CPU, graph: bool | str = False
) -> FsdpEngine:
    made = built(case, shape, device, name="fsdp", ordered=True, graph=graph)
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


def compare(shape: Shape, cases: Sequence[str], device: torch.device = CPU) -> dict[str, str]:
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
            bad = [n for n in mine if n not in state or not same_bits(state[n], mine[n])]
            if state.keys() != mine.keys() or bad or other != wanted:
                pairs = zip(other, wanted, strict=True)
                said = next((f"{a} is not {b}" for a, b in pairs if a != b), "")
                found[case] += f"rank {rank}: {bad[:3]} {said}; "
    return found


def replayed(shape: Shape, cases: Sequence[str], device: torch.device = CPU) -> dict[str, str]:
    """Case → what differs between eager steps and those from a CUDA graph; on every rank."""
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    found = {}
    for case in cases:
        engines = [real(case, shape, device, graph) for graph in (False, "auto")]
        done = [_around_telemetry(engine) for engine in engines]
        states = [own_state(engine) for engine in engines]
        bad = [n for n, value in states[0].items() if not same_bits(value, states[1][n])]
        pairs = zip(*done, strict=True)
        said = next((f"step {i}: {a} is not {b}" for i, (a, b) in enumerate(pairs) if a != b), "")
        found[case] = " ".join((*bad[:3], said)).strip()
        if (replays := engines[1].graph.replays) < LEAST:
            found[case] += f" {replays} replays"
        engines[1].graph.drop()
    return found


def _around_telemetry(engine: FsdpEngine) -> list[Any]:
    """Steps, each with the next one's batches; with telemetry and an evaluation among them."""
    found: list[Any] = []
    for step in range(9):
        ahead = partial(batch, step + 1)
        done = engine.step(step, 1e-2, partial(batch, step), step == 4, ahead)
        found.append((done.loss, done.grad_norm, dict(done.bytes), done.telemetry))
    held = [batch(99, i, 0) for i in range(engine.cluster.world)]
    return [*found, engine.evaluate(9, held, wire=True)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(bits(t) for t in (one, other)))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def compared(shape: Shape, cases: Sequence[str]) -> dict[str, str]:
    """Compare over gloo, in worlds of a few cases: each leaves the threads of its groups behind."""
    found: dict[str, str] = {}
    for first in range(0, len(cases), 6):
        found |= run_world(size(shape), compare, shape, cases[first : first + 6])
    return found


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


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    done = [engine.step(s, 1e-2, partial(batch, s), False) for s in range(first, last)]
    return [(r.loss, r.grad_norm) for r in done]


def own_state(engine: FsdpEngine) -> dict[str, Tensor]:
    found = {f"{n}": local(p.detach()).clone() for n, p in engine.parameters.items()}
    for name, p in engine.parameters.items():
        for key, value in engine.optimizer.state[p].items():
            found[f"{key} of {name}"] = local(value).clone()
    return found


def size(shape: Shape) -> int:
    return shape[0] * shape[1]


def both_dtypes(cases: Iterable[str]) -> list[str]:
    return [f"{case}@{dtype}" for case in cases for dtype in ("fp32", "bf16")]


# On GPUs: what fits a cell of one rank, and cells of two.
ON_GPUS: dict[int, dict[Shape, tuple[str, ...]]] = {
    2: {
        (1, 2, 2, 1): ("raw", "acts8", "acts8_fp32", "sham", "hadamard", "last", "qwen3"),
        (1, 2, 1, 2): ("raw", "pipe8", "pipe8_fp32", "sham", "hadamard", "recomputed", "overlap"),
    },
    4: {
        (1, 4, 2, 1): ("mixed", "qwen2"),
        (2, 2, 2, 1): ("mixed", "differences"),
        (1, 4, 1, 2): ("mixed", "phases", "overlap_last"),
        (1, 4, 1, 4): ("overlap",),
        (2, 2, 1, 2): ("mixed", "interleaved_last"),
        (4, 1, 1, 2): ("differences",),
        (1, 4, 2, 2): ("acts8",),
    },
}


GRAPHS: dict[int, dict[Shape, tuple[str, ...]]] = {
    2: {(1, 2, 2, 1): ("raw_bf16", "drawn", "qwen3")},
    4: {(2, 2, 2, 1): ("mixed",), (1, 4, 2, 1): ("drawn",)},
}
JOBS = {"": (compare, ON_GPUS), " from a graph": (replayed, GRAPHS)}


def names(world: int) -> list[str]:
    """The name of every answer of `main`."""
    return [
        f"{shape}, {case}{how}"
        for how, (_, table) in JOBS.items()
        for shape, cases in table[world].items()
        for case in cases
    ]


def main() -> None:
    """Compare on GPUs, which ranks share where there are fewer; without any, over gloo."""
    world, rank, gpus = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), device_count()
    device = torch.device("cuda", rank % gpus) if gpus else CPU
    if gpus:
        torch.cuda.set_device(device)
    if 0 < gpus < world:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"  # NCCL refuses two ranks of a host on one GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    for how, (job, table) in JOBS.items():
        if not gpus and job is replayed:
            continue
        for shape, cases in table[world].items():
            for case in cases:
                found = job(shape, [case], device)
                if rank == 0:
                    with Path(sys.argv[1]).open("a") as file:
                        answer = f"{shape}, {case}{how}", found[case]
                        file.write(json.dumps(answer) + "\n")
    dist.barrier()
    os._exit(0)  # groups that are torn down may abort


if __name__ == "__main__":
    main()
