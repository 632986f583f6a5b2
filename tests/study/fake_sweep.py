"""Writes the runs of a factorial study of any size, with invented numbers, in seconds.

Loss and telemetry follow a simple law of bits and block size with a known interaction, so that
a test can ask whether main effects, interactions and the Pareto front come out as put in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.study.fake_runs import FakeArm, write_run
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import write_study

BITS, BLOCKS = (2, 4, 6, 8), (32, 64, 128, 256, 1024, 4096)
Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")


@dataclass(frozen=True)
class Cell:
    """One arm of the grid."""

    bits: int
    block: int
    symmetric: bool
    rounding: Rounding

    @property
    def name(self) -> str:
        return f"w{self.bits}_b{self.block}_{'sym' if self.symmetric else 'asym'}_{self.rounding}"

    @property
    def gap(self) -> float:
        """The true gap in nats: 4^-bits, worse with the block's size for few bits."""
        error = 4.0 ** (2 - self.bits)
        return 0.1 * error * (1 + math.log2(self.block / 32)) * (0.8 if self.symmetric else 0.6)

    @property
    def weights(self) -> dict[str, Any]:
        values = {"bits": self.bits, "block_size": self.block}
        return values | {"symmetric": self.symmetric, "rounding": self.rounding}

    @property
    def overrides(self) -> list[str]:
        values = {key: str(value).lower() for key, value in self.weights.items()}
        return ["recipe=w8", *(f"recipe.weights.{key}={value}" for key, value in values.items())]


def grid(
    bits: Sequence[int] = BITS,
    blocks: Sequence[int] = BLOCKS,
    symmetries: Sequence[bool] = (True, False),
    roundings: Sequence[Rounding] = ROUNDINGS,
) -> list[Cell]:
    return [Cell(*values) for values in itertools.product(bits, blocks, symmetries, roundings)]


def fake_sweep(cells: Iterable[Cell], seeds: int) -> StudyConfig:
    """The study of the cells with the baseline and both controls."""
    controls = [
        ArmConfig("zero3", ["recipe=zero3"], "no codec: the baseline", "baseline"),
        ArmConfig(
            "zero3_reordered",
            ["recipe=zero3_reordered"],
            "only the order of sums differs",
            "order_control",
        ),
        ArmConfig("broken", ["recipe=broken"], "2 bits everywhere", "negative_control"),
    ]
    arms = [
        ArmConfig(c.name, c.overrides, f"{c.bits}-bit weights, blocks of {c.block}") for c in cells
    ]
    return StudyConfig(
        name="sweep",
        question="Which bits and block size of the weights keep the loss of ZeRO-3?",
        arms=[*controls, *arms],
        seeds=list(range(1, seeds + 1)),
        overrides=["model=tiny", "train.steps=300"],
    )


def write_sweep(root: Path, cells: Sequence[Cell], seeds: int, steps: int = 300) -> StudyConfig:
    """Write every run of the sweep and its study.yaml below `root`."""
    study = fake_sweep(cells, seeds)
    root.mkdir(parents=True, exist_ok=True)
    write_study(root, study)
    arms = [
        FakeArm("zero3", "", 0.0),
        FakeArm("zero3_reordered", "", 0.0, 0.0004),
        FakeArm("broken", "", 1.35, 0.05, 2, 2),
        *(FakeArm(c.name, "", c.gap, 0.001 + c.gap / 20, c.bits, None, c.weights) for c in cells),
    ]
    for arm in arms:
        for seed in study.seeds:
            write_run(root / arm.name / f"seed{seed}", arm, seed, steps, study.name)
    return study
