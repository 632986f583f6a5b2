"""Can emulated nodes share this machine's GPUs? Each part with its error; none stops the others.

    python experiments/speed/share_probe.py --out probe.json     # as root; under 60 s on two GPUs
    python experiments/speed/share_probe.py --cpu                # the same way with gloo

Parts: MPS starts; ranks of two nodes on one GPU reduce through NCCL's sockets; symmetric memory
works inside a node, alone and beside that; what engine.transport=auto takes. What fails is tried
again with less, to see where it lies: one GPU, no network namespaces, no MPS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zpp_lab.config.schema import ClusterConfig
from zpp_lab.files import write_atomic
from zpp_lab.tools.links.network import Tools
from zpp_lab.tools.links.nodes import EmulatedNodes, OneHost
from zpp_lab.train.launch.gpus import Placement, place, served, visible_gpus
from zpp_lab.train.launch.mps import Mps, ask
from zpp_lab.train.launch.ranks import Hosts, free_port, rank_environment

MIB = 2**20
LINGER = 3.0  # seconds for the other ranks once one has failed
Said = dict[str, Any]


# ---------------------------------------------------------------------- the parent


class Report:
    """What was found, printed as it comes."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds, self.found = time.monotonic(), seconds, list[Said]()

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def add(self, part: str, ok: bool, said: str) -> bool:
        self.found.append({"part": part, "ok": ok, "said": said})
        passed = f"{time.monotonic() - self.began:5.1f} s"
        print(f"{passed}  {'ok    ' if ok else 'FAILED'}  {part}: {said}", flush=True)
        return ok

    def tried(self, part: str, work: Callable[[], str]) -> bool:
        try:
            return self.add(part, True, work())
        except Exception as error:
            return self.add(part, False, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Trial:
    """Ranks that run `tests` on `gpus`. namespaces: whether nodes are network namespaces."""

    name: str
    cluster: ClusterConfig
    tests: tuple[str, ...]
    share: str | None = "mps"
    namespaces: bool = True


class Loopback(OneHost):
    """Nodes without namespaces between them: hosts to NCCL alone."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes, self.interface = nodes, "lo"


def run(trial: Trial, gpus: Sequence[str], report: Report, limit: float) -> bool:
    """Whether all ranks passed all tests."""
    try:
        placed = place(trial.cluster, gpus, trial.share if gpus else None)  # type: ignore[arg-type]
        with served(placed) as placement, hosts(trial) as made, TemporaryDirectory() as folder:
            return judged(trial, ranks(trial, placement, made, Path(folder), limit), report)
    except Exception as error:
        return report.add(trial.name, False, f"{type(error).__name__}: {error}")


def hosts(trial: Trial) -> Hosts:
    nodes = trial.cluster.nodes
    return EmulatedNodes(nodes, Tools.find()) if trial.namespaces else Loopback(nodes)


def ranks(
    trial: Trial, placement: Placement, made: Hosts, folder: Path, limit: float
) -> list[list[Said]]:
    """What each rank said, until all have ended or the time is up."""
    port, processes, cluster = free_port(), [], trial.cluster
    logs = [folder / f"rank{rank}.log" for rank in range(cluster.world)]
    for rank, log in enumerate(logs):
        told = ",".join(trial.tests)
        words = [sys.executable, __file__, "--rank", told, "--gpus", str(cluster.gpus_per_node)]
        words += [] if placement.gpus else ["--cpu"]
        environment = rank_environment(made, placement, rank, port, os.environ)
        with log.open("wb") as file:
            started = made.start(
                rank // cluster.gpus_per_node, words, environment, stdout=file, stderr=file
            )
        processes.append(started)
    deadline = time.monotonic() + limit
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() for p in processes):  # others may wait for the one that failed
            deadline = min(deadline, time.monotonic() + LINGER)
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    return [lines(log) for log in logs]


def lines(log: Path) -> list[Said]:
    """The JSON lines of a log; the last other line where there is none."""
    text = log.read_text(errors="replace").strip().splitlines()
    found = [json.loads(line) for line in text if line.startswith('{"test"')]
    rest = [line for line in text if not line.startswith('{"test"')]
    return found or [{"test": "start", "ok": False, "said": rest[-1] if rest else "nothing"}]


def judged(trial: Trial, said: list[list[Said]], report: Report) -> bool:
    """A line a test: rank 0's figures, or the first rank's error."""
    every = True
    for test in ("start", *trial.tests):
        own = [next((s for s in one if s["test"] == test and "ok" in s), None) for one in said]
        if test == "start" and not any(own):
            continue
        name = f"{trial.name}, {test}"
        failed = [(r, s) for r, s in enumerate(own) if s is None or not s["ok"]]
        failed.sort(key=lambda one: one[1] is None)  # these have waited for the others, perhaps
        if not failed:
            assert own[0] is not None
            report.add(name, True, own[0]["said"])
            continue
        rank, found = failed[0]
        begun = any(s["test"] == test for s in said[rank])
        why = "was under way when its time was up" if begun else "did not come to it"
        every = report.add(name, False, f"rank {rank} {found['said'] if found else why}")
        if test == "start":
            break  # no rank has come further
    return every


def parent(args: argparse.Namespace) -> int:
    report = Report(args.seconds)
    gpus = () if args.cpu else visible_gpus(os.environ)
    report.add("machine", bool(gpus) or args.cpu, machine(gpus))
    if gpus:
        report.tried("MPS starts", mps)
    good = trials(report, gpus, args.cpu)
    if args.out:
        write_atomic(args.out, json.dumps(report.found, indent=1) + "\n")
    what = "talk by gloo" if args.cpu else "share GPUs"
    print(f"nodes can {what} here" if good else f"nodes cannot {what} here, see above")
    return int(not good)


def trials(report: Report, gpus: Sequence[str], on_cpu: bool) -> bool:
    """The whole thing, then what tells more."""
    one, two = (ClusterConfig(nodes=2, gpus_per_node=n) for n in (1, 2))
    nccl, inside = ("client", "reduce"), ("client", "reduce", "transport", "symmetric", "beside")
    if on_cpu:
        return run(Trial("2 × 2 by gloo", two, ("reduce",)), gpus, report, report.left)
    if not gpus:
        return False
    good = False
    if len(gpus) > 1:
        good = run(Trial("2 × 2 on two GPUs", two, inside), gpus[:2], report, 35.0)
    if not good:
        less = Trial("2 × 1 on one GPU", one, nccl)
        good_one = run(less, gpus[:1], report, min(15.0, report.left))
        good = good_one and len(gpus) == 1
        if not good_one and report.left > 5:
            plain = Trial("without network namespaces", one, nccl, namespaces=False)
            run(plain, gpus[:1], report, min(15.0, report.left))
    if report.left > 8:
        sliced = Trial("2 × 1 on one GPU in time slices", one, nccl, share="time-slices")
        run(sliced, gpus[:1], report, min(15.0, report.left))
    return good


def machine(gpus: Sequence[str]) -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        found = "no nvidia-smi"
    spaces = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc", "mnt")}
    told = "; ".join(found.split("\n")).strip("; ")
    return f"{len(gpus)} GPUs: {told}; user {os.getuid()}, {', '.join(spaces.values())}"


def mps() -> str:
    began = time.monotonic()
    with Mps() as made:
        seconds = time.monotonic() - began
        environment = {**os.environ, **made.environment}
        server = ask(made.program, "get_server_list", environment).split()[0]
        state = ask(made.program, f"get_server_status {server}", environment).strip()
    return f"{made.program}: server {server} {state or 'of unknown state'} after {seconds:.1f} s"


# ---------------------------------------------------------------------- a rank


class Rank:
    """The tests of one rank, by name; each returns what to say."""

    def __init__(self, local: int, on_cpu: bool) -> None:
        import torch
        import torch.distributed as dist

        from zpp_lab.codecs import kernels

        kernels.configure("reference")  # else the first rank would compile the kernels
        self.torch, self.dist = torch, dist
        self.cluster = ClusterConfig(int(os.environ["WORLD_SIZE"]) // local, local)
        self.device = torch.device("cpu")
        if not on_cpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self.peer: Any = None

    def client(self) -> str:
        from zpp_lab.train.launch.mps import PROGRAM, check_client

        self.torch.zeros(1, device=self.device)
        check_client(os.environ, os.getpid())
        name = self.torch.cuda.get_device_name(self.device)
        return f"{name}, {'a client of MPS' if PROGRAM in os.environ else 'without MPS'}"

    def reduce(self) -> str:
        """64 MiB over all ranks."""
        self.dist.init_process_group("gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        world = self.dist.get_world_size()
        x = self.torch.ones(16 * MIB if self.device.type == "cuda" else 1024, device=self.device)
        self.dist.all_reduce(x)
        self._done()
        assert float(x.min()) == float(x.max()) == world, f"the sum is {float(x[0])}, not {world}"
        seconds = self._seconds(lambda: self.dist.all_reduce(x), 3)
        version = self.torch.cuda.nccl.version() if self.device.type == "cuda" else "gloo"
        return f"{x.nbytes / MIB:.3g} MiB in {1000 * seconds:.1f} ms, {version}"

    def transport(self) -> str:
        from zpp_lab.collectives.peer.choose import _problems, connect
        from zpp_lab.collectives.watchdog import Watchdog

        auto = connect(self.cluster, Watchdog(0.0), "auto", self.device)
        problems = _problems(self.cluster, self.device)
        assert "world" in problems, "ranks of different nodes believe to share memory"
        assert "across" in problems, "ranks of different nodes believe to share memory"
        told = auto.describe() if hasattr(auto, "describe") else "process groups alone"
        return f"{told}; not {problems}"

    def symmetric(self) -> str:
        """Each rank of a node reads 64 MiB of each other one."""
        from zpp_lab.collectives.peer.choose import connect
        from zpp_lab.collectives.watchdog import Watchdog

        self.peer = connect(self.cluster, Watchdog(0.0), "peer", self.device)
        self._gather()
        self._done()
        seconds = self._seconds(self._gather, 5)
        moved = 64 * MIB * (self.cluster.gpus_per_node - 1)
        return f"the right bytes, {moved / seconds / 1e9:.0f} GB/s into a rank"

    def beside(self) -> str:
        """The same while the world reduces, on a stream of its own."""
        x = self.torch.ones(16 * MIB, device=self.device)
        side = self.torch.cuda.Stream()
        began = time.perf_counter()
        for _ in range(10):
            side.wait_stream(self.torch.cuda.current_stream())
            with self.torch.cuda.stream(side):
                self._gather(False)
            self.dist.all_reduce(x)
        self.torch.cuda.current_stream().wait_stream(side)
        self._done()
        passed = time.perf_counter() - began
        return f"ten of each in {1000 * passed:.0f} ms"

    def _gather(self, check: bool = True) -> None:
        torch, local = self.torch, self.cluster.gpus_per_node
        rank = self.dist.get_rank()
        own = torch.full((1, 64 * MIB), rank + 1, dtype=torch.uint8, device=self.device)
        out = torch.empty(local, 64 * MIB, dtype=torch.uint8, device=self.device)
        self.peer.gathering(out, "local", "probe", own).send()
        if check:
            first = rank // local * local
            found = [int(row[-1]) for row in out]
            assert found == [first + i + 1 for i in range(local)], f"rank {rank} read {found}"

    def _seconds(self, call: Callable[[], object], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            call()
        self._done()
        return (time.perf_counter() - began) / times

    def _done(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


def rank(tests: Sequence[str], local: int, on_cpu: bool) -> None:
    """Says a line when a test begins and one when it has ended; the first failure is the last."""
    with saying("start"):
        made = Rank(local, on_cpu)
    for test in tests:
        with saying(test) as answer:
            answer.append(getattr(made, test)())
    os._exit(0)


@contextmanager
def saying(test: str) -> Iterator[list[str]]:
    answer: list[str] = []
    say({"test": test})
    try:
        yield answer
    except Exception as error:
        traceback.print_exc()
        say({"test": test, "ok": False, "said": f"{type(error).__name__}: {error}"})
        os._exit(1)
    if answer:
        say({"test": test, "ok": True, "said": answer[0]})


def say(said: Said) -> None:
    print(json.dumps(said), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=55.0, help="for all of it")
    parser.add_argument("--cpu", action="store_true", help="gloo and CPU processes")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank.split(","), args.gpus, args.cpu)
    return parent(args)


if __name__ == "__main__":
    sys.exit(main())
