"""Which transport serves a cluster, by what its ranks can really do.

    groups  NCCL or gloo everywhere
    peer    ranks of a host read each other's memory; process groups between hosts
    auto    peer where it is possible and pays, by the size of a transfer

How weights are gathered does not depend on it: `engine.gather=auto` follows the configured cluster,
so that plan, virtual and real ranks move the same bytes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist

from zpp_lab.codecs.kernels.backend import use_kernels
from zpp_lab.collectives.peer.slots import MIB, Shared
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.transport import LINKS, Link, ProcessGroups, Transport, members
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import ClusterConfig

Choice = Literal["auto", "groups", "peer"]
LEAST = 16 * MIB  # bytes that a transfer must bring for `auto` to take peer memory: below that
# NCCL was as fast or faster on four H200s (experiments/collectives)


def connect(
    cluster: ClusterConfig,
    watchdog: Watchdog,
    choice: Choice,
    device: torch.device,
    ranks: Sequence[int] | None = None,
) -> Transport:
    """Build the transport that `choice` asks for among `ranks` of the world, None: all; every one
    of them makes the same call. ValueError when the cluster's shape does not fit, and when `peer`
    is impossible: it names why."""
    if choice not in get_args(Choice):
        raise ValueError(f"engine.transport={choice!r}: use one of {', '.join(get_args(Choice))}")
    groups = ProcessGroups(cluster, watchdog, ranks)
    if choice == "peer" and not groups.whole:
        raise ValueError(
            "engine.transport=peer: the model is sharded over some of the ranks; it needs all of "
            "them, without tensor parts, stages or other dimensions of a mesh: use auto or groups"
        )
    if choice == "groups" or not groups.whole:
        return groups
    problems = _problems(cluster, device)
    usable = [link for link in LINKS if link not in problems]
    needed: Link = "local" if cluster.gpus_per_node > 1 else "world"
    if choice == "peer" and needed in problems:
        raise ValueError(f"engine.transport=peer: {problems[needed]}; use auto or groups")
    if needed in problems:
        return groups
    here = use_kernels(torch.empty(0, device=device))
    every = [here] * dist.get_world_size()
    dist.all_gather_object(every, here)
    at_once = all(every)  # ranks must meet in the same way
    shared = {link: _maker(groups, link, device, at_once) for link in usable}
    transport = PeerTransport(groups, shared, LEAST if choice == "auto" else 0)
    if transport.rank == 0:
        print(f"zpp_lab: transport: {transport.describe()}", file=sys.stderr)
    return transport


def _maker(
    groups: ProcessGroups, link: Link, device: torch.device, at_once: bool
) -> Callable[[], Shared]:
    from zpp_lab.collectives.peer.symmetric import SymmetricMemory

    group = groups.gathers[link]
    return partial(SymmetricMemory, group, device, at_once)  # type: ignore[arg-type]


def _problems(cluster: ClusterConfig, device: torch.device) -> dict[Link, str]:
    """Return why peer memory is impossible on each link, on any rank; the same on all ranks."""
    own = (host(), device.type, _uuid(device))
    facts: list[tuple[str, str, str]] = [own] * cluster.world
    dist.all_gather_object(facts, own)
    found = {link: _problem(cluster, link, device, facts) for link in LINKS}
    every: list[dict[Link, str]] = [found] * cluster.world
    dist.all_gather_object(every, found)
    return {link: text for one in reversed(every) for link, text in one.items() if text}


def _problem(
    cluster: ClusterConfig, link: Link, device: torch.device, facts: list[tuple[str, str, str]]
) -> str:
    """Return why this rank cannot read its peers' memory on `link`; empty when it can."""
    rank = dist.get_rank()
    for peer in members(cluster, link, rank):
        where, kind, uuid = facts[peer]
        if kind != "cuda":
            return f"rank {peer} has no CUDA device, but {kind}"
        if where != facts[rank][0]:
            return f"ranks {min(rank, peer)} and {max(rank, peer)} are on different hosts"
        if peer != rank and uuid == facts[rank][2]:
            return f"ranks {min(rank, peer)} and {max(rank, peer)} share a GPU"
        if peer != rank and not _reaches(device, uuid):
            return f"the GPU of rank {rank} cannot reach that of rank {peer}"
    return ""


def host() -> str:
    """Return a name that ranks of one machine share; NCCL_HOSTID decides as for NCCL."""
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _reaches(device: torch.device, uuid: str) -> bool:
    """Return whether peer access exists; assume it for a device that this process cannot see."""
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return bool(torch.cuda.can_device_access_peer(device, index))
    return True
