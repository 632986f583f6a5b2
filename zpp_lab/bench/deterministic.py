"""What engine.deterministic costs: the median step of the same run with and without it.

    zpp-lab bench deterministic engine=fsdp cluster=1x4 model=125m train.param_dtype=bf16

Takes the overrides of `zpp-lab train`. Each setting is a run of its own, in fresh processes:
cuBLAS reads its workspace setting once, when it starts. Runs alternate, so that a machine that
slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from zpp_lab.tracking.jsonl import read

WARM = 5  # steps that are not counted


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("zpp-lab bench deterministic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    args, overrides = parser.parse_known_args(list(words))
    if args.steps <= WARM + 1:
        parser.error(f"--steps={args.steps}: use more than {WARM + 1}")
    times: dict[str, list[float]] = {"true": [], "false": []}
    for _ in range(args.repeats):
        for setting, found in times.items():
            found.append(median_step(overrides, setting, args.steps))
    print(table(times))
    if args.out is not None:
        args.out.write_text(json.dumps({"overrides": overrides, "ms": times}, indent=1) + "\n")
    return 0


def median_step(overrides: Sequence[str], setting: str, steps: int) -> float:
    """Milliseconds of a run's median step after the first few. RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        own = [
            f"engine.deterministic={setting}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            "train.checkpoint_every=0",
            "tracking.wandb=off",
            "tracking.telemetry_every=0",
            f"run.dir={folder}/run",
        ]
        command = [sys.executable, "-m", "zpp_lab.cli", "train", *overrides, *own]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command[2:])} failed:\n{ended.stderr}")
        seconds = [row["seconds"] for row in read(Path(folder, "run", "metrics.jsonl"))]
    each = [b - a for a, b in pairwise(seconds)]
    return statistics.median(each[WARM - 1 : -1]) * 1000  # the last one evaluates


def table(times: dict[str, list[float]]) -> str:
    """Both settings with their spread over runs, and the cost."""
    middle = {setting: statistics.median(found) for setting, found in times.items()}
    rows = ["engine.deterministic   ms a step (median of runs; least to most)"]
    for setting, found in times.items():
        rows.append(f"{setting:<22} {middle[setting]:.2f}  ({min(found):.2f} to {max(found):.2f})")
    rows.append(f"cost: {100 * (middle['true'] / middle['false'] - 1):+.1f} %")
    return "\n".join(rows)
