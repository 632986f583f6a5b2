"""experiments/speed/join.py: the tables of several calls as one."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from tests.study.fake_speeds import Arm, rows, write_speeds
from zpp_lab.bench.step_results import Row

ROOT = Path(__file__).parents[2]


def join(*words: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "experiments" / "speed" / "join.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_calls_become_one_table(tmp_path: Path) -> None:
    """A cell that was measured twice counts as it was measured last; files come along."""
    link = {(2, 2): ("25",)}
    first, second = tmp_path / "a", tmp_path / "b"
    write_speeds(first, rows((Arm("fsdp2", 5.4, 0.14), Arm("zeropp", 0.9, 0.2)), link))
    write_speeds(second, rows((Arm("zeropp", 0.9, 0.3), Arm("ds", 0.9, 0.4)), link))
    (second / "2x2-deepspeed.json").write_text("{}\n")
    done = join(tmp_path / "all", first, second)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "all" / "results.csv").open() as file:
        found = {row["arm"]: row for row in csv.DictReader(file)}
    with (second / "results.csv").open() as file:
        later = {row["arm"]: row["step_s"] for row in csv.DictReader(file)}
    assert set(found) == {"fsdp2", "zeropp", "ds", "compute"}
    assert found["zeropp"]["step_s"] == later["zeropp"]
    assert set(found["ds"]) == set(Row.__dataclass_fields__)
    assert (tmp_path / "all" / "2x2-deepspeed.json").is_file()


def test_a_call_without_a_table_is_named(tmp_path: Path) -> None:
    done = join(tmp_path / "all", tmp_path / "nothing")
    assert done.returncode == 1
    assert "nothing" in done.stderr
    assert not (tmp_path / "all").exists()
