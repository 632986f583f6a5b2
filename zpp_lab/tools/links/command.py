"""`zpp-lab emulate`: a command once a rank, or once a node, on emulated nodes of this host.

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 25 -- zpp-lab train engine=fsdp ...
    zpp-lab emulate --nodes 2 --gpus-per-node 2 --per node -- torchrun train.py

Ranks find their place in the environment, as under torchrun. Once a node, torchrun itself finds
the nodes, its own number and where to meet (PET_*). When one process fails the others are ended.
With fewer GPUs than ranks, --share-gpus lets nodes share them through MPS (=time-slices: without).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from zpp_lab.config.parser import Parser, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.links.nodes import hosts
from zpp_lab.train.launch.gpus import (
    OPTION,
    SHARES,
    Placement,
    place,
    served,
    share_words,
    visible_gpus,
)
from zpp_lab.train.launch.ranks import Hosts, free_port, node_environment, rank_environment


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab emulate", description=__doc__)
    made.add_argument("--nodes", type=whole(1), default=2)
    made.add_argument("--gpus-per-node", type=whole(1), default=2)
    made.add_argument("--link-gbps", default="max", help="a speed, or max (unlimited)")
    made.add_argument(OPTION, choices=SHARES, help="nodes may share GPUs (default: mps)")
    made.add_argument("--per", choices=["rank", "node"], default="rank")
    made.add_argument("--iproute", help="a folder with iproute2, where it is not installed")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return made


def main(argv: Sequence[str]) -> int:
    """Run it; the first exit code that is not 0, else 0."""
    args = parser().parse_args(share_words(argv))
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("name a command: zpp-lab emulate --nodes 2 -- COMMAND")
    cluster = ClusterConfig(nodes=args.nodes, gpus_per_node=args.gpus_per_node)
    start = _per_rank if args.per == "rank" else _per_node
    placed = place(cluster, visible_gpus(os.environ), args.share_gpus)
    with served(placed) as placement, hosts(args.nodes, args.iproute) as made:
        made.limit(_speed(args.link_gbps))
        return _wait(start(made, placement, command))


def _speed(text: str) -> float | None:
    try:
        return None if text == "max" else float(text)
    except ValueError:
        raise ValueError(f"--link-gbps {text}: use a number, or max") from None


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
