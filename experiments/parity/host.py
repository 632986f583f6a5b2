"""What a step asks of the host, without a GPU: kernels, transfers and NCCL do nothing.

    python experiments/parity/host.py --out host.json [--steps 60] [--functions]

Four ranks that are not there (torch's fake process group), blocks of tiny weights with the real
number of parameters. CPU time of this thread in what FSDP2 does for one unit, its own work
included: gather (casts, allocation, copy-in, transfer), copy-out, reduction. Launches, events and
streams cost nothing here, so a shipment step by step looks cheaper than it is. The settings take
turns, since a machine's pace changes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lab import Lab, QuickStart, Shape, configured
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from zpp_lab.codecs import kernels
from zpp_lab.collectives.peer.slots import MOST_SLOTS, Express
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.transport import LINKS, ProcessGroups, members
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.runs.provenance import commit, machine_facts, versions

SHAPE: Shape = (ModelConfig(dim=32, layers=4, heads=2, kv_heads=2, ffn=64), 64, 1, 16)
CPU = torch.device("cpu")
TURNS = 15


class Idle:
    """Streams, marks and events that do nothing."""

    cuda_event = cuda_stream = 0

    def mark(self, old: Any = None) -> Idle:
        return self

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        yield


class IdleExpress(Express):
    def __init__(self, place: int, count: int) -> None:
        self.place, self.count, self.pads = place, count, 0
        self.meetings = torch.zeros(1, dtype=torch.int32)
        self.met: Any = [Idle()] * MOST_SLOTS
        self.read: Any = Idle()
        self.home: Any = Idle()
        self.lane: Any = Idle()
        self.call = torch.ops.zpp_lab.ship.default


class IdleMemory:
    """`peer.Shared` of a rank that is alone. `stepwise`: as without the kernels' library."""

    def __init__(self, count: int, stepwise: bool) -> None:
        self.streams, self.count, self.stepwise = Idle(), count, stepwise

    def allocate(self, nbytes: int) -> Sequence[Tensor]:
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.count)]

    def express(self) -> Express | None:
        return None if self.stepwise else IdleExpress(0, self.count)

    def barrier(self) -> None:
        """Nobody else is there."""

    def pull(self, outs: Sequence[Tensor], sources: Sequence[Tensor], own: int) -> None:
        """The bytes stay where they are."""


class Bare(QuickStart):
    """Its numbers mean nothing."""

    def _explain(self, step: int, batches: Any) -> None:
        """Nothing to explain."""


def load_stub() -> None:
    """Compile the operators that do nothing, and let them serve CPU tensors."""
    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stub.so"
        source = Path(__file__).with_name("host_stub.cpp")
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-isystem{include}"]
        command += ["-DTORCH_TARGET_VERSION=0x020B000000000000", str(source), "-o", str(library)]
        command += [f"-L{lib}", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{lib}"]
        subprocess.run(command, check=True)
        torch.ops.load_library(str(library))
    kernels.use_kernels = lambda tensor: True


def engine_of(case: str, cluster: ClusterConfig, stepwise: bool, **engine: Any) -> Bare:
    config = configured(
        case, cluster, train={"param_dtype": "bf16"}, engine={"gather": "flat", **engine}
    )
    model = build_model(SHAPE[0], SHAPE[1], device="meta")
    groups = ProcessGroups(cluster)
    shared: dict[Any, Callable[[], Any]] = {
        link: partial(IdleMemory, len(members(cluster, link, 0)), stepwise) for link in LINKS
    }
    transport = PeerTransport(groups, shared, 0)
    return Bare(model, build_plan(model, config), config, CPU, transport)


class Meter:
    """CPU microseconds of every call of FSDP2's parts, by part."""

    PARTS: ClassVar = {"gather": "foreach_all_gather", "copy-out": "foreach_all_gather_copy_out"}

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        for part, name in {**self.PARTS, "reduce": "foreach_reduce"}.items():
            setattr(param_group, name, self._timed(part, getattr(param_group, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            result = function(*args, **kwargs)
            self.times[part].append((time.thread_time_ns() - began) / 1000)
            return result

        return call

    def taken(self) -> dict[str, list[float]]:
        found, self.times = self.times, defaultdict(list)
        return found


def run(engine: Bare, lab: Lab, steps: int) -> None:
    batch = lab.batch(SHAPE, 0, 0, 0)
    for step in range(steps):
        engine.step(step, 1e-4, lambda rank, micro: batch, False)


def in_turns(
    engines: dict[str, Bare], lab: Lab, meter: Meter, steps: int
) -> dict[str, dict[str, list[float]]]:
    """CPU microseconds of every call, by setting and part; each setting has TURNS turns."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in engines}
    for _ in range(TURNS):
        for name, engine in engines.items():
            run(engine, lab, 2)  # warms caches
            meter.taken()
            run(engine, lab, -(-steps // TURNS))
            for part, own in meter.taken().items():
                found[name][part] += own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="of each setting")
    parser.add_argument("--functions", action="store_true", help="where the time goes")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    load_stub()
    lab, meter = Lab(CPU, Path()), Meter()
    found: dict[str, dict[str, float]] = {}
    for nodes in (1, 2):
        cluster = ClusterConfig(nodes=nodes, gpus_per_node=4 // nodes)
        engines = {"FSDP2": engine_of("zero3_bf16", cluster, False, ordered=False)}
        for name, stepwise in (("in one call", False), ("step by step", True)):
            engines[f"zero3 ordered, {name}"] = engine_of("zero3_bf16", cluster, stepwise)
            engines[f"zeropp, {name}"] = engine_of("zeropp", cluster, stepwise)
        for name, parts in in_turns(engines, lab, meter, args.steps).items():
            key = f"{nodes}x{4 // nodes} {name}"
            found[key] = {part: round(statistics.median(own), 1) for part, own in parts.items()}
            print(f"{key}: {found[key]} us", flush=True)
        for name, engine in engines.items() if args.functions else ():
            print(name)
            profiler = cProfile.Profile()
            profiler.runcall(run, engine, lab, 5)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        del engines
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    args.out.write_text(json.dumps({**facts, "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
