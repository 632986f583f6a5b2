"""Ranks that srun started, on the CPU: a run, a rank that dies, a rank that stalls."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tests.small_runs import small
from tests.train.launch.test_launcher import lines, without_times
from zpp_lab.config.schema import Config
from zpp_lab.train.trainer import run

LIMIT = 480.0  # seconds; only a failing test waits that long
RANK = """
import sys, time, yaml
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.train.launch.launcher import launch, leave

def stall(engine, *args, real=FsdpEngine._pass):
    if engine.clock.step == 2:
        if engine.rank == 1:
            time.sleep(600)
        engine.transport.watchdog.seconds = 5.0  # not before: ranks may start far apart
    return real(engine, *args)

if "stall" in sys.argv:
    FsdpEngine._pass = stall
launch(load(Config, yaml.safe_load(open(sys.argv[1]))))
leave()
"""


def port() -> int:
    """A free one below those that the kernel gives away, as it stays free until rank 0 is up."""
    for number in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", number))
            return number
    raise AssertionError("no free port")


def srun(config: Config, log: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    """One process a task, with the variables that srun sets on two machines of two tasks."""
    file = log.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(asdict(config)))
    shared = {
        "SLURM_NTASKS": str(config.cluster.world),
        "SLURM_NNODES": str(config.cluster.nodes),
        "SLURM_STEP_ID": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(config.cluster.world):
        node, local = divmod(rank, config.cluster.gpus_per_node)
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
        environment = {**os.environ, **shared, **{k: str(v) for k, v in own.items()}}
        with log.open("ab") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(file), *words],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=Path(__file__).parents[3],
                )
            )
    return ranks


def ended(ranks: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Exit codes; kills and fails those that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    try:
        return [p.wait(timeout=max(0.1, deadline - time.monotonic())) for p in ranks]
    finally:
        for p in ranks:
            p.kill()


def fsdp(folder: Path, name: str, *overrides: str) -> Config:
    common = ("recipe=zeropp", "cluster=2x2", "train.steps=24", "engine.gather=hierarchical")
    return small(folder, *common, f"run.dir={folder / name}", *overrides)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_run_that_loses_a_rank_and_goes_on(lost: int, tmp_path: Path) -> None:
    run(fsdp(tmp_path, "virtual"))
    config, log = fsdp(tmp_path, "real", "engine=fsdp"), tmp_path / "log.txt"
    ranks = srun(config, log)
    deadline = time.monotonic() + LIMIT
    while lines(tmp_path / "real") < 6 and time.monotonic() < deadline:
        assert all(p.poll() is None for p in ranks), log.read_text()
        time.sleep(0.02)
    ranks[lost].send_signal(signal.SIGKILL)
    codes = ended(ranks, LIMIT)
    assert all(code != 0 for code in codes), log.read_text()
    if lost:
        assert re.search(r"rank 0: (.*: )?rank 2 has ended", log.read_text()), log.read_text()
        failure = json.loads((tmp_path / "real" / "failure.json").read_text())
        assert (failure["outcome"], failure["rank"]) == ("crashed", 2)
    else:  # which writes the run's files
        for other in (1, 2, 3):
            said = rf"rank {other}: (.*: )?rank 0 has ended"
            assert re.search(said, log.read_text()), log.read_text()
    assert ended(srun(config, log), LIMIT) == [0, 0, 0, 0], log.read_text()
    real, virtual = (without_times(tmp_path / n, "telemetry") for n in ("real", "virtual"))
    assert real == virtual


@pytest.mark.slow
def test_a_rank_that_stalls_is_noticed_by_wire_and_unit(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    overrides = ("engine=fsdp", "cluster=1x2", "engine.silence_seconds=600")
    codes = ended(srun(fsdp(tmp_path, "stalled", *overrides), log, "stall"), LIMIT)
    assert all(code != 0 for code in codes)
    late = "weights_forward of unit root (world) has not finished after 5 s"
    assert f"rank 0: {late}: rank 1 hangs:" in log.read_text()
    assert "rank 1: rank 1, this one, hangs" in log.read_text()  # and where, as no other can say
    assert "in stall" in log.read_text()
