"""A published study's files, and numbers as its page writes them.

Folders are named below experiments/.
"""

from __future__ import annotations

import csv
import json
import re
import tarfile
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any

from tests.experiments.scripts import ROOT
from zpp_lab.study.stats import t_interval

EXPERIMENTS = ROOT / "experiments"
SEEDS = (1, 2, 3)
At = tuple[str, int, int]  # arm, seed and step


@cache
def rows(folder: str) -> dict[At, dict[str, str]]:
    """Of results.csv, as the file has them."""
    with (EXPERIMENTS / folder / "results.csv").open() as lines:
        return {
            (row["arm"], int(row["seed"]), int(row["step"])): row for row in csv.DictReader(lines)
        }


@cache
def steps(folder: str) -> dict[At, dict[str, float]]:
    """Of results.csv, the numbers that are there."""
    words = ("study", "arm", "seed", "step")
    return {
        at: {key: float(value) for key, value in row.items() if value and key not in words}
        for at, row in rows(folder).items()
    }


@cache
def runs(folder: str, ending: str) -> dict[str, str]:
    """The text of each run's file of that name, by the run's folder in the study's."""
    with tarfile.open(EXPERIMENTS / folder / "runs.tar.xz") as packed:
        return {
            m.name.split("/", 1)[1].rsplit("/", 1)[0]: file.read().decode()
            for m in packed
            if m.name.endswith(f"/{ending}") and (file := packed.extractfile(m)) is not None
        }


@cache
def summaries(folder: str) -> dict[str, dict[str, Any]]:
    return {name: json.loads(text) for name, text in runs(folder, "summary.json").items()}


@cache
def gaps(folder: str, arm: str, step: int = 60) -> list[float]:
    """Of the held-out loss after a step, by seed."""
    at = steps(folder)
    held = [[at[name, s, step]["heldout_loss"] for s in SEEDS] for name in (arm, "zero3")]
    return minus(*held)


@cache
def training(folder: str, arm: str, first: int = 1, last: int = 60) -> list[float]:
    """The training loss's gap by seed, mean over these steps."""
    at = steps(folder)
    return [fmean(at[arm, s, step]["gap"] for step in range(first, last + 1)) for s in SEEDS]


def sure(folder: str, arm: str) -> list[str]:
    """The arm's cells in the report, below "How sure"."""
    report = (EXPERIMENTS / folder / "report.md").read_text()
    lines = report.split("\n## How sure\n")[1].splitlines()
    line = next(line for line in lines if line.startswith(f"| {arm} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def said_of_time(folder: str) -> str:
    """What a page says of the seconds in call.log."""
    log = (EXPERIMENTS / folder / "call.log").read_text()
    took, own = re.search(r": (\d+) s so far", log), re.search(r"base: .* (\d+) s", log)
    assert took is not None
    assert own is not None
    return f"took {took[1]} s, start-ups included; {own[1]} s are the base"


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def listed(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def spread(values: Sequence[float], digits: int = 4) -> str:
    low, high = t_interval(values, 0.95)
    return f"{signed(fmean(values), digits)} ± {(high - low) / 2:.{digits}f}"


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]
