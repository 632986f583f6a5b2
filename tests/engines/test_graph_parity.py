"""Steps from a CUDA graph equal eager ones to the bit, and what keeps a graph from being used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fsdp_world import run_world
from tests.engines.graph_jobs import NAMES, on_cpu

WORLDS = [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda shape: "{}x{}".format(*shape))
def answers(request: Any) -> dict[str, Any]:
    nodes, local = request.param
    found: dict[str, Any] = run_world(nodes * local, on_cpu, nodes, local)
    return found


@pytest.mark.parametrize("case", NAMES)
def test_steps_from_a_graph_equal_eager_ones(answers: dict[str, Any], case: str) -> None:
    """Around telemetry, an evaluation, a checkpoint, another shape of batch, a phase, a resume."""
    assert answers[case] == ""
