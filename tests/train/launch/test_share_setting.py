"""engine.share_gpus: ranks of `zpp-lab train` whose nodes share the host's GPUs."""

from __future__ import annotations

import pytest

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.train.launch.mps import PROGRAM
from zpp_lab.train.launch.place import see_own_gpus


def config(*words: str) -> Config:
    return compose(["engine=deepspeed", "cluster=2x2", *words])


SHARED = "engine.share_gpus=mps"


def seen(rank: int, asked: Config, **more: str) -> dict[str, str]:
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), **more}
    see_own_gpus(environment, asked)
    return environment


def test_ranks_of_a_node_have_gpus_of_their_own_and_nodes_are_hosts_to_nccl() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,5", PROGRAM: "/usr/bin/x", "NCCL_SOCKET_NTHREADS": "2"}
    every = [seen(rank, config(SHARED), **given) for rank in range(4)]
    assert {e["CUDA_VISIBLE_DEVICES"] for e in every} == {"4,5"}
    assert [e["LOCAL_RANK"] for e in every] == ["0", "1", "0", "1"]
    assert [e["NCCL_HOSTID"] for e in every] == ["zpp-node0"] * 2 + ["zpp-node1"] * 2
    assert (every[0]["NCCL_NET"], every[0]["NCCL_SOCKET_NTHREADS"]) == ("Socket", "2")


def test_nothing_is_shared_where_there_are_enough_or_nodes_are_real() -> None:
    enough = seen(3, config(SHARED), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (enough["CUDA_VISIBLE_DEVICES"], enough["LOCAL_RANK"]) == ("2,3", "1")  # its node's
    assert "NCCL_HOSTID" not in enough
    real = seen(3, config(SHARED), GROUP_WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="0,1")
    assert "NCCL_HOSTID" not in real
    assert "NCCL_HOSTID" not in seen(3, config(SHARED), CUDA_VISIBLE_DEVICES="")  # no GPU at all
    on_cpu = seen(3, config(SHARED, "engine.device=cpu"), CUDA_VISIBLE_DEVICES="")
    assert "NCCL_HOSTID" not in on_cpu


def test_mps_that_nobody_runs_is_an_error_and_not_time_slices() -> None:
    with pytest.raises(ValueError, match=r"engine\.share_gpus=time-slices"):
        seen(0, config(SHARED), CUDA_VISIBLE_DEVICES="0,1")
    sliced = seen(2, config("engine.share_gpus=time-slices"), CUDA_VISIBLE_DEVICES="0,1")
    assert sliced["NCCL_HOSTID"] == "zpp-node1"
