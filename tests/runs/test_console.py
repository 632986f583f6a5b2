"""The progress line, on a terminal and in a log."""

from __future__ import annotations

import io
from typing import Any

from zpp_lab.runs.console import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "tokens": step * 1000, "seconds": float(step), **more}


def test_a_log_gets_lines_now_and_then_and_at_evaluations() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(100, "zero3-seed1", stream=out, every_seconds=10.0, clock=clock)
    for step in range(1, 101):
        clock.now += 1.0
        progress.update(record(step, heldout_loss=2.75) if step == 15 else record(step))
    progress.close()
    lines = out.getvalue().splitlines()
    shown = [int(line.split("step ")[1].split("/")[0]) for line in lines]
    assert shown == [10, 15, 25, 35, 45, 55, 65, 75, 85, 95, 100]
    assert lines[0] == "zero3-seed1  step 10/100  loss 2.5000  1.0k tok/s  ETA 1:30"
    assert "held-out 2.7500" in lines[1]
    assert "held-out 2.7500" in lines[2]  # the last one known
    assert lines[-1].endswith("took 1:40")
    assert "\r" not in out.getvalue()


def test_a_long_step_of_many_ranks_says_how_far_it_is() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(2, "zero3", stream=out, every_seconds=10.0, clock=clock)
    for done in range(1, 385):
        clock.now += 0.125
        progress.passing(done, 384)
    lines = out.getvalue().splitlines()
    assert lines[0] == "zero3  step 1/2  forward and backward 80 of 384"
    assert len(lines) == 4


def test_a_line_tells_what_was_measured_and_only_that() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(2, "w4", stream=out, every_seconds=0.0, clock=clock)
    shown = {"mfu": 0.4123, "memory": {"host_gib": 9.0, "gpu_gib": 27.41}}
    for step, waited in ((1, 0.0), (2, 0.3)):  # of a step of two seconds
        clock.now += 2.0
        progress.update(record(step, **shown, tokens_per_second=500.0, wait={"data": waited}))
    first, last = out.getvalue().splitlines()
    assert first.startswith("w4  step 1/2  loss 2.5000  MFU 41.2%  27.41 GiB  ETA")
    assert "  MFU 41.2%  27.41 GiB  waits for data 15%  took" in last
