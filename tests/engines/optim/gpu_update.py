"""Moments in bf16 and 8 bits on this machine's GPU: bits, host waits, speed, memory, and a save.

    python -m tests.engines.optim.gpu_update [--millions 1024] [--folder FOLDER]

Prints one JSON line a fact. On a machine without a GPU it runs on the CPU, without the facts
about waiting and device memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zpp_lab.codecs import kernels
from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import StateKind, state_bytes
from zpp_lab.engines.optim.build import adamw, optimizer_state, update
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS: tuple[StateKind, ...] = ("fp32", "bf16", "8bit")
Backend = Literal["auto", "reference"]
Shape = tuple[int, ...]
LAYER: list[Shape] = [(512,), (512,), *4 * [(512, 512)], *2 * [(1376, 512)], (512, 1376)]
STEPS = 10 if DEVICE.type == "cuda" else 1


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def trained(kind: StateKind, rank: int, world: int) -> list[torch.Tensor]:
    """Weights and states of one shard after some steps."""
    shapes, steps = [(13, 5120), (7, 333), (9,)], 4
    rows = [slice(rank * -(-s[0] // world), (rank + 1) * -(-s[0] // world)) for s in shapes]
    make = torch.Generator().manual_seed(0)
    whole = [[torch.randn(s, generator=make) for s in shapes] for _ in range(steps + 1)]
    start = (t[r].to(DEVICE) for t, r in zip(whole[0], rows, strict=True))
    parameters = {str(i): nn.Parameter(t) for i, t in enumerate(start)}
    optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), seed=3)
    for step in range(steps):
        for p, t, r in zip(parameters.values(), whole[step + 1], rows, strict=True):
            p.grad = t[r].to(DEVICE)
        update(optimizer, step, torch.tensor(True, device=DEVICE))
    state = optimizer_state(optimizer, parameters)
    return [*(p.detach() for p in parameters.values())] + [
        t for key in sorted(state) if key != "step" for t in state[key].values()
    ]


def bits() -> None:
    for kind in ("bf16", "8bit"):
        whole = trained(kind, 0, 1)
        for world in (2, 3, 4):
            shards = [trained(kind, rank, world) for rank in range(world)]
            parts = zip(whole, *shards, strict=True)
            say(bits=kind, world=world, equal=all(torch.equal(t, torch.cat(p)) for t, *p in parts))


def speed(kind: StateKind, shapes: list[Shape], backend: Backend = "auto") -> None:
    """Of parameters with these shapes."""
    kernels.configure(backend)
    parameters = {str(i): nn.Parameter(torch.zeros(s, device=DEVICE)) for i, s in enumerate(shapes)}
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer, ok = adamw(parameters, TrainConfig(optimizer_state=kind)), torch.tensor(True)
    ok = ok.to(DEVICE) if DEVICE.type == "cuda" or kind != "fp32" else None
    for step in range(2):
        update(optimizer, step, ok)
    wait()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")  # the host must not wait
    began = time.perf_counter()
    for step in range(2, 2 + STEPS):
        update(optimizer, step, ok)
    host = (time.perf_counter() - began) / STEPS
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    wait()
    seconds = (time.perf_counter() - began) / STEPS
    numel = sum(p.numel() for p in parameters.values())
    more = (torch.cuda.max_memory_allocated() - before) >> 20 if DEVICE.type == "cuda" else None
    # gradient, weight and both moments in, the last three out
    moved = 12 * numel + 2 * sum(state_bytes(s, kind) for s in shapes)
    say(update=kind, backend=backend, parameters=len(shapes), ms_per_1e9=seconds / numel * 1e12,
        tb_s=moved / seconds / 1e12, host_ms=host * 1e3, temporary_mib=more)  # fmt: skip


def save(folder: Path, millions: int) -> None:
    """One rank's fp32 weights, streamed."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    shape = (3125, 5120)
    weights = {f"w{i}": torch.randn(shape, device=DEVICE) for i in range(max(1, millions // 16))}
    wait()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    for weights_only in (False, True):
        saving = Saving(host=0, weights_only=weights_only)
        checkpoints = Checkpoints(folder / "saved", 1, saving, device=DEVICE)
        began = time.perf_counter()
        checkpoints.save(1, {"weights": weights})
        seconds = time.perf_counter() - began
        size = sum(f.stat().st_size for f in checkpoints.path(1).iterdir())
        more = torch.cuda.max_memory_allocated() - before if DEVICE.type == "cuda" else None
        kept = Saved(checkpoints.path(1)).state()["weights"]
        same = all(torch.equal(weights[n].to(t.dtype).cpu(), t) for n, t in kept.items())
        say(saved=size, seconds=seconds, gb_s=size / seconds / 1e9, more_gpu=more, equal=same)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    bits()
    large = max(1, asked.millions // 16) * [(3125, 5120)]
    for kind in KINDS:
        speed(kind, large)
        speed(kind, (40 if DEVICE.type == "cuda" else 1) * LAYER)
    for kind in KINDS[1:]:
        speed(kind, large, "reference")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        save(Path(folder), asked.millions)


if __name__ == "__main__":
    main()
