"""Gaps by parts of a training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments" / "windows.py"


def windows(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_means_and_largest_amounts_of_each_part(tmp_path: Path) -> None:
    rows = ["arm,seed,step,gap", "zero3,1,1,0.0", "zero3,1,2,0.0"]
    rows += ["w4,1,1,0.25", "w4,2,1,-0.75", "w4,1,2,0.5", "w4,1,3,", "late,1,3,-0.125"]
    (tmp_path / "r.csv").write_text("\n".join(rows) + "\n")
    done = windows(tmp_path / "r.csv", "1", "99")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| Arm | steps 1 to 1 | steps 2 to 3 |",
        "| --- | --- | --- |",
        "| w4 | −0.2500, at most 0.7500 | +0.5000, at most 0.5000 |",
        "| late | – | −0.1250, at most 0.1250 |",
    ]


def test_gaps_to_another_arm_are_paired_by_seed_and_step(tmp_path: Path) -> None:
    rows = ["arm,seed,step,loss,gap", "zero3,1,1,2.0,0.0", "split,1,1,2.5,0.5", "split,1,2,1.5,"]
    rows += ["w4,1,1,2.25,0.25", "w4,2,1,9.0,7.0", "w4,1,2,1.0,", "w4,1,3,1.0,"]
    (tmp_path / "r.csv").write_text("\n".join(rows) + "\n")
    done = windows(tmp_path / "r.csv", "1", "--against", "split")
    assert done.stdout.splitlines()[2:] == [
        "| zero3 | −0.5000, at most 0.5000 | – |",
        "| w4 | −0.2500, at most 0.2500 | −0.5000, at most 0.5000 |",
    ]
    nobody = windows(tmp_path / "r.csv", "--against", "nobody")
    assert nobody.returncode == 1
    assert "no arm has a gap to nobody" in nobody.stderr
