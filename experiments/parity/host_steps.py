"""What whole steps ask of the host; as in host.py kernels of ours, transfers and NCCL do nothing.

    python experiments/parity/host_steps.py --out host_steps.json [--layers 24] [--turns 12]
        [--blocks 1 2 4]

Milliseconds of the arms of `zpp-lab bench step`: `compute` (no communication at all), plain FSDP2
in its own loop, and zeropp as on NVLink, where copies bring peers' rows. Weights of 32 columns,
activation checkpointing, one thread; the rest of torch runs on the CPU. Arms take turns in one
process. `--blocks`: plain FSDP2 and zeropp with each of these blocks a unit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import host
import torch
import torch.distributed as dist
from lab import Lab, configured
from torch.testing._internal.distributed.fake_pg import FakeStore

from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench.step.engines import ComputeOnly, PlainFsdp2
from zpp_lab.train.footprint import settle

CLUSTER = ClusterConfig(nodes=1, gpus_per_node=4)
TIMED = 4  # steps of a turn, after one that is not counted


def loops(layers: int, blocks: list[int]) -> dict[str, Any]:
    """By name, whatever takes steps."""
    model = replace(host.SHAPE[0], layers=layers, checkpoint_activations=True)
    host.SHAPE = (model, *host.SHAPE[1:])
    made: dict[str, Any] = {"compute": ComputeOnly(plain(1), host.CPU)}
    for each in blocks:
        more = f", {each}" if len(blocks) > 1 else ""
        made["fsdp2" + more] = PlainFsdp2(plain(each), host.CPU)
        made["zeropp" + more] = host.engine_of("zeropp", CLUSTER, False, blocks_per_unit=each)
    return made


def plain(blocks: int) -> Config:
    dtypes = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    config = configured("zero3_bf16", CLUSTER, train=dtypes, engine={"blocks_per_unit": blocks})
    return replace(config, model=replace(host.SHAPE[0], vocab_size=host.SHAPE[1]))


def timed(loop: Any, batch: Any, steps: int) -> list[float]:
    """Milliseconds of each step."""
    found = []
    for step in range(steps):
        began = time.perf_counter()
        if isinstance(loop, host.Bare):
            loop.step(step, 1e-4, lambda rank, micro: batch, False)
        else:
            loop.step(step, lambda rank, micro: batch)
        found.append(1000 * (time.perf_counter() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    host.load_stub()
    made = loops(args.layers, args.blocks)
    batch = Lab(host.CPU, Path()).batch(host.SHAPE, 0, 0, 0)
    for loop in made.values():
        timed(loop, batch, 3)
    settle()
    every: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.turns):
        for name, loop in made.items():
            every[name] += timed(loop, batch, 1 + TIMED)[1:]
    found = {
        name: {"median": round(statistics.median(own), 2), "least": round(min(own), 2)}
        for name, own in every.items()
    }
    for name, own in found.items():
        print(f"{name:12s} {own['median']:7.2f} ms, at least {own['least']:7.2f}", flush=True)
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    facts |= {"layers": args.layers, "ms": found}
    args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
