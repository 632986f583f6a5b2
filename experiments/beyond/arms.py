"""Time steps of models larger than the GPU: ours with placed state, and the peers.

    python experiments/beyond/arms.py --out OUT.json --arms compute,ours,fsdp2 model=6_7b

Each arm is a process of its own, one after another, since host memory holds one of them. Weights
and tokens are random. What the machine uses of its memory is read five times a second: MemTotal
less MemAvailable, as machines whose memory grows show less than they have; with --beside what the
arm's own processes have, as others run there too. An arm that passes --host-gib is stopped before
the kernel kills something else; that, like any other failure, is its result. --gpu-gib: what every
arm's allocator may take, as on a smaller GPU. `auto` is what engine.place=auto means there, or on a
machine of --plan-gib and --plan-host-gib; each of our arms has its placement and planned memory
beside what was measured, and with --machine (a file of `bench calibrate`, or a ready one's name)
predicted seconds. With cluster.gpus_per_node=2 an arm of ours is two processes.

A step's rate is of --steps steps after two others, each awaited by its loss. Ours has an update
under way at both ends, so --steps updates belong to them; what the last one takes is `flush_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.files import write_atomic

GIB = 2**30
BASE = [
    "engine=fsdp",
    "recipe=zero3",
    "engine.deterministic=false",
    "cluster.nodes=1",
    "cluster.gpus_per_node=1",
    "data.seq_len=2048",
    "train.param_dtype=bf16",
    "train.reduce_dtype=bf16",
    "train.batch_size=8",
]
SPLIT = ["train.masters=split", "engine.place=host"]
AUTO = ["train.masters=split", "engine.place=auto"]
# By name: maker, settings, and what to try where it fails.
ARMS: dict[str, tuple[str, list[str], str | None]] = {
    "compute": ("compute", [], None),
    "ours": ("ours", [*SPLIT, "train.optimizer_state=fp32"], None),
    "ours_8bit": ("ours", [*SPLIT, "train.optimizer_state=8bit"], None),
    "auto": ("ours", [*AUTO, "train.optimizer_state=fp32"], None),
    "auto_8bit": ("ours", [*AUTO, "train.optimizer_state=8bit"], None),
    "by_unit": ("ours", [*SPLIT, "train.optimizer_state=8bit", "train.clip_by=unit"], None),
    "fsdp2": ("fsdp2", [], "fsdp2_unpinned"),
    "fsdp2_unpinned": ("fsdp2_unpinned", [], None),
    "deepspeed": ("deepspeed", [], "deepspeed_unpinned"),
    "deepspeed_unpinned": ("deepspeed_unpinned", [], None),
    "deepspeed_2": ("deepspeed_2", [], None),
}
PINNED_EXACT = "pinned_max_round_threshold_mb:1"  # torch would round up to powers of two


# ---------------------------------------------------------------------- one arm, in its process


class Timed:
    """step: one optimizer step → its loss, awaited. settle: finish what the last one left."""

    def __init__(self, step: Callable[[int], float], settle: Callable[[], None]) -> None:
        self.step, self.settle = step, settle


def batch_of(config: Config, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    from zpp_lab.tools.bench.step.rank import random_batch

    x, y = random_batch(config, step, 0, 0)
    return x.to(device), y.to(device)


def ours(config: Config, device: torch.device) -> Timed:
    from zpp_lab.tools.bench.step.engines import LR, quick
    from zpp_lab.tools.bench.step.rank import random_batch

    engine = quick(config, device).engine  # type: ignore[attr-defined]

    def step(number: int) -> float:
        loss: float = engine.step(number, LR, partial(random_batch, config, number), False).loss
        return loss

    return Timed(step, engine.settle)


def compute(config: Config, device: torch.device) -> Timed:
    """Forward and backward of weights in bf16, whose gradients are dropped: no optimizer."""
    from zpp_lab.tools.bench.step.engines import draw, meta_model

    model = meta_model(config).bfloat16()
    draw(model, device)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step(number: int) -> float:
        loss = model(*batch_of(config, device, number))
        loss.backward()
        return float(loss.detach())

    return Timed(step, lambda: None)


def fsdp2(config: Config, device: torch.device, pin: bool = True) -> Timed:
    """FSDP2 with CPUOffloadPolicy and torch's fused AdamW on the CPU, as its users write it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from zpp_lab.models.start import materialize
    from zpp_lab.tools.bench.step.engines import meta_model

    model, train = meta_model(config), config.train
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin and device.type == "cuda"),
    }
    for _, block in model.units():
        fully_shard(block, **how)
    fully_shard(model, **how)
    materialize(model, "cpu")
    drawn(model, device)
    for module in model.modules():  # FSDP2 offloads parameters alone
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    settings: dict[str, Any] = {"betas": (train.beta1, train.beta2), "eps": train.eps}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, **settings)

    def step(number: int) -> float:
        loss = model(*batch_of(config, device, number))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Timed(step, lambda: None)


@torch.no_grad()
def drawn(model: nn.Module, device: torch.device) -> None:
    """Draw weights in host memory, one at a time on the device, which is faster."""
    for p in model.parameters():
        own = p.to_local()  # type: ignore[attr-defined]
        own.copy_(torch.empty_like(own, device=device).normal_(0, 0.02))


def deepspeed(config: Config, device: torch.device, stage: int = 3, pin: bool = True) -> Timed:
    """ZeRO-Offload with DeepSpeed's own AdamW on the CPU."""
    from zpp_lab.engines.deepspeed.engine import load_deepspeed
    from zpp_lab.tools.bench.step.engines import draw, meta_model

    made, train = load_deepspeed(device), config.train
    model = meta_model(config).bfloat16()
    draw(model, device)
    adam = {"lr": 1e-4, "betas": [train.beta1, train.beta2], "eps": train.eps}
    settings = {
        "train_micro_batch_size_per_gpu": train.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.clip,
        "steps_per_print": 2**31,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam | {"weight_decay": train.weight_decay}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": pin and device.type == "cuda"},
        },
    }
    engine, *_ = made.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=settings,
        dist_init_required=False,
    )

    def step(number: int) -> float:
        loss = engine(*batch_of(config, device, number))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Timed(step, lambda: None)


MAKERS: dict[str, Callable[[Config, torch.device], Timed]] = {
    "ours": ours,
    "compute": compute,
    "fsdp2": fsdp2,
    "fsdp2_unpinned": partial(fsdp2, pin=False),
    "deepspeed": deepspeed,
    "deepspeed_unpinned": partial(deepspeed, pin=False),
    "deepspeed_2": partial(deepspeed, stage=2),
}


def measure(maker: str, overrides: Sequence[str], steps: int, gpu_gib: float) -> dict[str, Any]:
    """Make an arm in this process and time it."""
    from zpp_lab.codecs import kernels
    from zpp_lab.engines.build import pick_device
    from zpp_lab.train.launch.launcher import connect

    config = compose(list(overrides))
    connect(config)
    device = pick_device(config.engine)
    on_gpu = device.type == "cuda"
    kernels.configure(config.ops.backend)
    if on_gpu:
        with suppress(RuntimeError, ValueError):  # older versions of torch do not know it
            allocator = [*filter(None, [os.environ.get("PYTORCH_CUDA_ALLOC_CONF")]), PINNED_EXACT]
            torch._C._accelerator_setAllocatorSettings(",".join(allocator))
        total = torch.cuda.get_device_properties(device).total_memory
        if gpu_gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_gib * GIB / total), device)

    def awaited(action: Callable[[], Any]) -> float:
        began = time.perf_counter()
        action()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    torch.manual_seed(1)  # arms that compute the same then have the same losses
    made: list[Timed] = []
    built = awaited(lambda: made.append(MAKERS[maker](config, device)))
    (timed,), losses = made, list[float]()

    def step(number: int) -> None:
        losses.append(timed.step(number))

    warm = [awaited(partial(step, n)) for n in range(2)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    retries = allocator_retries(on_gpu)
    began = time.perf_counter()
    seconds = []
    for number in range(2, 2 + steps):
        before = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - before)
    every = time.perf_counter() - began
    flush = awaited(timed.settle)
    tokens = config.train.batch_size * config.data.seq_len * config.cluster.world
    found: dict[str, Any] = {
        "parameters": parameters(config),
        "build_s": built,
        "warm_up_s": warm,
        "seconds": seconds,
        "flush_s": flush,
        "tokens_per_s": steps * tokens / every,
        "tokens_per_s_with_flush": steps * tokens / (every + flush),
        "losses": losses,
        "torch": torch.__version__,
    }
    if on_gpu:
        found["device"] = torch.cuda.get_device_name(device)
        found["gpu_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        found["allocator_retries"] = allocator_retries(on_gpu) - retries
        found["reserved_gib_by_stream"] = reserved_by_stream()
    return found


def allocator_retries(on_gpu: bool) -> int:
    """How often the allocator has given memory back to get some, and waited for the device."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if on_gpu else 0


def reserved_by_stream() -> list[float]:
    """GiB that the allocator keeps for each stream, which others cannot take; largest first."""
    kept: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        kept[segment["stream"]] = kept.get(segment["stream"], 0) + segment["total_size"]
    return sorted((size / GIB for size in kept.values()), reverse=True)


def parameters(config: Config) -> int:
    from zpp_lab.tools.bench.step.engines import meta_model

    return sum(p.numel() for p in meta_model(config).parameters())


# ---------------------------------------------------------------------- all arms, watched


class HostMemory(threading.Thread):
    """Samples what the machine uses, or (`beside`) these processes alone; stops them where that
    passes `most` bytes."""

    def __init__(self, ranks: list[subprocess.Popen[str]], most: float, beside: bool) -> None:
        super().__init__(daemon=True)
        self.ranks, self.most, self.beside = ranks, most, beside
        self.peak, self.passed = 0, False

    def run(self) -> None:
        while self.ranks[0].poll() is None:
            pids = [rank.pid for rank in self.ranks]
            self.peak = max(self.peak, own_bytes(pids) if self.beside else used_bytes())
            if self.peak > self.most and not self.passed:
                self.passed = True
                stop(self.ranks)
            if any(rank.poll() for rank in self.ranks[1:]):  # the first one would wait for it
                stop(self.ranks)
            time.sleep(0.2)


def stop(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()


def own_bytes(pids: list[int]) -> int:
    """What processes have in memory, pinned or not, with their page tables."""
    found = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found += sum(int(s.split()[1]) for s in lines if s.startswith(("VmRSS", "VmPTE")))
    return 1024 * found


def used_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, there = (int(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return 1024 * (total - there)


def planned(overrides: list[str], args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return one of our arms with engine.place=auto resolved as `zpp-lab train` does, and its plan.
    ValueError where it does not fit."""
    from zpp_lab.config.load import written
    from zpp_lab.tools.plan.cost.machine import load_machine
    from zpp_lab.tools.plan.cost.state import NoFigures
    from zpp_lab.tools.plan.cost.step import predict
    from zpp_lab.train.memory.advice import settled
    from zpp_lab.train.memory.outlook import expected

    whole = args.plan_gib or args.gpu_gib
    gpu = [f"engine.gpu_gib={whole}"] if whole else []
    host = args.plan_host_gib or args.host_gib
    limits = [*gpu, f"engine.host_gib={host}", "run.resume=false"]
    config, _ = settled(compose([*overrides, *limits]))
    outlook = expected(config)
    found: dict[str, Any] = {
        "units": len(outlook.plan.units),
        "units_in_host_memory": outlook.placed,
        "planned_gpu_gib": outlook.estimate.peak / GIB,
        "planned_host_gib": outlook.estimate.host / GIB,
    }
    if args.machine:
        machine = load_machine(args.machine)
        try:
            time = predict(config, machine)
        except NoFigures as error:
            found["not_predicted"] = str(error)
        else:
            names = ("step_s", "flush_s", "bus_s", "compute_s", "optimizer_s")
            found["predicted"] = {n: getattr(time, n) for n in names} | {"machine": machine.name}
    return [*overrides, f"engine.place={written(config.engine.place)}"], found


def run_arm(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in processes of its own → what it measured, or why it did not."""
    maker, settings, _ = ARMS[name]
    overrides = [*BASE, *settings, *args.overrides]
    world = compose(overrides).cluster.world
    plan: dict[str, Any] = {}
    if maker == "ours":
        try:
            overrides, plan = planned(overrides, args)
        except ValueError as error:
            return {"arm": name, "settings": overrides, "failed": str(error), "wall_s": 0.0}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    meet = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    meet |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    words = [sys.executable, __file__, "--one", maker, "--steps", str(args.steps)]
    words += ["--gpu-gib", str(args.gpu_gib), *overrides]
    before, began = used_bytes(), time.perf_counter()
    log = args.logs / f"{args.out.stem}.{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        ranks = [
            subprocess.Popen(
                words,
                stdout=errors if rank else subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        memory = HostMemory(ranks, args.host_gib * GIB, args.beside)
        memory.start()
        late = False
        try:
            left = max(1.0, min(args.limit, args.until - time.time() - 10))
            said, _ = ranks[0].communicate(timeout=left)
        except subprocess.TimeoutExpired:
            late = True
        stop(ranks)
        if late:
            said, _ = ranks[0].communicate()
        memory.join()
        for rank in ranks[1:]:
            rank.wait()
    found: dict[str, Any] = {"arm": name, "settings": overrides} | plan
    lines = [line for line in said.splitlines() if line.startswith('{"')]
    if ranks[0].returncode == 0 and lines:
        found |= json.loads(lines[-1])
    elif memory.passed:
        found["failed"] = f"stopped: more than {args.host_gib:g} GiB of host memory in use"
    elif late:
        found["failed"] = f"stopped: no result within {left:.0f} s"
    else:
        found["failed"] = reason(log.read_text(), ranks[0].returncode)
    found["host_gib"] = (memory.peak - (0 if args.beside else before)) / GIB
    if not args.beside:
        found["host_in_use_gib"] = memory.peak / GIB
    found["wall_s"] = time.perf_counter() - began
    return found


def reason(log: str, code: int) -> str:
    """The last line of a log that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "error:" in line]
    return lines[-1][:600] if lines else f"ended with code {code}"


def summary(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{found['arm']}: {found['failed']} ({found['wall_s']:.0f} s)"
    gpu, steps = found.get("gpu_reserved_gib", 0.0), found["seconds"]
    text = (
        f"{found['arm']}: {found['tokens_per_s']:.0f} tokens/s, {sum(steps) / len(steps):.3f} s a "
        f"step, {found['flush_s']:.3f} s to flush, GPU {gpu:.1f} GiB, host {found['host_gib']:.1f} "
        f"GiB, {found.get('allocator_retries', 0)} retries ({found['wall_s']:.0f} s)"
    )
    if "units" in found:
        text += (
            f"; planned GPU {found['planned_gpu_gib']:.1f}, host {found['planned_host_gib']:.1f} "
            f"GiB; of {found['units']} units in host memory {found['units_in_host_memory']}"
        )
    if "predicted" in found:
        time = found["predicted"]
        text += f"; predicted {time['step_s']:.3f} s, {time['flush_s']:.3f} s to flush"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="of `zpp-lab train`")
    parser.add_argument("--out", type=Path, default=Path("beyond.json"))
    parser.add_argument("--arms", default="compute")
    parser.add_argument("--machine", default="", help="whose figures predict seconds")
    parser.add_argument("--logs", type=Path, default=Path("runs/beyond"))
    parser.add_argument("--one", choices=MAKERS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gpu-gib", type=float, default=0, help="0: all of it")
    parser.add_argument("--plan-gib", type=float, default=0, help="a GPU's memory; --gpu-gib")
    parser.add_argument("--plan-host-gib", type=float, default=0, help="a host's; --host-gib")
    parser.add_argument("--host-gib", type=float, default=1e9)
    parser.add_argument("--beside", action="store_true", help="others run on this machine too")
    parser.add_argument("--limit", type=float, default=200, help="seconds of an arm")
    parser.add_argument("--until", type=float, default=1e18, help="unix time of the call's end")
    args = parser.parse_intermixed_args()
    if args.one:
        print(json.dumps(measure(args.one, args.overrides, args.steps, args.gpu_gib)), flush=True)
        os._exit(0)  # what is pinned need not be given back piece by piece
    from zpp_lab.runs.provenance import commit, machine_facts

    args.out.parent.mkdir(parents=True, exist_ok=True)
    limits = {"gpu_gib": args.gpu_gib, "host_gib": args.host_gib, "steps": args.steps}
    limits |= {"plan_gib": args.plan_gib, "plan_host_gib": args.plan_host_gib}
    limits["beside"] = args.beside
    result: dict[str, Any] = {"machine": machine_facts(), "commit": commit(), "limits": limits}
    result["arms"] = []
    for turn in range(args.rounds):
        for word in args.arms.split(","):
            name: str | None = word
            while name is not None:
                if time.time() > args.until - 30:
                    found = {"arm": name, "failed": "not begun: the call is over", "wall_s": 0.0}
                else:
                    found = run_arm(name, args)
                result["arms"].append(found | {"round": turn})
                write_atomic(args.out, json.dumps(result, indent=1) + "\n")
                print(summary(found), flush=True)
                name = ARMS[name][2] if "failed" in found else None
    return 0


if __name__ == "__main__":
    sys.exit(main())
