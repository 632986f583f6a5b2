"""The progress line, on a terminal and in a log."""

from __future__ import annotations

import io
from typing import Any

from zpp_lab.runs.tracker import Progress


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
