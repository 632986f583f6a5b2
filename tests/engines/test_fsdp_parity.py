"""The real engine equals the virtual one to the bit: losses, norms, bytes, held-out losses,
weights, on every shape of cluster, for every kind of recipe."""

from __future__ import annotations

import pytest

from tests.engines.fsdp_parity import (
    CASES,
    SHIPPED,
    beyond_zero3,
    compare,
    configured,
    lacks_a_wire,
)
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import build_uneven
from zpp_lab.engines.build import build_plan

QUICK = {
    (1, 2): [
        *("zero3", "broken", "sham_w4", "w2", "w4", "w4_normal", "w6", "w8", "qsdp", "w8_then_w4"),
        *("g_raw_then_4", "g1_ef", "g2_ef", "topk_ef", "tagc_topk", "zero3_nudged"),
        *("zero3_bf16_reduce", "zeropp_last", "stochastic_secondary", "stochastic", "stage1"),
    ],
    (2, 2): [
        *("zeropp", "g8_4_hadamard", "zero3_reordered", "amsp_node", "w4_diff", "sdp4bit"),
        *("diff2_g82", "loco", "diff_g84h", "g2_normal_ef", "sham"),
        *("reversed_two_hops", "memory_second", "grid_memory"),
    ],
    (1, 3): ["asymmetric_bf16_scales", "backward_other_codec", "8bit_states", "bf16_states"],
    (2, 1): [
        *("host_states", "residual_rate", "weights3", "kept", "differences"),
        *("memory_8bit", "differences_whole"),
    ],
    (3, 2): ["kept_drawn", "differences_normal"],
}
# across two borders; real ranks go on with the other cases in `test_phases.py`
QUICK_PHASES = ["phases_hops", "phases_own_backward", "phases_raw_first", "phases_raw_last"]
CLUSTERS = [(1, 2), (2, 2), (1, 3), (3, 2), (2, 4), (1, 4), (4, 1)]
TABLE = sorted({*CASES, *SHIPPED})


def agree(cases: list[str], nodes: int, local: int, steps: int) -> None:
    found = run_world(nodes * local, compare, cases, nodes, local, steps)
    assert sorted(found) == sorted(cases)
    wrong = {case: text for case, text in found.items() if text}
    assert not wrong, wrong


def test_every_case_can_be_built_where_its_wires_are() -> None:
    """All of the table on several nodes of several ranks, and most of it on others."""
    for cluster in ((1, 4), (3, 2), (4, 1)):
        cases = [case for case in TABLE if not lacks_a_wire(case, *cluster)]
        assert cases == TABLE or min(cluster) == 1
        assert sum(map(beyond_zero3, cases)) >= 25
        for case in cases:
            build_plan(build_uneven(), configured(case, *cluster))


def test_recipes_in_phases() -> None:
    agree(QUICK_PHASES, 2, 2, steps=3)


def test_every_shipped_recipe_is_quick_on_one_cluster() -> None:
    assert {*SHIPPED} <= {case for cases in QUICK.values() for case in cases}


@pytest.mark.parametrize("cluster", QUICK, ids=lambda c: f"{c[0]}x{c[1]}")
def test_quick(cluster: tuple[int, int]) -> None:
    """Telemetry too, key by key and bit for bit: `compare` takes it in its second step."""
    agree(QUICK[cluster], *cluster, steps=2 if cluster in ((1, 2), (2, 2), (1, 3)) else 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c[0]}x{c[1]}")
def test_whole_table(cluster: tuple[int, int]) -> None:
    agree([c for c in TABLE if not lacks_a_wire(c, *cluster)], *cluster, steps=4)
