"""The price of a step: plain FSDP2, ordered zero3 and zeropp in turns, and a profile of zeropp."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lab import SHAPES, Lab, Shape, configured, free

Span = tuple[float, float]
KINDS = ("encode", "decode", "transfer", "barrier", "FSDP2's own", "model")
ROUNDS = 4  # every setting has its turn in each


def settings(lab: Lab) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is timed: a case of the table and engine settings."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "FSDP2": ("zero3_bf16", {"ordered": False, "gather": "flat"})
    }
    for choice in lab.priced:
        found[f"zero3 ordered, {choice}"] = ("zero3_bf16", {"transport": choice, "gather": "flat"})
        found[f"zeropp, {choice}"] = ("zeropp", {"transport": choice, "gather": "flat"})
    return found


def cost(lab: Lab, sizes: list[str], steps: int) -> None:
    """Median milliseconds of a step; the slowest rank counts."""
    torch.use_deterministic_algorithms(False)
    found: dict[str, float] = {}
    for size in sizes:
        for cluster in lab.clusters():
            shape, engines = SHAPES[size], {}
            for name, (case, engine) in settings(lab).items():
                train = {"param_dtype": "bf16"}
                config = configured(case, cluster, train=train, engine=engine)
                engines[name] = lab.real(shape, config, quick=True)
            times: dict[str, list[float]] = defaultdict(list)
            for turn in range(ROUNDS):
                for name, engine in engines.items():
                    times[name] += timed(lab, engine, shape, turn, -(-steps // ROUNDS))
            for name, own in times.items():
                slowest = torch.tensor(own, device=lab.device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} {name}"
                found[key] = statistics.median(slowest.tolist())
                plain = found[f"{size} {cluster.nodes}x{cluster.gpus_per_node} FSDP2"]
                lab.say(f"cost {key}: {found[key]:.2f} ms ({found[key] / plain - 1:+.1%})")
            lab.keep("cost", found)  # what is known, should time end here
            del engines, engine
            free()


def timed(lab: Lab, engine: Any, shape: Shape, turn: int, steps: int) -> list[float]:
    """Milliseconds of some steps, after one that is not counted (five in the first turn)."""
    times, warm = [], 1 if turn else 5
    for step in range(turn * (steps + 5), turn * (steps + 5) + warm + steps):
        dist.barrier()
        began = time.perf_counter()
        engine.step(step, 1e-4, partial(lab.batch, shape, step), False)
        if lab.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1000)
    return times[warm:]


def profile(lab: Lab, size: str) -> None:
    """One step of zeropp on rank 0: what runs beside the model's own kernels."""
    torch.use_deterministic_algorithms(False)
    found: dict[str, Any] = {}
    for cluster in lab.clusters():
        engine_settings = {"gather": "auto"}
        config = configured(
            "zeropp", cluster, train={"param_dtype": "bf16"}, engine=engine_settings
        )
        engine, shape = lab.real(SHAPES[size], config, quick=True), SHAPES[size]
        for step in range(5):
            engine.step(step, 1e-4, partial(lab.batch, shape, step), False)
        with torch.profiler.profile() as prof:
            engine.step(5, 1e-4, partial(lab.batch, shape, 5), False)  # ranks start apart
            dist.barrier()
        with torch.profiler.profile() as prof:
            engine.step(6, 1e-4, partial(lab.batch, shape, 6), False)
            if lab.device.type == "cuda":
                torch.cuda.synchronize()
        key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} zeropp"
        found[key] = overlap(prof)
        for kind, figures in found[key].items():
            lab.say(f"profile {key} {kind}: {figures}")
        if lab.rank == 0:
            lab.out.mkdir(parents=True, exist_ok=True)
            prof.export_chrome_trace(str(lab.out / f"trace-{key.replace(' ', '-')}.json.gz"))
        lab.keep("profile", found)
        del engine, prof
        free()


def overlap(prof: torch.profiler.profile) -> dict[str, Any]:
    """By kind of kernel: its milliseconds, and the share of them beside the model's kernels;
    how long the host waited for the device, and the largest kernels."""
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = [e for e in events if not is_range(e)]
    lanes = {e.device_resource_id for e in events if kind(e.name) == "barrier"}
    compute = main_stream(events)
    spans: dict[str, list[Span]] = {name: [] for name in KINDS}
    by_name: dict[str, float] = defaultdict(float)
    for event in events:
        span = event.time_range.start, event.time_range.end
        name = kind(event.name, event.device_resource_id in lanes - {compute})
        if name == "model" and event.device_resource_id != compute:
            name = "FSDP2's own"
        spans[name].append(span)
        by_name[f"{name}: {event.name[:60]}"] += (span[1] - span[0]) / 1000
    model = merged(spans["model"])
    result: dict[str, Any] = {}
    for name, own in spans.items():
        total = sum(end - begin for begin, end in own)
        result[name] = {"ms": round(total / 1000, 3), "launches": len(own)}
        if name != "model" and total:
            result[name]["share beside the model"] = round(beside(own, model) / total, 3)
    every = [s for own in spans.values() for s in own]
    if every:
        result["whole"] = {"ms": (max(e for _, e in every) - min(b for b, _ in every)) / 1000}
        result["whole"]["busy ms"] = sum(e - b for b, e in merged(every)) / 1000
    result["host waits"] = waits(prof)
    result["largest"] = dict(sorted(by_name.items(), key=lambda x: -x[1])[:12])
    return result


def is_range(event: Any) -> bool:
    """A named range that somebody drew around kernels, not a kernel."""
    named = (
        "fsdp::",
        "nccl:",
        "optimizer.",
        "profilerstep",
        "autograd::",
        "symm_mem:",
        "c10d::all",
    )
    return bool(getattr(event, "is_user_annotation", False)) or event.name.lower().startswith(named)


def main_stream(events: list[Any]) -> Any:
    """The stream with the most matrix products: the model's own."""
    time: dict[Any, float] = defaultdict(float)
    for event in events:
        if "gemm" in event.name.lower() or "nvjet" in event.name.lower():
            time[event.device_resource_id] += event.time_range.end - event.time_range.start
    return max(time, key=lambda s: time[s]) if time else None


def waits(prof: torch.profiler.profile) -> dict[str, list[float]]:
    """Calls in which the host waited for the device: how many, and milliseconds in all."""
    found: dict[str, list[float]] = {}
    for event in prof.events():
        if "Synchronize" in event.name:
            count, total = found.get(event.name, (0, 0.0))
            passed = (event.time_range.end - event.time_range.start) / 1000
            found[event.name] = [count + 1, round(total + passed, 3)]
    return found


def kind(kernel: str, in_lane: bool = False) -> str:
    """encode, decode (and sums), transfer, barrier, or model."""
    name = kernel.lower()
    if "barrier_kernel" in name or "meet_kernel" in name:
        return "barrier"
    if "zpp" in name and "copy_kernel" in name:
        return "transfer"
    if "zpp" in name:
        return "encode" if "encode" in name else "decode"
    copies = "memcpy" in name or "multi_tensor" in name
    return "transfer" if "nccl" in name or "ptop" in name or (copies and in_lane) else "model"


def beside(own: list[Span], others: list[Span]) -> float:
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in own for b, e in others)


def merged(spans: list[Span]) -> list[Span]:
    done: list[Span] = []
    for begin, end in sorted(spans):
        if done and begin <= done[-1][1]:
            done[-1] = (done[-1][0], max(end, done[-1][1]))
        else:
            done.append((begin, end))
    return done
