"""Seconds and memory of a few training steps of the real engine, for the experiments beside this.

Every rank imports it under torchrun. Tokens are random: neither time nor memory depends on them.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import deterministic

from zpp_lab.codecs import kernels
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch, Batches
from zpp_lab.engines.build import build_engine, pick_device
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.train.footprint import GIB, of_ranks, peak_gib, retries, settled
from zpp_lab.train.launch.launcher import connect
from zpp_lab.train.launch.place import die_with_parent

VOCAB = 32000


@dataclass(frozen=True)
class Measured:
    """Of one setting. Seconds: median of the timed steps on the slowest rank."""

    seconds: float
    tokens_per_second: float
    build_seconds: float  # model, shards, first weights
    first_seconds: float  # the first step, compiling included
    peak_gib: list[float] | None  # tensors of each rank; None on the CPU
    used_gib: float | None  # of the device, all processes, after the last step
    retries: list[int] | None  # of each rank: how often in the timed steps torch's allocator had
    # to give memory back before it got more
    times: list[float]
    waiting: list[float]  # of each: the host, done, waited for the device, where it waited least


def start(config: Config) -> torch.device:
    """Join the other ranks."""
    die_with_parent()
    connect(config)
    kernels.configure(config.ops.backend)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as in training
    return pick_device(config.engine)


def measure(
    config: Config,
    steps: int,
    warm: int = 2,
    prepare: Callable[[Any], None] = lambda engine: None,
) -> Measured:
    """Build `config`'s engine, take `warm` + `steps` steps. `prepare` may change the engine."""
    device = pick_device(config.engine)
    torch.use_deterministic_algorithms(config.engine.deterministic)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    vocab = config.model.vocab_size or VOCAB
    engine = build_engine(config, vocab, device)
    prepare(engine)
    wait(device)
    built = time.perf_counter() - began
    with settled():  # as in training
        every = [timed(engine, config, step, vocab, device) for step in range(warm)]
        before = retries(device)
        every += [timed(engine, config, warm + step, vocab, device) for step in range(steps)]
        tried = of_ranks(retries(device) - before) if device.type == "cuda" else None
    times, waiting = [list(each) for each in zip(*every, strict=True)]
    seconds = statistics.median(times[warm:])
    tokens = config.cluster.world * config.train.batch_size * config.data.seq_len
    tokens *= config.train.micro_steps
    peaks, used = peak_gib(device), used_gib(device)
    del engine
    free()
    speed = tokens / seconds
    return Measured(
        seconds, speed, built, times[0], peaks, used, tried, times[warm:], waiting[warm:]
    )


def timed(
    engine: Any, config: Config, step: int, vocab: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of one step on the slowest rank, and of them those in which the host waited for the
    device, on the rank where it did least. Near 0 the host is what bounds the step."""
    dist.barrier()
    began = time.perf_counter()
    result = engine.step(step, 1e-5, batches(config, step, vocab), False)
    wait(device)
    passed = time.perf_counter() - began
    both = torch.tensor([passed, -result.seconds["waiting"]], dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    slowest, least = both.tolist()
    return slowest, -least


def batches(config: Config, step: int, vocab: int) -> Batches:
    def batch(rank: int, micro: int) -> Batch:
        size = (config.train.batch_size, config.data.seq_len + 1)
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
        tokens = torch.randint(0, vocab, size, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    left, whole = torch.cuda.mem_get_info(device)
    return (whole - left) / GIB


def free() -> None:
    """FSDP2's reference cycles hold memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep(path: Path, key: str, found: dict[str, Any]) -> None:
    """Add one result to a JSON file; rank 0 alone writes, after every setting."""
    if dist.get_rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    before = json.loads(path.read_text())["results"] if path.is_file() else {}
    text = json.dumps({**facts, "results": {**before, key: found}}, indent=1)
    path.write_text(text + "\n")


def as_dict(measured: Measured) -> dict[str, Any]:
    return asdict(measured)
