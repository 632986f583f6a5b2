"""The gradient norm's sums of squares: kernels and plain torch on a rank's shards of a model.

    python experiments/kernels/norm.py [--model 1_3b] [--ranks 4] [--out FILE.json]

Prints milliseconds on the device and of the host until the call returns (medians of 20), those of
a copy that moves as many bytes, and whether the bits agree. Without a GPU plain torch is timed
alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zpp_lab.codecs import kernels
from zpp_lab.config.compose import compose
from zpp_lab.engines.build import plan_of
from zpp_lab.engines.norm import squares

CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1_3b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = ["cluster.nodes=1", f"cluster.gpus_per_node={asked.ranks}"]
    plan = plan_of(compose([f"model={asked.model}", "model.vocab_size=32000", *shape]))
    torch.manual_seed(0)
    grads = {
        p.name: torch.randn(p.shard_numel, device=device)
        for u in plan.units
        for p in u.unit.parameters
    }
    nbytes = sum(g.nbytes for g in grads.values())
    found: dict[str, object] = {"model": asked.model, "ranks": asked.ranks, "bytes": nbytes}
    sums = {}
    for name in ("cuda", "reference") if device.type == "cuda" else ("reference",):
        kernels.configure(name)  # type: ignore[arg-type]
        sums[name] = squares(grads, plan, device)
        found[name] = timed(lambda: squares(grads, plan, device), device)
        print(f"{name}: {found[name]}")
    if device.type == "cuda":
        found["copy_ms"] = timed(copy_of(nbytes, device), device)["device_ms"]
        found["equal"] = bool(torch.equal(sums["cuda"], sums["reference"]))
        print(f"a copy of as many bytes: {found['copy_ms']} ms; bits equal: {found['equal']}")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def copy_of(nbytes: int, device: torch.device) -> Callable[[], object]:
    """Reads half of the bytes and writes as many."""
    halves = [torch.empty(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2)]
    return lambda: halves[0].copy_(halves[1])


def timed(call: Callable[[], Tensor | object], device: torch.device) -> dict[str, float]:
    on_device, on_host = [], []
    for _ in range(CALLS):
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        began = time.perf_counter()
        call()
        on_host.append(1000 * (time.perf_counter() - began))
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            on_device.append(start.elapsed_time(end))
    host = round(statistics.median(on_host), 3)
    return {"device_ms": round(statistics.median(on_device or on_host), 3), "host_ms": host}


if __name__ == "__main__":
    main()
