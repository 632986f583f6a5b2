"""Weights for generation: both engines, both gathers, their bytes and what they refuse."""

from __future__ import annotations

import pytest

from tests.engines import rollout_jobs as jobs
from tests.engines.fsdp_world import run_world

CLUSTERS = {
    (2, 2): sorted(jobs.CASES),
    (1, 3): sorted(jobs.ONE_NODE),
    (3, 1): sorted({*jobs.LONE_RANKS, *jobs.LONE_KEPT}),
}


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c[0]}x{c[1]}")
def test_engines_and_gathers_agree_to_the_bit(cluster: tuple[int, int]) -> None:
    nodes, local = cluster
    found = run_world(nodes * local, jobs.compare, CLUSTERS[cluster], nodes, local)
    assert {case: text for case, text in found.items() if text} == {}
    assert sorted(found) == CLUSTERS[cluster]
