"""Steps from a CUDA graph equal eager ones to the bit, and what keeps a graph from being used."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fsdp_world import run_world
from tests.engines.graph_jobs import NAMES, hindered, on_cpu

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


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answers: dict[str, Any] = run_world(2, hindered, 2, 1)
    return answers


def test_a_step_runs_again_where_one_rank_has_another_shape(found: dict[str, Any]) -> None:
    """No rank can tell the others before they replay."""
    same, replays = found["one rank differs"]
    assert same
    assert replays == 4  # the last in vain


@pytest.mark.parametrize("at", ["forward", "backward", "end"])
def test_all_ranks_stay_eager_where_one_cannot_capture(at: str, found: dict[str, Any]) -> None:
    """FSDP2 was in the middle of a step, or at its end."""
    assert found[at] == [["", ""], True, 0, False]


@pytest.mark.parametrize("case", ["wanted", "transfer"])
def test_a_failed_capture_ends_all_ranks_where_it_must(case: str, found: dict[str, Any]) -> None:
    said, _, replays, _ = found[case]
    assert replays == 0
    for text in said:
        assert "engine.graph=false" in text


def test_a_graph_that_is_given_up_soon_is_not_captured(found: dict[str, Any]) -> None:
    """A capture takes the host longer than an eager step."""
    assert found["often 2"] == found["often 3"] == [0, 0]
    assert found["often 4"] == [7, 3]
