"""Nodes as network namespaces of this host: made, limited, used and removed again.

    with EmulatedNodes(2, Tools.find()) as nodes:
        nodes.limit(25.0)
        nodes.start(1, ["hostname"], {})

A process holds each namespace (`namespaces.py`), which ends with its last process, links and limits
too.

`zpp-lab emulate`: a command once a rank, or once a node, on emulated nodes of this host.

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 25 -- zpp-lab train engine=fsdp ...
    zpp-lab emulate --nodes 2 --gpus-per-node 2 --per node -- torchrun train.py

Ranks find their place in the environment, as under torchrun (PET_* for one torchrun a node). When a
process fails the others are ended. With fewer GPUs than ranks, --share-gpus lets nodes share them
through MPS (=time-slices: without).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from zpp_lab.config.parser import Parser, one_link, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.links.namespaces import READY
from zpp_lab.tools.links.network import (
    ENTER,
    HUB,
    Command,
    Network,
    Tools,
    congestion_control,
    keep_order,
    keep_windows,
)
from zpp_lab.train.launch import processes
from zpp_lab.train.launch.gpus import (
    OPTION,
    SHARES,
    Placement,
    place,
    served,
    share_words,
    visible_gpus,
)
from zpp_lab.train.launch.processes import EmulationError
from zpp_lab.train.launch.ranks import Hosts, free_port, node_environment, rank_environment

NO_NAMESPACE = (
    "cannot make a network namespace: {}. Emulated nodes need root (or CAP_SYS_ADMIN and "
    "CAP_NET_ADMIN) and a kernel with CONFIG_NET_NS; in a container, start it with --privileged"
)

OVERTAKING = (
    "warning: packets may be reordered between emulated nodes, which slows links of 50 Gb/s and "
    "more: the kernel lacks CONFIG_RPS, or a container may not mount sysfs (--privileged)"
)
STARTS_ANEW = (
    "warning: streams between emulated nodes start slowly after each pause: /proc/sys cannot be "
    "written here (in a container: --privileged)"
)


class Runner(Protocol):
    def run(self, command: Command, pid: int) -> str:
        """Run a command of `ip` or `tc` in the network namespace of process `pid`."""
        ...


def hosts(nodes: int, folder: str | Path | None = None) -> Hosts:
    """Return this host for one node, else emulated ones. EmulationError where it cannot make them.

    folder: where `ip` and `tc` lie, when they are not installed.
    """
    return OneHost() if nodes == 1 else EmulatedNodes(nodes, Tools.find(folder))


class _Owner:
    """What both kinds share: marked processes, and their end with this one."""

    def __init__(self) -> None:
        self.mark = processes.mark()
        self.processes: list[subprocess.Popen[Any]] = []
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Any:
        processes.end_orphans()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self.handlers[number] = signal.signal(number, _leave)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _make(self) -> None:
        """Nothing to make for one host."""

    def close(self) -> None:
        """End every process, and with the last one of each namespace its links and limits."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # not half-way
        try:
            processes.end(lambda owner: owner == self.mark)
            for process in self.processes:
                process.wait()
            self.processes.clear()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            while self.handlers:
                signal.signal(*self.handlers.popitem())

    def _start(
        self, pid: int, words: Sequence[str], environment: Mapping[str, str], settings: Any
    ) -> subprocess.Popen[Any]:
        own = {**os.environ, **environment, processes.VARIABLE: self.mark}
        command = [*ENTER, str(os.getpid()), str(pid), *words]
        process = subprocess.Popen(command, env=own, **settings)
        self.processes.append(process)
        return process


class OneHost(_Owner):
    """This host, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = 1
        self.interface: str | None = None

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def limit(self, gbps: float | None) -> None:
        if gbps is not None:
            raise ValueError(f"one node has no link to limit to {gbps:g} Gb/s: use max")

    def sent(self, node: int) -> int:
        return 0

    def resent(self, node: int) -> int:
        return 0

    def start(
        self, node: int, words: Sequence[str], environment: Mapping[str, str], **settings: Any
    ) -> subprocess.Popen[Any]:
        return self._start(0, words, environment, settings)


class EmulatedNodes(_Owner):
    """Network namespaces joined by links. EmulationError where this machine cannot make them."""

    def __init__(self, nodes: int, tools: Runner) -> None:
        super().__init__()
        self.nodes, self.tools = nodes, tools
        self.network = Network(nodes, os.getpid(), congestion_control())
        self.interface: str | None = self.network.interface
        self.places: dict[int, int] = {}  # node, or HUB → the process that holds its namespace
        self.gbps: float | None = None  # the limit of each link
        self.in_order = False  # whether no packet overtakes another
        self.windows_kept = False  # whether a stream that was idle goes on as fast as it was

    def _make(self) -> None:
        for node in range(HUB if self.network.needs_hub else 0, self.nodes):
            self.places[node] = self._hold()
        self.run(self.network.join(self.places))
        windows = [keep_windows(self.places[node]) for node in range(self.nodes)]
        orders = [keep_order(self.places[at], end) for at, end in self.network.ends()]
        self.windows_kept, self.in_order = all(windows), all(orders)
        for holds, warning in ((self.windows_kept, STARTS_ANEW), (self.in_order, OVERTAKING)):
            if not holds:
                print(warning, file=sys.stderr)

    def _hold(self) -> int:
        """A process with a new namespace; its id."""
        words = [sys.executable, "-m", "zpp_lab.tools.links.namespaces", "hold"]
        own = {**os.environ, processes.VARIABLE: self.mark}
        holder = subprocess.Popen(
            words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(holder)
        assert holder.stdout is not None
        text = holder.stdout.readline().strip()
        if text != READY:
            raise EmulationError(NO_NAMESPACE.format(text or "the process that tried it has ended"))
        return holder.pid

    def run(self, commands: Sequence[Command]) -> None:
        """Run each in its node's namespace."""
        for command in commands:
            self.tools.run(command, self.places[command.at])

    def address(self, node: int) -> str:
        return self.network.address(node)

    def limit(self, gbps: float | None) -> None:
        self.run(self.network.limit(gbps, self.gbps is not None))
        self.gbps = gbps

    def sent(self, node: int) -> int:
        lines = Path(f"/proc/{self.places[node]}/net/dev").read_text().splitlines()
        own = next(line for line in lines if line.strip().startswith(f"{self.interface}:"))
        return int(own.partition(":")[2].split()[8])

    def resent(self, node: int) -> int:
        lines = Path(f"/proc/{self.places[node]}/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def start(
        self, node: int, words: Sequence[str], environment: Mapping[str, str], **settings: Any
    ) -> subprocess.Popen[Any]:
        return self._start(self.places[node], words, environment, settings)


def _leave(number: int, _: FrameType | None) -> None:
    """A polite kill unwinds as Ctrl-C does, so that everything is removed."""
    raise SystemExit(128 + number)


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab emulate", description=__doc__)
    made.add_argument("--nodes", type=whole(1), default=2)
    made.add_argument("--gpus-per-node", type=whole(1), default=2)
    made.add_argument("--link-gbps", default="max", help="link speed in Gbit/s, or max (unlimited)")
    made.add_argument(OPTION, choices=SHARES, help="let nodes share GPUs (default: mps)")
    made.add_argument("--per", choices=["rank", "node"], default="rank")
    made.add_argument("--iproute", help="a folder with iproute2, if it is not installed")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return made


def main(argv: Sequence[str]) -> int:
    """Run it; the first exit code that is not 0, else 0."""
    args = parser().parse_args(share_words(argv))
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("give a command: zpp-lab emulate --nodes 2 -- COMMAND")
    cluster = ClusterConfig(nodes=args.nodes, gpus_per_node=args.gpus_per_node)
    start = _per_rank if args.per == "rank" else _per_node
    placed = place(cluster, visible_gpus(os.environ), args.share_gpus)
    with served(placed) as placement, hosts(args.nodes, args.iproute) as made:
        made.limit(one_link(args.link_gbps))
        return _wait(start(made, placement, command))


def _per_rank(
    made: Hosts, placement: Placement, command: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    port, cluster = free_port(), placement.cluster
    return [
        made.start(
            rank // cluster.gpus_per_node,
            command,
            rank_environment(made, placement, rank, port, os.environ),
        )
        for rank in range(cluster.world)
    ]


def _per_node(
    made: Hosts, placement: Placement, command: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    port, started, cluster = free_port(), [], placement.cluster
    for node in range(cluster.nodes):
        environment = node_environment(made, placement, node, port, os.environ)
        environment |= {
            "PET_NNODES": str(cluster.nodes),
            "PET_NPROC_PER_NODE": str(cluster.gpus_per_node),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": made.address(0),
            "PET_MASTER_PORT": str(port),
            "PET_LOCAL_ADDR": made.address(node),
            "PET_RDZV_CONF": f"is_host={int(node == 0)}",  # it cannot tell by the host's name
        }
        started.append(made.start(node, command, environment))
    return started


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended well, or one has not."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
