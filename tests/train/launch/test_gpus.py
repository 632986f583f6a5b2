"""Ranks on GPUs: one each where there are enough, else nodes share them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.config.schema import ClusterConfig
from zpp_lab.train.launch import gpus
from zpp_lab.train.launch.gpus import Placement, place, visible_gpus


def shape(nodes: int, local: int) -> ClusterConfig:
    return ClusterConfig(nodes=nodes, gpus_per_node=local)


def nodes_of(placement: Placement) -> list[str]:
    return [",".join(placement.of_node(node)) for node in range(placement.cluster.nodes)]


def test_each_rank_has_a_gpu_where_there_are_enough() -> None:
    placed = place(shape(2, 2), list("45679"), share="mps")
    assert nodes_of(placed) == ["4,5", "6,7"]
    assert (placed.ranks_per_gpu, placed.share) == (1, None)  # nothing to share


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 50))
def test_a_nodes_ranks_never_share_and_every_gpu_has_as_many(
    nodes: int, local: int, found: int
) -> None:
    visible = [f"GPU-{i}" for i in range(max(found, local))]
    placed = place(shape(nodes, local), visible, share="time-slices")
    sat = [gpu for node in range(nodes) for gpu in placed.of_node(node)]
    assert all(len(set(placed.of_node(node))) == local for node in range(nodes))
    assert {sat.count(gpu) for gpu in placed.gpus} == {placed.ranks_per_gpu}


def test_too_few_gpus_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"2 × 2.*--share-gpus"):
        place(shape(2, 2), ["0", "1"])
    with pytest.raises(ValueError, match=r"engine\.share_gpus=mps"):
        place(shape(2, 2), ["0", "1"], option="engine.share_gpus=mps")
    for nodes in (1, 2):
        with pytest.raises(ValueError):
            place(shape(nodes, 2), ["0"], share="mps")
    with pytest.raises(ValueError, match=r"\b0\b"):
        place(shape(2, 1), [], share="mps")


def test_gpus_are_those_of_the_environment_or_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ("3", "GPU-ab")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
    monkeypatch.setattr(gpus, "_listed", lambda: listed)
    assert visible_gpus({}) == ("0", "1")


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_gpu_never_believe_to_share_memory(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peer memory stays inside a node, where every rank has a GPU of its own."""
    import torch

    from zpp_lab.collectives.peer import choose

    cluster = shape(2, 2)
    placed = place(cluster, ["0", "1"], share="mps")
    facts = []
    for other in range(4):
        node, local = divmod(other, 2)
        facts.append((f"zpp-node{node}", "cuda", f"uuid{placed.of_node(node)[local]}"))
    monkeypatch.setattr(choose.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(choose, "_reaches", lambda *_: True)
    device = torch.device("cuda", 0)
    found = {link: choose._problem(cluster, link, device, facts) for link in choose.LINKS}
    assert found["local"] == ""
    assert "on different hosts" in found["world"]
    assert "on different hosts" in found["across"]
