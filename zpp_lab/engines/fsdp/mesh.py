"""Picks the ranks that shard a model in a user training loop, and how they lie in nodes.

A DeviceMesh names them by its dimensions `nodes` and `gpus`, or by one `dp`. Ranks along other
dimensions hold other parts of the model, or of a sequence, and each has collectives of its own over
the ranks picked here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zpp_lab.config.schema import ClusterConfig

LEANS_ON = {"torch.distributed.device_mesh.DeviceMesh": ("_flatten",)}  # a test looks for it
NODES, GPUS, DP, TP = "nodes", "gpus", "dp", "tp"
_FIX = (
    'init_device_mesh(DEVICE, (NODES, GPUS), mesh_dim_names=("nodes", "gpus")), or one dimension '
    'named "dp"; a part of a larger mesh can be handed over as mesh["NAME"]'
)
_PARTS = 'init_device_mesh(DEVICE, (RANKS / TP, TP), mesh_dim_names=("dp", "tp"))'


@dataclass(frozen=True)
class Ranks:
    """Ranks that shard a model. ranks: in the default group, in the order of shards. flat: their
    mesh of one dimension; nested: of nodes × gpus; None where a mesh of all ranks can be made."""

    cluster: ClusterConfig
    ranks: tuple[int, ...]
    flat: DeviceMesh | None = None
    nested: DeviceMesh | None = None

    @classmethod
    def pick(cls, mesh: DeviceMesh | None, cluster: ClusterConfig | None) -> Ranks:
        """Return the ranks of `mesh` that the recipe is for; None: all. cluster: the nodes of one
        dimension; None: as torchrun says. ValueError names how to write the mesh."""
        if mesh is None:
            cluster = cluster or _in_nodes(range(dist.get_world_size()))
            there = dist.get_world_size() if dist.is_initialized() else cluster.world
            if cluster.world != there:
                raise ValueError(
                    f"cluster={cluster.nodes} × {cluster.gpus_per_node} needs {cluster.world} "
                    f"processes, but {there} are running: use a cluster of {there}, or leave it "
                    "out"
                )
            return cls(cluster, tuple(range(cluster.world)))
        names, shape = mesh.mesh_dim_names or (), mesh.shape
        said = f"mesh of {tuple(shape)} with dimensions {', '.join(names) or 'without names'}"
        two = NODES in names and GPUS in names
        if two == (DP in names) and (two or mesh.ndim > 1):
            why = (
                "name either nodes and gpus, or dp"
                if two
                else "no dimension is named as the shards'"
            )
            raise ValueError(f"{said}: {why}; make it {_FIX}")
        if two:
            nested = mesh[NODES, GPUS] if mesh.ndim > 2 else mesh
            if nested.mesh_dim_names != (NODES, GPUS):
                raise ValueError(f"{said}: nodes come before gpus; make it {_FIX}")
            own = ClusterConfig(nodes=nested.shape[0], gpus_per_node=nested.shape[1])
            if cluster not in (None, own):
                raise ValueError(
                    f"{said}: cluster={cluster.nodes} × {cluster.gpus_per_node} contradicts it: "
                    "leave cluster out"
                )
            ranks = tuple(nested.mesh.flatten().tolist())
            return cls(own, _rising(ranks, said), nested._flatten("zpp_lab"), nested)
        flat = mesh[DP] if mesh.ndim > 1 else mesh
        ranks = _rising(tuple(flat.mesh.tolist()), said)
        cluster = cluster or _in_nodes(ranks)
        if cluster.world != len(ranks):
            raise ValueError(
                f"{said}: {len(ranks)} ranks are not {cluster.nodes} nodes × "
                f"{cluster.gpus_per_node}; give a cluster of {len(ranks)}, or leave it out"
            )
        return cls(cluster, ranks, flat)

    @classmethod
    def parts(
        cls,
        model: nn.Module,
        mesh: DeviceMesh | None,
        cluster: ClusterConfig | None,
        tp: int | None,
    ) -> ClusterConfig | None:
        """Return all ranks as nodes × GPUs × tensor parts where a model is to be cut into parts:
        as `tp` says, or else a dimension of the mesh. None where it stays, or is cut already.
        cluster: nodes × all GPUs of each. ValueError names how to write the mesh."""
        if tp is not None and (type(tp) is not int or tp < 1):
            raise ValueError(f"tp={tp!r}: use a whole number from 1, or leave it out")
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        there = mesh.size(names.index(TP)) if mesh is not None and TP in names else None
        asked = cluster.tp if cluster is not None and cluster.tp > 1 else None
        cut = any(isinstance(p, DTensor) for p in model.parameters())
        if asked is not None and tp not in (None, asked):
            raise ValueError(f"tp={tp} contradicts cluster.tp={asked}: leave one of them out")
        wanted = tp or asked or (1 if cut else there) or 1
        if wanted == 1:
            return None
        if cut:
            raise ValueError(
                f"tp={wanted}: the model has DTensors already, as of torch's parallelize_module: "
                "leave tp out, or hand over a model that nobody has cut"
            )
        if mesh is not None:
            said = f"mesh of {tuple(mesh.shape)} with dimensions {', '.join(names)}"
            others = [n for n in names if n not in (NODES, GPUS, DP, TP) and mesh[n].size() > 1]
            ranks = mesh.mesh.flatten().tolist()
            others += [NODES] * (NODES in names and GPUS not in names)
            if there != wanted or others or names[-1] != TP or ranks != list(range(len(ranks))):
                raise ValueError(
                    f"tp={wanted} with {said}: tensor parts need a mesh of all ranks in order, "
                    f"with dimensions dp and tp, or nodes, gpus and tp: {_PARTS}, or tp=1 to leave "
                    "its dimensions alone"
                )
            if cluster is None and NODES in names:
                nodes, gpus = mesh[NODES].size(), mesh[GPUS].size()
                return ClusterConfig(nodes, gpus * wanted, tp=wanted)
        world = dist.get_world_size()
        own = cluster or _in_nodes(range(world))
        if own.world != world or (mesh is not None and mesh.size() != world):
            raise ValueError(
                f"tp={wanted}: cluster={own.nodes} × {own.gpus_per_node} and the mesh have to hold "
                f"all {world} ranks: {_PARTS}"
            )
        return ClusterConfig(own.nodes, own.gpus_per_node, tp=wanted)

    @property
    def whole(self) -> bool:
        """Return whether these are all ranks, in order."""
        return self.ranks == tuple(range(dist.get_world_size()))

    def mesh(self, shards: int, device_type: str) -> DeviceMesh:
        """Return the mesh over which FSDP2 makes so many shards: of all ranks, or of one copy."""
        if shards == self.cluster.world and self.flat is not None:
            return self.flat
        if shards == self.cluster.gpus_per_node and self.nested is not None:
            return self.nested[GPUS]
        if not self.whole:
            raise ValueError(f"replication over nodes needs a mesh with nodes and gpus: {_FIX}")
        copies, names = self.cluster.world // shards, ("copies", "ranks")
        if copies == 1:
            return init_device_mesh(device_type, (shards,), mesh_dim_names=names[1:])
        return init_device_mesh(device_type, (copies, shards), mesh_dim_names=names)["ranks"]


def _rising(ranks: tuple[int, ...], said: str) -> tuple[int, ...]:
    """Check that ranks ascend, as torch orders those of a group."""
    if list(ranks) != sorted(ranks):
        raise ValueError(f"{said}: ranks {list(ranks)} are not in ascending order; make it {_FIX}")
    return ranks


def _in_nodes(ranks: Sequence[int]) -> ClusterConfig:
    """Return the ranks' nodes, as torchrun says; without it one node."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = [rank // local for rank in ranks]
    each = nodes.count(nodes[0])
    if nodes != [node for node in dict.fromkeys(nodes) for _ in range(each)]:
        raise ValueError(
            f"ranks {list(ranks)} with LOCAL_WORLD_SIZE={local} are not grouped evenly by node: "
            "pass shard a cluster, or a mesh with the dimensions nodes and gpus"
        )
    return ClusterConfig(nodes=len(nodes) // each, gpus_per_node=each)


def mesh_of_parts(cluster: ClusterConfig, shards: int, device_type: str) -> DeviceMesh:
    """Return this rank's mesh of tensor parts × shards. In this order a shard of a part is a run of
    the whole parameter's rows, which DTensor then cuts as we do, evenly or not. Not flattened:
    torch 2.13 sorts the ranks of such a dimension, and would gather rows in that order."""
    ranks = torch.arange(cluster.world).view(-1, shards, cluster.tp).transpose(1, 2)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("copies", TP, DP))[TP, DP]
