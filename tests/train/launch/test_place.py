"""Finding one's place among ranks that torchrun or srun started."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.config.schema import ClusterConfig
from zpp_lab.train.launch.place import check_place, enter, placed, prepare_graphs, slurm_place

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "MASTER_ADDR": "first",
}
CLUSTER = ClusterConfig(nodes=2, gpus_per_node=4)


def test_place_among_ranks() -> None:
    assert not placed({})
    assert placed({"RANK": "1", "WORLD_SIZE": "4"})
    assert placed(STEP)
    batch = {k: v for k, v in STEP.items() if k != "SLURM_STEP_ID"}
    assert not placed(batch), "a batch script is no step"
    assert not placed({**STEP, "SLURM_STEP_NUM_TASKS": "1"}), "srun --pty of one task"


def test_srun_gives_what_torchrun_gives() -> None:
    environment = dict(STEP)
    enter(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [environment[n] for n in names] == ["5", "8", "1", "1", "2"]
    assert environment["LOCAL_WORLD_SIZE"] == "4"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("first", "20077")
    check_place(environment, CLUSTER)


def test_a_variable_that_srun_did_not_pass_on() -> None:
    with pytest.raises(ValueError, match="SLURM_LOCALID"):
        slurm_place({k: v for k, v in STEP.items() if k != "SLURM_LOCALID"})


def test_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        slurm_place({k: v for k, v in STEP.items() if k != "MASTER_ADDR"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"WORLD_SIZE": "6"}, "6 processes were started, but cluster.nodes=2"),
        ({"GROUP_WORLD_SIZE": "4"}, "set cluster.nodes=4 cluster.gpus_per_node=2"),
        ({"GROUP_RANK": "0", "LOCAL_RANK": "2"}, "--ntasks-per-node=4 --distribution=block"),
    ],
)
def test_what_does_not_fit_the_cluster(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_place({**slurm_place(STEP), **changes}, CLUSTER)


RANK = """
import sys, time
from zpp_lab.train.launch.place import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to a child is Linux's")
def test_a_rank_in_a_session_of_its_own_ends_with_its_launcher() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "ready\n"
    launcher.kill()
    launcher.wait()
    for _ in range(500):
        if not Path(f"/proc/{rank}").exists() or "Z" in status(rank):
            return
        time.sleep(0.02)
    pytest.fail("the rank goes on without its launcher")


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("given", [None, "1"])
def test_nccl_registers_nothing_for_graphs_unless_it_is_told_to(given: str | None) -> None:
    environment = {} if given is None else {"NCCL_GRAPH_REGISTER": given}
    prepare_graphs(environment)
    assert environment["NCCL_GRAPH_REGISTER"] == (given or "0")
