"""What a calibration keeps as it goes: parts, whose they are, and (slow) a call that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.waiting import until
from zpp_lab.tools.bench.calibrate import TINY, Kept, place_of
from zpp_lab.tools.plan.cost.machine import PART, Between, Curve, load_machine

CURVE = Curve(((0.0, 1e-5), (1024.0, 1 / 3)))
LINKS = Between(2e-6, 0.9)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kept(out: Path, **changes: Any) -> Kept:
    return Kept(out, {**place_of(TINY, torch.device("cpu")), **changes})


def fill(parts: Kept) -> tuple[Curve, Between, float]:
    return (
        parts.part("compute", Curve, lambda: CURVE),
        parts.part("links", Between, lambda: LINKS),
        parts.part("memory", float, lambda: 4.2e12),
    )


def never() -> Any:
    pytest.fail("measured twice")


def test_the_next_call_goes_on_with_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"
    first = kept(out)
    assert first.calls == 1
    found = fill(first)
    second = kept(out)
    assert "resuming from" in capsys.readouterr().out
    assert second.calls == 2
    again = (
        second.part("compute", Curve, never),
        second.part("links", Between, never),
        second.part("memory", float, never),
    )
    assert again == found == (CURVE, LINKS, 4.2e12)
    assert not out.exists()
    second.done()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": ["NVIDIA H200, a CPU"]}, "ranks was ['NVIDIA H200, a CPU'] and is ['no GPU, "),
        ({"torch": "1.0"}, "torch was 1.0 and is "),
        ({"commit": "0" * 40}, f"commit was {'0' * 40} and is "),
        ({"sizes": {"widths": []}}, "sizes was "),
    ],
)
def test_parts_of_another_machine_or_code_are_not_used(
    changes: Mapping[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(kept(tmp_path / "m.json", **changes))
    here = kept(tmp_path / "m.json")
    assert (here.calls, here.parts) == (1, {})
    told = capsys.readouterr().out
    assert said in told
    assert told.strip().endswith("measuring everything again")


@pytest.mark.slow
def test_a_killed_calibration_goes_on(tmp_path: Path) -> None:
    out, part = tmp_path / "here.json", tmp_path / f"here.json{PART}"
    words = [sys.executable, "-m", "zpp_lab.cli", "bench", "calibrate", "--out", str(out)]
    words += ["--tiny", "--cpu", "--ranks", "2", "--bits", "8,4"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: part.exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(part.read_text())
    assert not out.exists()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "resuming from" in done.stdout
    assert not part.exists()
    made = json.loads(out.read_text())
    assert made["compute"]["eager"] == before["parts"]["compute, eager"]
    assert "in 2 calls" in made["comment"]["made by"]
    load_machine(str(out))
