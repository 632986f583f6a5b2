"""`zpp-lab emulate`: any command on emulated nodes, once a rank or once a node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.links.shared import refusal
from zpp_lab.tools.links.nodes import main

ROOT = Path(__file__).parents[3]
needs_nodes = pytest.mark.skipif(bool(refusal()), reason=refusal())
SHAPE = ["--nodes", "2", "--gpus-per-node", "2"]

REDUCE = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
place = os.environ["GROUP_RANK"], os.environ["NCCL_HOSTID"].split("-")[1]
os.write(1, f"found {dist.get_rank()} {' '.join(place)} {int(total)}\\n".encode())  # in one piece
os._exit(0)
"""


@needs_nodes
def test_ranks_are_told_their_place(tmp_path: Path) -> None:
    script = f"echo $RANK $GROUP_RANK $MASTER_ADDR $(ip -br addr | grep -c zpp) > {tmp_path}/$RANK"
    assert main([*SHAPE, "--link-gbps", "1", "--", "sh", "-c", script]) == 0
    said = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert said == [[str(r), str(r // 2), "10.77.0.1", "1"] for r in range(4)]


@needs_nodes
def test_a_failure_ends_all(tmp_path: Path) -> None:
    assert main([*SHAPE, "--", "sh", "-c", "[ $RANK = 2 ] && exit 7; sleep 600"]) == 7
    assert main([*SHAPE, "--", "no-such-command-anywhere"]) == 127


@needs_nodes
@pytest.mark.slow
@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_torchrun_meets_across_nodes(tmp_path: Path, meeting: str) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if meeting == "c10d":
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29512"]
    command = [sys.executable, "-m", "zpp_lab.cli", "emulate", "--nodes", "2"]
    command += ["--gpus-per-node", "1", "--per", "node", "--", *torchrun, str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split()[1:] for line in done.stdout.splitlines() if "found" in line)
    assert [line[0] for line in lines] == ["0", "1"]
    assert {line[2] for line in lines} == {"node0", "node1"}
    assert {line[3] for line in lines} == {"1"}
