"""What a start tells of itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zpp_lab.train.footprint import crowded


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
