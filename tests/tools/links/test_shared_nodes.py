"""Emulated nodes on shared GPUs, with a recorder in place of MPS: what ranks find, and the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.links.shared import refusal
from tests.train.launch.fake_mps import calls
from tests.waiting import until
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.run import Pace, StepBench
from zpp_lab.tools.links.nodes import OneHost, main
from zpp_lab.train.launch import processes
from zpp_lab.train.launch.gpus import place
from zpp_lab.train.launch.mps import OWNER, PROGRAM

needs_nodes = pytest.mark.skipif(bool(refusal()), reason=refusal())
ROOT = str(Path(__file__).parents[3])
SHAPE = ["--nodes", "2", "--gpus-per-node", "2", "--share-gpus"]
# A rank asks the daemon from inside its node's network namespace.
ASKS = 'echo get_server_list | "$ZPP_LAB_MPS_CONTROL" > $OUT/$RANK.server; '
ASKS += "echo $CUDA_VISIBLE_DEVICES $NCCL_HOSTID > $OUT/$RANK"


@pytest.fixture(autouse=True)
def two_gpus(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("OUT", str(tmp_path))


@needs_nodes
def test_ranks_of_both_nodes_meet_on_the_gpus_and_reach_the_daemon(
    control: Path, tmp_path: Path
) -> None:
    assert main([*SHAPE, "--", "sh", "-c", ASKS]) == 0
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [gpus for gpus, _ in said] == ["4,5"] * 4
    assert [host.rpartition("-")[2] for _, host in said] == ["node0", "node0", "node1", "node1"]
    assert all((tmp_path / f"{rank}.server").read_text().strip().isdigit() for rank in range(4))
    assert calls(control)[-1] == "quit"


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_daemon_nodes_and_ranks_go_with_their_owner(
    control: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = [sys.executable, "-m", "zpp_lab.cli", "emulate", *SHAPE, "--", "sh", "-c"]
    owner = subprocess.Popen(
        [*words, f"{ASKS}; sleep 600"],
        env={**os.environ, "PYTHONPATH": ROOT},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_nodes.py
        stderr=subprocess.DEVNULL,
    )
    mark = processes.mark(owner.pid)
    until(lambda: (tmp_path / "3").exists() or owner.poll() is not None)
    assert owner.poll() is None
    pipe = Path((control / "seen").read_text().split()[0])
    assert pipe.is_dir()

    def left() -> list[int]:
        return [
            p for v in (processes.VARIABLE, OWNER) for p in processes.marked(lambda m: m == mark, v)
        ]

    assert len(left()) >= 9  # two holders, four ranks, keeper, daemon and server
    owner.send_signal(number)
    owner.wait(240)
    until(lambda: not left() and not pipe.parent.exists())
    assert calls(control)[-1] == "quit"


def test_a_bench_that_fails_takes_its_daemon_along(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks are told of the daemon; nothing is left of it when one of them fails."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    placed = place(ClusterConfig(nodes=2, gpus_per_node=1), ["4"], "mps")
    every = arms(["zeropp"], ["cluster=1x2", "engine.device=cpu", "model.dim=32"])
    told: list[dict[str, str]] = []

    class Fails(OneHost):
        def start(self, node, words, environment, **settings):  # type: ignore[no-untyped-def]
            told.append(dict(environment))
            return super().start(node, ["false"], environment, **settings)

    with Fails() as host:
        pace = Pace(1, 1, 1.0, 9.0, 99.0)
        bench = StepBench(host, placed, every, pace, tmp_path)
        bench.run([None])
    assert re.match(r"rank [01] ended", bench.failed["zeropp"])
    told = told[-2:]  # a second attempt has a daemon of its own
    assert [e["CUDA_VISIBLE_DEVICES"] for e in told] == ["4", "4"]
    assert {e[PROGRAM] for e in told} == {str(control / "nvidia-cuda-mps-control")}
    assert calls(control)[-1] == "quit"
    assert processes.marked(lambda owner: owner == processes.mark(), OWNER) == []
