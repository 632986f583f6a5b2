"""Starting ranks, finding one's place among them, and what happens when one dies."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp_world import forks, say_into
from tests.runs import small
from zpp_lab.config import Config
from zpp_lab.dcp import read_whole
from zpp_lab.launcher import start
from zpp_lab.tracking import read
from zpp_lab.trainer import run


def started(config: Config, *, log: Path) -> Any:
    """A launcher of its own process for `config`."""
    process = forks().Process(target=_start, args=(config, str(log)))
    process.start()
    return process


def _start(config: Config, log: str) -> None:
    say_into(log)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(Path(__file__).parents[1])
    start(config)


def ended(process: Any, seconds: float) -> int:
    """Its exit code, once it has ended."""
    process.join(seconds)
    assert process.exitcode is not None, f"it still runs after {seconds} s"
    return int(process.exitcode)


def ranks_of(parent: int) -> list[int]:
    """The launcher's children that are ranks."""
    task = Path(f"/proc/{parent}/task")
    try:
        children = [p for t in task.iterdir() for p in (t / "children").read_text().split()]
        return [int(p) for p in children if b"zpp_lab.launcher" in _command(int(p))]
    except OSError:
        return []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_lines(folder: Path, count: int, process: Any) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive() and lines(folder) < count:
        time.sleep(0.02)


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def without_times(folder: Path) -> list[dict]:
    drop = ("seconds", "telemetry")
    return [
        {k: v for k, v in line.items() if k not in drop} for line in read(folder / "metrics.jsonl")
    ]


def fsdp(folder: Path, *overrides: str) -> Config:
    return small(folder, "recipe=zeropp", "cluster.nodes=1", "cluster.gpus_per_node=2", *overrides)


def test_run_equals_the_virtual_engine_and_a_dead_rank_ends_it(tmp_path: Path) -> None:
    run(fsdp(tmp_path, f"run.dir={tmp_path / 'virtual'}", "train.steps=18"))
    folder, log = tmp_path / "real", tmp_path / "log.txt"
    settings = ("engine=fsdp", "engine.device=cpu", "train.steps=18")
    config = fsdp(tmp_path, *settings, f"run.dir={folder}")
    process = started(config, log=log)
    wait_for_lines(folder, 5, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert ended(process, 60.0) != 0
    assert "rank 1 ended the run (SIGKILL)" in log.read_text()
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1
    assert _gone(ranks)
    assert ended(started(config, log=log), 120.0) == 0
    assert without_times(folder) == without_times(tmp_path / "virtual")


def _gone(pids: Sequence[int]) -> bool:
    """Whether the processes end within a few seconds (an orphan would stay)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(b"zpp_lab.launcher" in _command(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    config = fsdp(tmp_path, "engine=fsdp", "engine.device=cpu", "train.steps=500")
    process = started(config, log=tmp_path / "log.txt")
    wait_for_lines(tmp_path / "run", 5, process)
    ranks = ranks_of(process.pid)
    process.kill()
    process.join()
    assert len(ranks) == 2
    assert _gone(ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_change_no_bit(tmp_path: Path) -> None:
    rng, log = random.Random(4), tmp_path / "log.txt"
    settings = ("engine=fsdp", "engine.device=cpu", "train.steps=60")
    configs = {n: fsdp(tmp_path, *settings, f"run.dir={tmp_path / n}") for n in ("whole", "killed")}
    assert ended(started(configs["whole"], log=log), 300.0) == 0
    killed, kills = tmp_path / "killed", 0
    while kills < 10:
        process = started(configs["killed"], log=log)
        deadline = time.monotonic() + 60
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 14.0))  # from the imports to the last steps
        ranks = ranks_of(process.pid)
        if not process.is_alive() or not ranks:
            ended(process, 60.0)
            if (killed / "summary.json").is_file():  # it got through: again, from the start
                for file in (killed / "summary.json", *killed.glob("checkpoints/step-00000060/*")):
                    file.unlink()
            continue
        os.kill(rng.choice(ranks), signal.SIGKILL)
        ended(process, 60.0)
        kills += 1
    assert ended(started(configs["killed"], log=log), 300.0) == 0
    assert without_times(killed) == without_times(tmp_path / "whole")
    newest = "checkpoints/step-00000060"
    a, b = (read_whole(tmp_path / n / newest) for n in ("whole", "killed"))
    for name, tensor in a["weights"].items():
        assert torch.equal(tensor, b["weights"][name]), name
