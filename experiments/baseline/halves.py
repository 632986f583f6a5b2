"""A step on four GPUs from the three parts that halves.sh times on two; no torch.

A rank's forward and backward are those of all layers. Its update is what half the layers on half
the ranks take more with it than without it: as many weights, gradients and moments a rank.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = re.compile(r"(?P<setting>\w+) (?P<layers>\d+) layers(?P<bare>, no update)?")


@dataclass(frozen=True)
class Parts:
    """Seconds: medians of timed steps on the slowest rank."""

    passes: float  # all layers, no update
    half: float
    half_passes: float  # half the layers, no update

    @property
    def update(self) -> float:
        return self.half - self.half_passes

    @property
    def step(self) -> float:
        return self.passes + self.update


def parts(results: dict[str, dict[str, Any]]) -> Parts:
    """ValueError where a part is missing, or parts have several settings."""
    found: dict[tuple[int, bool], float] = {}
    settings = set()
    for name, one in results.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is no part that halves.sh times")
        settings.add(match["setting"])
        found[int(match["layers"]), match["bare"] is not None] = one["seconds"]
    if len(settings) > 1:
        raise ValueError(f"parts of several settings: {sorted(settings)}; give each its own folder")
    every = max(layers for layers, _ in found)
    wanted = [(every, True), (every // 2, False), (every // 2, True)]
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(f"not timed (layers, without update): {missing}; run halves.sh again")
    return Parts(*(found[key] for key in wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file of one model")
    path = parser.parse_args().results
    made = parts(json.loads(path.read_text())["results"])
    print(
        f"{path.stem}: {made.passes:.4f} s forward and backward + {made.update:.4f} s update "
        f"= {made.step:.4f} s a step on four GPUs"
    )


if __name__ == "__main__":
    main()
