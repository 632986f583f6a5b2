"""Closed forms of the bytes that collectives send, inside nodes and between them.

A payload row is what one rank contributes for one shard. N nodes, L ranks a node, W = N L.
All figures are sums over all ranks of what they send to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zpp_lab.codecs.layout import Layout
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.config.wires import INTER, INTRA, Wire


class Traffic(NamedTuple):
    """Bytes sent inside nodes and between nodes."""

    intra: int
    inter: int

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        return Traffic(self.intra + other[0], self.inter + other[1])

    def __mul__(self, times: int) -> Traffic:  # type: ignore[override]
        return Traffic(self.intra * times, self.inter * times)


NOTHING = Traffic(0, 0)


class Leg(NamedTuple):
    """What all ranks send on one wire in a step: so many times `traffic`, in rows as `layout`
    says."""

    wire: Wire
    layout: Layout
    traffic: Traffic
    times: int = 1


def gather_traffic(cluster: ClusterConfig, row: int, hierarchical: bool) -> Traffic:
    """An all-gather of one row of each rank.

    Flat: every row goes to every other rank. Hierarchical: a row goes to one rank of each other
    node, and the ranks of a node then pass on the N rows they hold.
    """
    nodes, local, world = cluster.nodes, cluster.gpus_per_node, cluster.world
    if hierarchical:
        return Traffic(world * (local - 1) * nodes * row, world * (nodes - 1) * row)
    return Traffic(world * (local - 1) * row, world * (world - local) * row)


def secondary_traffic(cluster: ClusterConfig, row: int) -> Traffic:
    """A gather inside the node, where every rank keeps N of the W rows (hpZ, and kept weights)."""
    return Traffic(cluster.world * (cluster.gpus_per_node - 1) * cluster.nodes * row, 0)


def update_traffic(cluster: ClusterConfig, row: int) -> Traffic:
    """Each rank's new row to the same local rank of every other node."""
    return Traffic(0, cluster.world * (cluster.nodes - 1) * row)


def node_gather_traffic(cluster: ClusterConfig, row: int) -> Traffic:
    """An all-gather in every node of one row of each of its ranks; nodes hold copies."""
    return Traffic(cluster.world * (cluster.gpus_per_node - 1) * row, 0)


def hop_traffic(
    cluster: ClusterConfig, hops: Sequence[Wire], rows: Sequence[int], cut: int = 0
) -> list[tuple[Wire, Traffic]]:
    """A reduction into `cut` parts (0: one a rank), hop by hop, `rows[i]` bytes a row on hop i.

    One hop: each rank sends a row to every other rank; rows that stay in the node count for
    grads_intra, the others for grads_inter. Two hops: in the node each rank sends cut / L rows to
    each of its L - 1 neighbours, then one row to the same local rank of every other node. With
    cut = W that is the row's owner. With cut = L every node has one: all of them get the N sums and
    decode them in node order, N - 1 rows sent by each rank, where a ring's all-reduce would send
    2 (N - 1) / N in an order of its own. A third hop brings each rank's row to its neighbours.
    """
    nodes, local, world = cluster.nodes, cluster.gpus_per_node, cluster.world
    if len(hops) > 1:
        each = (cut or world) // local
        found: list[tuple[Wire, Traffic]] = [
            (INTRA, Traffic(world * (local - 1) * each * rows[0], 0)),
            (INTER, Traffic(0, world * (nodes - 1) * rows[1])),
        ]
        back = (node_gather_traffic(cluster, row) for row in rows[2:])
        return [*found, *((INTRA, traffic) for traffic in back)]  # type: ignore[list-item]
    if not hops:
        return []
    return [
        (INTRA, Traffic(world * (local - 1) * rows[0], 0)),
        (INTER, Traffic(0, world * (world - local) * rows[0])),
    ]
