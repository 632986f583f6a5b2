"""Which GPUs the ranks of an emulated cluster sit on, and whether ranks share one.

Nodes take the GPUs in turn: rank j of node k has GPU (k · gpus_per_node + j) modulo the number
that is used. So ranks of one node always have GPUs of their own, which NCCL and symmetric memory
need, and only ranks of different nodes, which talk over sockets, meet on a GPU. As many GPUs are
used as give each the same number of ranks: else the fullest one would decide every step.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from zpp_lab.config.schema import ClusterConfig

Share = Literal["mps", "time-slices"]
SHARES: tuple[str, ...] = get_args(Share)
OPTION = "--share-gpus"


@dataclass(frozen=True)
class Placement:
    """Ranks on GPUs. gpus: as CUDA_VISIBLE_DEVICES names them; empty where unknown or on the CPU.
    share: how ranks of one GPU share it; None: each has its own. environment: for sharing ranks."""

    cluster: ClusterConfig
    gpus: tuple[str, ...] = ()
    share: Share | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = len(self.gpus)
        assert not used or used >= self.cluster.gpus_per_node, "ranks of a node would share"
        assert not used or self.cluster.world % used == 0, "GPUs would have unequal shares"
        assert (self.share is not None) == (self.ranks_per_gpu > 1), "sharing without a way to"

    @property
    def ranks_per_gpu(self) -> int:
        return self.cluster.world // len(self.gpus) if self.gpus else 1

    def of_node(self, node: int) -> tuple[str, ...]:
        """Return the GPUs of a node's ranks, in their order; none where `gpus` has none."""
        local, used = self.cluster.gpus_per_node, len(self.gpus)
        return tuple(self.gpus[(node * local + i) % used] for i in range(local if used else 0))

    def variables(self, node: int) -> dict[str, str]:
        """Return the environment variables of a node's ranks."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.of_node(node))} if self.gpus else {}
        return {**own, **self.environment}


def place(
    cluster: ClusterConfig, visible: Sequence[str], share: Share | None = None, option: str = OPTION
) -> Placement:
    """Put a cluster's ranks on the `visible` GPUs, one on each where there are enough. ValueError
    names the fix where there are too few; `option` is the one that lets nodes share."""
    found, local, world = len(visible), cluster.gpus_per_node, cluster.world
    if not found and share is None:
        return Placement(cluster)
    if found >= world:
        return Placement(cluster, tuple(visible[:world]))
    if found < local:
        raise ValueError(
            f"{cluster.nodes} × {local} needs {local} GPUs a node, and this machine has {found}: "
            "only nodes can share GPUs, not ranks of one node; use fewer GPUs a node"
        )
    if share is None:
        raise ValueError(
            f"{cluster.nodes} × {local} needs {world} GPUs, and this machine has {found}: use "
            f"fewer nodes or GPUs a node, or let nodes share the GPUs with {option}"
        )
    used = max(n for n in range(local, found + 1) if world % n == 0)
    return Placement(cluster, tuple(visible[:used]), share)


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, or all of the machine. Does not start CUDA."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = (name.strip() for name in listed.split(","))
        return tuple(name for name in names if name not in ("", "-1"))
    listing = _listed()
    if listing is None:  # no driver's tool: device files
        count = sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in Path("/dev").glob("nvidia*"))
    else:
        count = len(re.findall(r"^GPU \d+:", listing, re.MULTILINE))
    return tuple(map(str, range(count)))


def _listed() -> str | None:
    """Return the output of the driver's tool, None where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@contextmanager
def served(placement: Placement) -> Iterator[Placement]:
    """Run MPS in the body where ranks share GPUs by it, and yield the placement with its variables.
    Under `zpp-lab mps` that one's daemon serves: clients of two daemons would take turns on a GPU.
    EmulationError where MPS is missing or does not start."""
    from zpp_lab.train.launch.mps import PROGRAM, Mps

    if placement.share != "mps" or PROGRAM in os.environ:
        yield placement
        return
    with Mps() as mps:
        yield replace(placement, environment=mps.environment)


def share_words(argv: Sequence[str]) -> list[str]:
    """Turn a bare --share-gpus into --share-gpus=mps, so that the next argument is its value only
    if it is one. Arguments behind `--` are left alone."""
    words = list(argv)
    own = words.index("--") if "--" in words else len(words)
    for i in range(own):
        if words[i] == OPTION and words[i + 1 : i + 2] not in [[share] for share in SHARES]:
            words[i] = f"{OPTION}=mps"
    return words
