"""experiments/speed/join.py: the tables of several calls as one."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from tests.study.report.fake_speeds import Arm, rows, write_speeds
from zpp_lab.tools.bench.step.results import Row

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


def details(path: Path, arms: list[str], ranks_per_gpu: int = 1) -> None:
    """A bench's JSON file: what it says of its arms."""
    value = {
        "gpus": {"ranks_per_gpu": ranks_per_gpu},
        "config": {arm: {"model": {"preset": "1_3b"}} for arm in arms},
        "cells": [{"arm": arm, "link_gbps": "25"} for arm in arms],
    }
    path.write_text(json.dumps(value))


def test_of_a_call_the_rows_of_named_files(tmp_path: Path) -> None:
    link = {(2, 2): ("25",)}
    first, second = tmp_path / "a", tmp_path / "b"
    write_speeds(first, rows((Arm("fsdp2", 5.4, 0.14), Arm("zeropp", 0.9, 0.2)), link))
    write_speeds(second, rows((Arm("zeropp", 0.9, 0.3), Arm("w8", 0.9, 0.4)), link))
    details(second / "2x2-studies.json", ["w8", "compute"])
    details(second / "2x2.json", ["zeropp"], ranks_per_gpu=2)
    done = join(tmp_path / "all", first, Path(f"{second}=2x2-studies,2x2"))
    assert done.returncode == 0, done.stderr

    def seconds(folder: Path) -> dict[str, str]:
        with (folder / "results.csv").open() as file:
            return {row["arm"]: row["step_s"] for row in csv.DictReader(file)}

    assert set(seconds(tmp_path / "all")) == {"fsdp2", "zeropp", "w8", "compute"}
    for arm in ("zeropp", "compute", "fsdp2"):  # not those on shared GPUs; nor what a tag repeats
        assert seconds(tmp_path / "all")[arm] == seconds(first)[arm]
    missing = join(tmp_path / "more", Path(f"{second}=4x1"))
    assert missing.returncode == 1
    assert "4x1.json" in missing.stderr


def test_a_call_without_a_table_is_named(tmp_path: Path) -> None:
    done = join(tmp_path / "all", tmp_path / "nothing")
    assert done.returncode == 1
    assert "nothing" in done.stderr
    assert not (tmp_path / "all").exists()
