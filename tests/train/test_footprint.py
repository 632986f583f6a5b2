"""What a start tells of itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zpp_lab.engines.fsdp.prefetch import Laps
from zpp_lab.train.footprint import StartUp, crowded, of_ranks, retries


def test_parts_of_one_name_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 11.0, 13.0, 13.5, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    laps = Laps()
    for part in ("forward", "backward", "forward", "update"):
        laps.done(part)
    assert laps.seconds == {"forward": 1.5, "backward": 2.0, "update": 6.5}


def test_a_start_says_what_its_first_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.5, 46.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    start = StartUp()
    start.done("data")
    start.parted("first step", {"forward": 30.25, "compiling in all": 40.0})
    assert str(start) == (
        "start-up: data 1.5 s, first step 44.5 s (forward 30.2 s, compiling in all 40.0 s)"
    )
    assert start.facts() == {
        "data": 1.5,
        "first step": 44.5,
        "first step, forward": 30.25,
        "first step, compiling in all": 40.0,
    }


def test_a_gpu_that_was_too_full_is_said() -> None:
    assert crowded([0, 0], 60) is None
    assert crowded([5, 0], 60) is None  # those of a start
    assert crowded([1, 1], 5) is None
    assert crowded([0, 0], 0) is None  # a run that had made all its steps before
    said = crowded([3, 120], 60)
    assert said is not None
    assert "in 60 steps" in said
    assert "again 120 times" in said
    assert "train.optimizer_state=bf16" in said


def test_without_a_gpu_or_ranks() -> None:
    assert retries(torch.device("cpu")) == 0
    assert of_ranks(7) == [7]


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="no /proc")
def test_a_start_counts_from_the_launchers_own() -> None:
    """In a process of its own, which sleeps before it looks."""
    program = "import os, time; time.sleep(0.3); from zpp_lab.train.footprint import StartUp; "
    program += "import sys; print(StartUp.of_process(int(sys.argv[1])).facts())"
    words = [sys.executable, "-c", program, str(os.getpid())]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    facts = ast.literal_eval(said)
    assert list(facts) == ["launcher", "imports"]
    assert facts["launcher"] > 0
    assert facts["imports"] >= 0.3
