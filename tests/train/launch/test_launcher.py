"""Starting ranks, finding one's place among them, and what happens when one dies."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.engines.fsdp_world import run_world
from tests.small_runs import small
from zpp_lab.config.schema import Config
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.train.trainer import run

LIMIT = 240.0  # seconds; only a failing test waits that long
CODE = """
import sys, yaml
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.train.launch.launcher import start
start(load(Config, yaml.safe_load(open(sys.argv[1]))))
"""
# Rank 1 waits before a step, so that it is there to be killed however late that is.
HELD = """
import sys, time
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.train.launch.launcher import main

def held(engine, step, *args, real=FsdpEngine.step, **named):
    if engine.rank == 1 and step == 8:
        time.sleep(600)
    return real(engine, step, *args, **named)

FsdpEngine.step = held
main(*sys.argv[-2:])
"""
HOLD = f"""
import torch.distributed.launcher.api as api
def held(settings, python, real=api.elastic_launch):
    return lambda *words: real(settings, python)("-c", {HELD!r}, *words)
api.elastic_launch = held
"""


def started(
    config: Config, folder: Path, *, log: Path, code: str = CODE
) -> subprocess.Popen[bytes]:
    """A launcher of its own process for `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "asked.yaml"
    file.write_text(yaml.safe_dump(asdict(config)))
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        )


def ranks_of(parent: int) -> list[int]:
    """The launcher's children that are ranks."""
    task = Path(f"/proc/{parent}/task")
    try:
        children = [p for t in task.iterdir() for p in (t / "children").read_text().split()]
        return [int(p) for p in children if b"zpp_lab.train.launch.launcher" in _command(int(p))]
    except OSError:
        return []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_lines(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None and lines(folder) < count:
        time.sleep(0.02)


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def without_times(folder: Path, *more: str) -> list[dict]:
    found = [unmeasured(line) for line in read(folder / "metrics.jsonl")]
    return [{k: v for k, v in line.items() if k not in more} for line in found]


def fsdp(folder: Path, *overrides: str) -> Config:
    return small(folder, "recipe=zeropp", "cluster.nodes=1", "cluster.gpus_per_node=2", *overrides)


def on_each_rank(config: Config) -> str:
    with redirect_stdout(io.StringIO()) as said:
        run(config, dist.get_rank())
    return said.getvalue()


def test_run_equals_the_virtual_engine_and_a_dead_rank_ends_it(tmp_path: Path) -> None:
    run(fsdp(tmp_path, f"run.dir={tmp_path / 'virtual'}", "train.steps=16"))
    folder, log = tmp_path / "real", tmp_path / "log.txt"
    settings = ("engine=fsdp", "engine.device=cpu", "train.steps=16")
    config = fsdp(tmp_path, *settings, f"run.dir={folder}")
    process = started(config, folder, log=log, code=HOLD + CODE)
    wait_for_lines(folder, 8, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2, log.read_text()
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(timeout=LIMIT) != 0
    said = log.read_text()
    assert "rank 1 ended the run (SIGKILL)" in said
    assert "the newest checkpoint" in said
    assert "closing signal" not in said  # torch's own words for the same
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1
    assert _gone(ranks)
    said = run_world(2, on_each_rank, config)  # launchers know nothing of checkpoints
    assert re.search(r"resuming after step \d+ of 16", said)
    names = (folder, tmp_path / "virtual")
    real, virtual = (without_times(name, "telemetry") for name in names)  # adds in another order
    assert real == virtual


def _gone(pids: Sequence[int]) -> bool:
    """Whether the processes end (an orphan would stay)."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if not any(b"zpp_lab.train.launch.launcher" in _command(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
def test_a_rank_that_stands_still_is_named_in_one_line(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    settings = ("engine=fsdp", "engine.device=cpu", "train.steps=100000")
    config = fsdp(tmp_path, *settings, "engine.silence_seconds=10")
    process = started(config, folder, log=log)
    wait_for_lines(folder, 8, process)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert process.wait(timeout=LIMIT) != 0
    last = log.read_text().strip().splitlines()[-1]
    wires = r"\w+ of unit \S+ \(\w+\)"
    waits = rf"rank 0: ({wires}|losses and gradient norm \(world\)|the checkpoint of step \d+)"
    assert re.search(rf"{waits}: rank 1 .*; the same command", last), last
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1
    assert _gone(ranks)


@pytest.mark.slow
def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    config = fsdp(tmp_path, "engine=fsdp", "engine.device=cpu", "train.steps=500")
    process = started(config, tmp_path / "run", log=tmp_path / "log.txt")
    wait_for_lines(tmp_path / "run", 5, process)
    ranks = ranks_of(process.pid)
    process.kill()
    process.wait()
    assert len(ranks) == 2
    assert _gone(ranks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_of_single_ranks_change_no_bit(tmp_path: Path) -> None:
    """While ranks import, and at random moments of six stretches of up to nine steps."""
    rng, log = random.Random(4), tmp_path / "log.txt"
    settings = ("engine=fsdp", "engine.device=cpu", "train.steps=60")
    configs = {n: fsdp(tmp_path, *settings, f"run.dir={tmp_path / n}") for n in ("whole", "killed")}
    assert started(configs["whole"], tmp_path / "whole", log=log).wait(timeout=LIMIT) == 0
    killed = tmp_path / "killed"
    for more in (0, *rng.choices(range(1, 10), k=6)):
        process = started(configs["killed"], killed, log=log)
        wait_for_ranks(process, 2)
        wait_for_lines(killed, more and lines(killed) + more, process)
        time.sleep(rng.uniform(0.0, 0.1))
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2, log.read_text()
        os.kill(rng.choice(ranks), signal.SIGKILL)
        assert process.wait(timeout=LIMIT) != 0
    assert started(configs["killed"], killed, log=log).wait(timeout=LIMIT) == 0
    assert without_times(killed) == without_times(tmp_path / "whole")
    newest = "checkpoints/step-00000060"
    a, b = (Saved(tmp_path / n / newest).state() for n in ("whole", "killed"))
    assert bits(a) == bits(b)


def wait_for_ranks(process: subprocess.Popen[bytes], count: int) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if len(ranks_of(process.pid)) == count:
            return
        time.sleep(0.02)


def bits(checkpoint: dict[str, Any]) -> dict[str, bytes]:
    """Weights and optimizer by name, of a checkpoint."""
    every = {"weights": checkpoint["weights"], **checkpoint["optimizer"]}
    return {
        f"{key} of {name}": tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for key, named in every.items()
        for name, tensor in named.items()
    }
