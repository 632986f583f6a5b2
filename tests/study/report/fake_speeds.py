"""Writes the results.csv of an invented bench, as `zpp-lab bench step` would.

Steps are the longer one of compute and of bytes on the link, so that break-evens are known.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zpp_lab.tools.bench.step.results import Row

TOKENS = 8192
ZEROPP = {
    "recipe.name": "zeropp",
    "recipe.secondary": True,
    "recipe.hops": 2,
    "recipe.weights.bits": 8,
    "recipe.grads.bits": 4,
}


@dataclass(frozen=True)
class Arm:
    """gigabytes: of a node to others in a step. compute: seconds of its step at any bandwidth."""

    name: str
    gigabytes: float
    compute: float
    engine: str = "fsdp"
    config: Mapping[str, Any] = field(default_factory=dict)
    twin: str = ""

    def seconds(self, gbps: float | None) -> float:
        return max(self.compute, 0.0 if gbps is None else self.gigabytes * 8 / gbps)


ARMS = (
    Arm("fsdp2", 5.4, 0.14, "fsdp2"),
    Arm("fsdp2+node", 3.6, 0.142, "fsdp2"),
    Arm("zeropp", 0.9, 0.16, config=ZEROPP),
    Arm("w4_g84h", 0.6, 0.18, config={"recipe.name": "w4_g84h", "recipe.weights.bits": 4}),
)
KEPT = {"recipe.hops": 2, "recipe.sharding.weights": "node"}
DIFFERENCES = {
    "recipe.name": "diff",
    "recipe.sharding.update": "differences",
    "recipe.weights_update.bits": 4,
    "recipe.grads.bits": 4,
}
TWINS = (  # as today's bench times them: each quantized arm with its raw twin
    *ARMS[:2],
    Arm("hsdp", 3.5999, 0.145, "fsdp2"),
    Arm("amsp_node", 2.4, 0.15, config=KEPT),
    Arm("diff", 0.6, 0.18, config=KEPT | DIFFERENCES, twin="amsp_node"),
)
SHAPES = {(2, 2): ("12", "25", "50", "400", "max"), (1, 4): ("max",)}


def rows(
    arms: Sequence[Arm] = ARMS,
    shapes: Mapping[tuple[int, int], Sequence[str]] = SHAPES,
    model: str = "1_3b",
    ranks_per_gpu: int = 1,
) -> list[dict[str, str]]:
    """Every cell, and that of the arm `compute`; a step's spread is 2 % each way."""
    found = []
    for (nodes, gpus), links in shapes.items():
        for link in links:
            for arm in arms:
                gbps = None if link == "max" else float(link)
                found.append(_row(arm, nodes, gpus, link, arm.seconds(gbps), model))
        found.append(_row(Arm("compute", 0, 0.12, "none"), nodes, gpus, "max", 0.12, model))
    return [row | {"ranks_per_gpu": str(ranks_per_gpu)} for row in found]


def _row(arm: Arm, nodes: int, gpus: int, link: str, step: float, model: str) -> dict[str, str]:
    on_link = None if link == "max" else arm.gigabytes * 8 / float(link)
    least = max(0.12, on_link or 0)
    known = {
        "engine": arm.engine,
        "recipe": "zero3" if arm.engine == "fsdp2" else arm.name,
        "model": model,
        "nodes": nodes,
        "gpus_per_node": gpus,
        "link_gbps": link,
        "tokens_per_s": TOKENS / step,
        "floor_s": least,
        "step_s": step,
        "peak_gib": 21.5,
        "arm": arm.name,
        "twin": arm.twin,
        "share_of_floor": least / step,
        "step_min_s": step * 0.98,
        "step_max_s": step * 1.02,
        "measured_gbps": 2000 if link == "max" and nodes > 1 else "",
        "tokens_per_step": TOKENS,
        "seq_len": 2048,
        "batch_size": 1,
        "machine": "one host of 4 × NVIDIA H200",
        "config": json.dumps(arm.config),
    }
    return {f.name: str(known.get(f.name, "")) for f in fields(Row)}


def write_speeds(folder: Path, table: Sequence[Mapping[str, str]] | None = None) -> Path:
    """results.csv in `folder`."""
    table = rows() if table is None else table
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path
