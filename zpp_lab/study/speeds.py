"""Measured training speed of a study's arms: the file bench.json in the study's folder.

    {
      "machine": "2 nodes of 4 H200",
      "command": "how it was measured",
      "tokens_per_second": {"25 Gbit/s": {"zero3": 51000, "zeropp": 90500}}
    }

`tokens_per_second` maps a bandwidth between nodes (any text that starts with a number) to the
arms, or their recipes, and what was measured for them. Speeds never come from a study's own
runs: the engine that simulates a cluster says nothing about time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zpp_lab.config import load
from zpp_lab.study.verdict import StudyResult

FILE = "bench.json"
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Bench:
    """tokens_per_second: bandwidth → arm or recipe → tokens/s, all above 0."""

    tokens_per_second: dict[str, dict[str, Speed]]
    machine: str = ""
    command: str = ""

    @property
    def bandwidths(self) -> list[str]:
        """Slowest first, by the number that each name starts with; others at the end."""
        return sorted(self.tokens_per_second, key=_number)

    def by_arm(self, result: StudyResult) -> dict[str, dict[str, float]]:
        """bandwidth → arm → tokens/s for the arms of `result` that were measured."""
        found: dict[str, dict[str, float]] = {}
        for bandwidth in self.bandwidths:
            speeds = self.tokens_per_second[bandwidth]
            for arm in result.arms:
                recipes = {run.recipe for run in arm.runs.values()}
                name = arm.name if arm.name in speeds else next(iter(recipes & set(speeds)), None)
                if name is not None:
                    found.setdefault(bandwidth, {})[arm.name] = speeds[name]
        return found


def read_bench(root: Path) -> Bench | None:
    """The bench.json of a study's folder, or None without one. ValueError names a fault."""
    path = root / FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, Mapping):
            raise ValueError("not a JSON object")
        return load(Bench, values)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}. It should look like "
            '{"tokens_per_second": {"25 Gbit/s": {"zero3": 51000}}}'
        ) from None


def _number(name: str) -> tuple[float, str]:
    found = re.match(r"\s*([\d.]+)", name)
    return (float(found[1]) if found else float("inf")), name
