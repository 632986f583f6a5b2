"""What a rank on an emulated node must know: its place, its GPUs and how to reach the others.

Each node gets its GPUs (`gpus.py`), and NCCL takes nodes for different hosts (NCCL_HOSTID), so
that GPUs of a node keep NVLink while everything else goes through sockets, even between ranks that
share a GPU. Our own choice of a transport and of a gather reads the same variable
(`collectives/peer/choose.py`).
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zpp_lab.train.launch.gpus import Placement

# One socket and thread for each of NCCL's connections: it has some on every channel, which fill
# 50 Gb/s, and more of them share a slow link less evenly (experiments/speed, part sockets). Chunks
# of an exchange are as large as NCCL's buffer allows: at 50 Gb/s smaller ones cost a tenth of a
# step (experiments/speed/calls/23). The variables of the environment win over these.
SOCKETS = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
}
ALWAYS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def rank_environment(
    hosts: Hosts, placement: Placement, rank: int, port: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return torchrun's variables, and those of NCCL and gloo. given: the present environment."""
    cluster = placement.cluster
    node, local = divmod(rank, cluster.gpus_per_node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(cluster.gpus_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(cluster.nodes),
        **node_environment(hosts, placement, node, port, given),
    }


def node_environment(
    hosts: Hosts, placement: Placement, node: int, port: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that ranks of a node share; enough for a torchrun on each node."""
    made = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(port)}
    made |= {**placement.variables(node), **ALWAYS}
    if hosts.interface is None:
        return made
    return {
        **made,
        **nccl_settings(given),
        **network_environment(hosts.interface),
        "NCCL_HOSTID": f"{hosts.interface}-node{node}",
    }


def shared_environment(placement: Placement, node: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks that share GPUs without namespaces between their nodes: NCCL
    goes over this host's own sockets, as fast as they are."""
    made = {**placement.variables(node), **ALWAYS, "NCCL_SOCKET_IFNAME": "=lo"}
    return {**made, **nccl_settings(given), "NCCL_HOSTID": f"zpp-node{node}"}


def nccl_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return how NCCL uses sockets: our settings, under NCCL's in the environment."""
    asked = {key: value for key, value in given.items() if key.startswith("NCCL_")}
    return {**SOCKETS, **asked}


def free_port() -> int:
    """Return a port of this host that nobody uses; in a new namespace every port is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def network_environment(interface: str) -> Mapping[str, str]:
    """Return the variables by which libraries use `interface` alone."""
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


class Hosts(Protocol):
    """Machines that ranks can be started on, and the links between them."""

    nodes: int
    interface: str | None  # between nodes; None where there is one node

    def __enter__(self) -> Hosts: ...

    def __exit__(self, *error: Any) -> None: ...

    def address(self, node: int) -> str: ...

    def limit(self, gbps: float | None) -> None:
        """Limit each link's speed each way, in gigabits per second; None: no limit."""
        ...

    def sent(self, node: int) -> int:
        """Return the bytes that have left a node since it was made, headers included."""
        ...

    def resent(self, node: int) -> int:
        """Return the packets that TCP has sent again from a node, needed or not."""
        ...

    def start(
        self, node: int, words: Sequence[str], environment: Mapping[str, str], **settings: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a node; it ends with this one. settings: of subprocess.Popen."""
        ...
