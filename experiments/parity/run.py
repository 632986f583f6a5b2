"""Does the real engine give the virtual engine's bits on GPUs, again and again, and at what cost?

    torchrun --standalone --nproc-per-node 4 experiments/parity/run.py --out results

    table   every recipe of tests/engines/fsdp_parity.py, 20 steps, both engines, clusters 1 × W
            and 2 × W/2 by the shape of the process groups: losses, norms, bytes, held-out
            losses and final weights must be equal bit for bit
    race    many steps of one recipe with everything overlapped, twice: equal bit for bit
    cost    median step time of plain FSDP2, of zero3 through our collectives
            (engine.ordered=true), and of zeropp
    profile a trace of one step, and how much of transfers and codecs is overlapped

Without GPUs it runs on the CPU over gloo. Deterministic kernels in `table` and `race`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engines.fsdp_parity import CASES, differs  # noqa: E402
from zpp_lab.api import init  # noqa: E402
from zpp_lab.collectives.transport import ProcessGroups  # noqa: E402
from zpp_lab.collectives.watchdog import Watchdog  # noqa: E402
from zpp_lab.config import ClusterConfig, Config, ModelConfig, load  # noqa: E402
from zpp_lab.engines.build import build_plan  # noqa: E402
from zpp_lab.engines.fsdp import FsdpEngine  # noqa: E402
from zpp_lab.engines.virtual import VirtualEngine  # noqa: E402
from zpp_lab.machine import commit, machine_facts, versions  # noqa: E402
from zpp_lab.models import build_model  # noqa: E402

Shape = tuple[ModelConfig, int, int, int]  # model, vocabulary, sequences, length
SHAPES: dict[str, Shape] = {
    "tiny": (ModelConfig(dim=96, layers=2, heads=4, kv_heads=2, ffn=150), 259, 2, 64),
    "125m": (ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, ffn=2048), 32003, 2, 512),
    "1b": (ModelConfig(dim=2048, layers=22, heads=16, kv_heads=16, ffn=5632), 32000, 1, 2048),
}


class Lab:
    """One rank of the experiment."""

    def __init__(self, device: torch.device, out: Path) -> None:
        self.device, self.out = device, out
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.transports: dict[ClusterConfig, ProcessGroups] = {}

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def keep(self, name: str, found: Any) -> None:
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
            text = json.dumps({**facts, "results": found}, indent=1)
            (self.out / f"{name}.json").write_text(text + "\n")

    def clusters(self) -> list[ClusterConfig]:
        shapes = [ClusterConfig(nodes=1, gpus_per_node=self.world)]
        if self.world % 2 == 0 and self.world > 2:
            shapes.append(ClusterConfig(nodes=2, gpus_per_node=self.world // 2))
        return shapes

    def transport(self, cluster: ClusterConfig) -> ProcessGroups:
        if cluster not in self.transports:
            self.transports[cluster] = ProcessGroups(cluster, Watchdog(300.0))
        return self.transports[cluster]

    def batch(self, shape: Shape, step: int, rank: int, micro: int) -> Any:
        _, vocab, sequences, length = shape
        generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + micro)
        tokens = torch.randint(0, vocab, (sequences, length + 1), generator=generator)
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % vocab
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def real(self, shape: Shape, config: Config) -> FsdpEngine:
        model = build_model(shape[0], shape[1], device="meta")
        config = replace(config, model=shape[0])
        transport = self.transport(config.cluster)
        return FsdpEngine(model, build_plan(model, config), config, self.device, transport)

    def virtual(self, shape: Shape, config: Config) -> VirtualEngine:
        model = build_model(shape[0], shape[1], device=str(self.device), seed=config.seed)
        return VirtualEngine(model, build_plan(model, config), config)

    def run(self, engine: Any, shape: Shape, steps: int) -> tuple[list[Any], list[float]]:
        done = []
        for step in range(steps):
            result = engine.step(step, 1e-3, partial(self.batch, shape, step), False)
            done.append((result.loss, result.grad_norm, dict(result.bytes)))
        heldout = [self.batch(shape, 10**6, i, 0) for i in range(2 * self.world + 1)]
        return done, [engine.evaluate(steps, heldout, wire) for wire in (True, False)]


def free() -> None:
    """FSDP2's reference cycles hold memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def configured(case: str, cluster: ClusterConfig, **changes: Any) -> Config:
    recipe, train = CASES[case]
    values = {
        "recipe": {"name": case, **recipe},
        "cluster": {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node},
        "train": {"clip": 0.5, **train, **changes.pop("train", {})},
        "engine": {"name": "fsdp", "ordered": True, **changes.pop("engine", {})},
    }
    return load(Config, values)


def table(lab: Lab, sizes: list[str], cases: list[str], steps: int) -> bool:
    """Parity of every case; virtual runs are shared out over the ranks."""
    found: dict[str, str] = {}
    for size in sizes:
        for cluster in lab.clusters():
            names = [c for c in cases if applies(c, cluster)]
            for first in range(0, len(names), lab.world):  # as many cases as there are ranks
                some = names[first : first + lab.world]
                found |= _some_cases(lab, size, cluster, some, steps)
            lab.say(f"table {size} {cluster.nodes}x{cluster.gpus_per_node}: {len(names)} recipes")
    wrong = {k: v for k, v in found.items() if v}
    for key, text in wrong.items():
        lab.say(f"DIFFERS {key}: {text}")
    lab.say(f"table: {len(found) - len(wrong)} of {len(found)} bit-equal")
    lab.keep("table", found)
    return not wrong


def _some_cases(
    lab: Lab, size: str, cluster: ClusterConfig, cases: list[str], steps: int
) -> dict[str, str]:
    shape, mine, own = SHAPES[size], None, ""
    for i, case in enumerate(cases):
        engine = lab.real(shape, configured(case, cluster))
        outcome = lab.run(engine, shape, steps)
        weights = {n: p.full_tensor().cpu() for n, p in engine.parameters.items()}
        if i == lab.rank:
            mine, own = (*outcome, weights), case
        del engine
        free()
    found = {}
    if mine is not None:
        engine = lab.virtual(shape, configured(own, cluster))
        outcome = lab.run(engine, shape, steps)
        weights = {n: p.detach().cpu() for n, p in engine.master.items()}
        key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} {own}"
        found[key] = differs(mine, (*outcome, weights))
        del engine
        free()
    every: list[Any] = [None] * lab.world
    dist.all_gather_object(every, found)
    return {k: v for part in every for k, v in part.items()}


def applies(case: str, cluster: ClusterConfig) -> bool:
    try:
        config = configured(case, cluster)
        build_plan(build_model(SHAPES["tiny"][0], SHAPES["tiny"][1], device="meta"), config)
    except ValueError:
        return False
    return True


def race(lab: Lab, size: str, case: str, steps: int, repeats: int) -> bool:
    """The same run again and again: any unordered access shows as another hash."""
    same = True
    found = {}
    for cluster in lab.clusters():
        hashes = []
        for _ in range(repeats):
            config = configured(case, cluster, train={"param_dtype": "bf16"})
            engine = lab.real(SHAPES[size], config)
            outcome = lab.run(engine, SHAPES[size], steps)
            digest = hashlib.sha256(repr(outcome).encode())
            for p in engine.parameters.values():
                digest.update(p.detach().full_tensor().cpu().numpy().tobytes())
            hashes.append(digest.hexdigest())
            del engine
            free()
        key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} {case}, {steps} steps"
        found[key] = hashes
        same &= len(set(hashes)) == 1
        lab.say(f"race {key}: {'equal' if len(set(hashes)) == 1 else 'DIFFERENT'} {hashes[0][:16]}")
    lab.keep("race", found)
    return same


def cost(lab: Lab, size: str, steps: int) -> bool:
    """Median milliseconds of a step; the slowest rank counts."""
    torch.use_deterministic_algorithms(False)
    shape, found = SHAPES[size], {}
    settings = {
        "FSDP2": ("zero3_bf16", {"ordered": False}),
        "zero3 ordered": ("zero3_bf16", {}),
        "zeropp": ("zeropp", {}),
    }
    for cluster in lab.clusters():
        for name, (case, engine_settings) in settings.items():
            config = configured(
                case, cluster, train={"param_dtype": "bf16"}, engine=engine_settings
            )
            engine = lab.real(shape, config)
            times = []
            for step in range(steps + 5):
                dist.barrier()
                began = time.perf_counter()
                engine.step(step, 1e-4, partial(lab.batch, shape, step), False)
                if lab.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1000)
            key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} {name}"
            own = torch.tensor(statistics.median(times[5:]), device=lab.device)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            found[key] = own.item()
            lab.say(f"cost {key}: {found[key]:.2f} ms")
            del engine
            free()
    lab.keep("cost", found)
    return True


def profile(lab: Lab, size: str) -> bool:
    """One overlapped step of zeropp on rank 0: a trace, and how much of the transfers' and the
    codecs' kernel time runs beside other kernels."""
    torch.use_deterministic_algorithms(False)
    found = {}
    for cluster in lab.clusters():
        config = configured("zeropp", cluster, train={"param_dtype": "bf16"})
        engine, shape = lab.real(SHAPES[size], config), SHAPES[size]
        for step in range(5):
            engine.step(step, 1e-4, partial(lab.batch, shape, step), False)
        with torch.profiler.profile() as prof:
            engine.step(5, 1e-4, partial(lab.batch, shape, 5), False)
            if lab.device.type == "cuda":
                torch.cuda.synchronize()
        key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} zeropp"
        found[key] = overlap(prof)
        lab.say(f"profile {key}: {found[key]}")
        if lab.rank == 0:
            lab.out.mkdir(parents=True, exist_ok=True)
            prof.export_chrome_trace(str(lab.out / f"trace-{key.replace(' ', '-')}.json.gz"))
        del engine, prof
        free()
    lab.keep("profile", found)
    return True


def overlap(prof: torch.profiler.profile) -> dict[str, dict[str, float]]:
    """{kind of kernel: its milliseconds, and those of them beside a kernel of another kind}."""
    spans: dict[str, list[tuple[float, float]]] = {"transfer": [], "codec": [], "compute": []}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans[kind(event.name)].append((event.time_range.start, event.time_range.end))
    result = {}
    for name, own in spans.items():
        others = merged([s for n, found in spans.items() if n != name for s in found])
        total = sum(end - begin for begin, end in own)
        beside = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in own for b, e in others)
        result[name] = {"ms": total / 1000, "beside others": beside / 1000}
    return result


def kind(kernel: str) -> str:
    if "nccl" in kernel.lower():
        return "transfer"
    words = ("zpp", "encode", "decode", "reduce_rows")
    return "codec" if any(word in kernel.lower() for word in words) else "compute"


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    done: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if done and begin <= done[-1][1]:
            done[-1] = (done[-1][0], max(end, done[-1][1]))
        else:
            done.append((begin, end))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="table,race,cost,profile")
    parser.add_argument("--sizes", default="tiny,125m", help="of the table")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=20, help="of the table")
    parser.add_argument("--race-size", default="125m")
    parser.add_argument("--race-steps", type=int, default=500)
    parser.add_argument("--cost-size", default="125m")
    parser.add_argument("--cost-steps", type=int, default=40)
    args = parser.parse_args()
    lab = Lab(init(), args.out)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ok = True
    for part in args.parts.split(","):
        began = time.perf_counter()
        if part == "table":
            ok &= table(lab, args.sizes.split(","), args.cases.split(","), args.steps)
        elif part == "race":
            ok &= race(lab, args.race_size, "zeropp", args.race_steps, repeats=2)
        elif part == "profile":
            ok &= profile(lab, args.cost_size)
        else:
            ok &= cost(lab, args.cost_size, args.cost_steps)
        lab.say(f"{part}: {time.perf_counter() - began:.0f} s")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if ok else 1)


if __name__ == "__main__":
    main()
