"""What experiments/quiet says stands in its files."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded

FOLDER = Path(__file__).parents[2] / "experiments" / "quiet"
PAGE = (FOLDER / "README.md").read_text()


def test_the_table_is_what_the_script_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded("experiments/quiet/pairs.py")
    files = [str(FOLDER / f"{name}.csv") for name in ("quiet", "settled")]
    monkeypatch.setattr(sys, "argv", ["pairs.py", *files])
    assert script.main() == 0
    assert capsys.readouterr().out.strip() in PAGE


def test_the_steps_that_jump() -> None:
    with (FOLDER / "quiet.csv").open() as lines:
        norms = {
            (row["arm"], row["seed"], row["step"]): float(row["grad_norm"])
            for row in csv.DictReader(lines)
        }
    own, split = norms["residual", "1", "30"], norms["residual_split", "1", "30"]
    assert f"a norm of {own:.1f} in step 30, its split {split:.1f}" in PAGE
    both = [norms[arm, "1", "36"] for arm in ("twice", "twice_split")]
    assert f"step 36 ({both[0]:.0f} and {both[1]:.0f})" in PAGE


def test_two_bits_at_first_and_at_the_end() -> None:
    with (FOLDER / "settled.csv").open() as lines:
        early = [
            float(row["gap"])
            for row in csv.DictReader(lines)
            if row["arm"] == "w2" and int(row["step"]) <= 5
        ]
    assert len(early) == 10
    assert f"first five steps are {sum(early) / 10:.2f} nats above" in PAGE
    assert re.search(r"\| w2 \| 2 \| 5\.5296 \| −0\.0465 ", PAGE)
    assert "0.047 and 0.025 *below*" in PAGE
