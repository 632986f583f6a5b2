"""Where the first step's seconds go, on rank 0: first.sh runs it under torchrun.

Host seconds, in the order in which they are spent. `links` is the first transfer between ranks,
which makes the backend's connections; `compiler` its imports. Both are taken out of the first step
here, so that what is left there says more. Memory shared between ranks and the compiler's phases
lie inside the step's parts. With --profile FILE the step runs under cProfile, which slows it.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import VOCAB, batches, keep, start, wait

from zpp_lab.collectives.transport import all_gather
from zpp_lab.config.compose import compose
from zpp_lab.engines.build import build_engine

DEFAULTS = ["engine=fsdp", "cluster=1x4", "engine.compile=true", "tracking.wandb=off"]
DEFAULTS += ["model.checkpoint_activations=false", "data.seq_len=2048", "train.batch_size=2"]
DEFAULTS += ["train.param_dtype=bf16", "train.reduce_dtype=bf16"]
LEAST = 0.2  # seconds of a phase of the compiler that is worth a word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--name", default="first", help="of this result")
    parser.add_argument("--profile", type=Path, help="a file for the functions that took longest")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides; model=13b recipe=zeropp")
    args = parser.parse_args()
    config = compose([*DEFAULTS, *args.overrides])
    found: dict[str, float] = {}
    with timed(found, "processes meet"):
        device = start(config)
    torch.use_deterministic_algorithms(config.engine.deterministic)
    with timed(found, "links", device):
        own = torch.ones(1, device=device)
        all_gather(torch.empty(dist.get_world_size(), device=device), own)
    if config.engine.compile:
        with timed(found, "compiler"):
            importlib.import_module("torch._inductor.compile_fx")
    vocab = config.model.vocab_size or VOCAB
    with timed(found, "engine", device):
        engine = build_engine(config, vocab, device)
    shared = count_shared()
    steps(found, config, engine, vocab, device, args.profile)
    found |= {f"first step, {k}": v for k, v in shared.items()} | phases()
    found |= {"segments of memory": allocations()}
    if dist.get_rank() == 0:
        for what, seconds in found.items():
            print(f"{args.name}: {what}: {seconds:.2f}", flush=True)
    keep(args.out / "first.json", args.name, found)
    dist.barrier()
    engine.graph.drop()  # NCCL ends a group only after the CUDA graphs that hold its transfers
    dist.destroy_process_group()


@contextmanager
def timed(found: dict[str, float], name: str, device: torch.device | None = None) -> Iterator[None]:
    began = time.perf_counter()
    yield
    if device is not None:
        wait(device)
    found[name] = time.perf_counter() - began


def steps(
    found: dict[str, float],
    config: Any,
    engine: Any,
    vocab: int,
    device: torch.device,
    profile: Path | None,
) -> None:
    """The first step and its parts, two plain ones, and one with telemetry."""
    watch = cProfile.Profile() if profile is not None and dist.get_rank() == 0 else None
    for number, name in enumerate(("first step", "second step", "third step", "with telemetry")):
        with timed(found, name, device):
            if number == 0 and watch is not None:
                watch.enable()
            result = engine.step(number, 1e-5, batches(config, number, vocab), number == 3)
            if number == 0 and watch is not None:
                watch.disable()
        if number == 0:
            found |= {f"first step, {part}": value for part, value in result.seconds.items()}
    if watch is not None and profile is not None:
        with open(profile, "w") as stream:
            pstats.Stats(watch, stream=stream).sort_stats("cumulative").print_stats(150)


def count_shared() -> dict[str, float]:
    """How often memory is shared between ranks from here on, and how long it takes."""
    from zpp_lab.collectives.peer.symmetric import SymmetricMemory

    found = {"shared memory": 0.0, "shared memory, times": 0.0}
    allocate = SymmetricMemory.allocate

    def counted(self: Any, nbytes: int) -> Any:
        began = time.perf_counter()
        made = allocate(self, nbytes)
        found["shared memory"] += time.perf_counter() - began
        found["shared memory, times"] += 1
        return made

    SymmetricMemory.allocate = counted  # type: ignore[method-assign]
    return found


def phases() -> dict[str, float]:
    """The compiler's own phases, which contain one another, and how many graphs it made."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    summed = {name: sum(times) for name, times in compilation_time_metrics.items()}
    longest = sorted(summed.items(), key=lambda item: -item[1])
    found = {f"compiler, {name}": s for name, s in longest if s > LEAST and "pass" not in name}
    caches = {k: v for k, v in counters["inductor"].items() if "cache" in k}
    return {**found, "graphs": counters["stats"]["unique_graphs"], **caches}


def allocations() -> float:
    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.memory_stats().get("segment.all.allocated", 0))


if __name__ == "__main__":
    main()
