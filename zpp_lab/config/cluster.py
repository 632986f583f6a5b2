"""The ranks of a run: how they lie in nodes, and which part of the model each of them has.

A cell is one (stage, tensor part) of the model. Its ranks form one data-parallel cluster, `dp`,
over which recipes gather and reduce. Cells exchange activations.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import STRICT, Positive
from zpp_lab.config.codec import need as _need

Axis = Literal["node", "gpu", "tp", "pp"]
CELL: frozenset[Axis] = frozenset(("node", "gpu"))  # along which a cell's ranks lie


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    nodes: Positive = 2
    gpus_per_node: Positive = 2
    tp: Positive = 1  # parts of each weight matrix, on neighbouring GPUs of a node
    pp: Positive = 1  # stages of consecutive blocks

    def __post_init__(self) -> None:
        _need(
            self.gpus_per_node % self.tp == 0,
            f"cluster.tp={self.tp} does not divide cluster.gpus_per_node={self.gpus_per_node}: use "
            "a divisor, as tensor parts exchange activations inside a node",
        )
        _need(
            self.nodes % self.pp == 0 or self.gpus_per_node // self.tp % self.pp == 0,
            f"cluster.pp={self.pp} divides neither cluster.nodes={self.nodes} nor the "
            f"{self.gpus_per_node // self.tp} data-parallel GPUs of a node: use a divisor of one",
        )

    @property
    def world(self) -> int:
        """Processes."""
        return self.nodes * self.gpus_per_node

    @property
    def dp(self) -> ClusterConfig:
        """The ranks of one cell."""
        if self.tp == self.pp == 1:
            return self
        local = self.gpus_per_node // self.tp
        if self.across:
            return ClusterConfig(self.nodes // self.pp, local)
        return ClusterConfig(self.nodes, local // self.pp)

    @property
    def readers(self) -> int:
        """Ranks that read batches of their own."""
        return self.dp.world

    @property
    def stored(self) -> dict[str, Any]:
        """The settings that a run's files name: tp and pp where they are not 1."""
        own = asdict(self)
        return {k: v for k, v in own.items() if k in ("nodes", "gpus_per_node") or v != 1}

    @property
    def split(self) -> str:
        """The settings that give a rank a part of the model alone; "" where each has all of it."""
        own = {"tp": self.tp, "pp": self.pp}
        return ", ".join(f"cluster.{name}={n}" for name, n in own.items() if n > 1)

    @property
    def across(self) -> bool:
        """Whether stages are whole nodes."""
        return self.nodes % self.pp == 0

    @property
    def axes(self) -> dict[Axis, int]:
        """Sizes of the axes, the fastest last; a node's ranks always follow each other."""
        nodes, local = self.dp.nodes, self.dp.gpus_per_node
        if self.across:
            return {"pp": self.pp, "node": nodes, "gpu": local, "tp": self.tp}
        return {"node": nodes, "pp": self.pp, "gpu": local, "tp": self.tp}

    def place(self, rank: int) -> dict[Axis, int]:
        """Return a rank's place on every axis."""
        found: dict[Axis, int] = {}
        for axis, size in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def members(self, axes: Set[Axis], rank: int) -> list[int]:
        """Return the ranks that differ from `rank` along `axes` alone, itself among them, in
        ascending order."""
        own, sizes = self.place(rank), self.axes
        found = [0]
        for axis, size in sizes.items():
            at = range(size) if axis in axes else (own[axis],)
            found = [first * size + i for first in found for i in at]
        return found
