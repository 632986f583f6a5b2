"""Users' steps from a CUDA graph (`Sharded.graphed`); test_graph_parity.py has real ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fsdp_world import run_world
from tests.engines.graphed_jobs import RECIPES, on_cpu

SAYS = {
    "no GPU": "sharded.graphed",
    "shape": "sharded.graphed",
    "gradients": "zero_grad(set_to_none=True)",
    "waiting": "set_requires_gradient_sync",
    "no backward": "set_requires_gradient_sync",
    "updates": "sharded.graphed",
    "by hand": "sharded.graphed",
    "late": "sharded.graphed",
    "twice": "sharded.graphed",
}


QUICK = ("residual", "phases")
REST = tuple(name for name in RECIPES if name not in QUICK)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = run_world(2, on_cpu, "2x1", QUICK)
    return found


@pytest.fixture(scope="module")
def rest() -> dict[str, Any]:
    found: dict[str, Any] = run_world(2, on_cpu, "2x1", REST)
    return found


@pytest.mark.parametrize("name", QUICK)
def test_steps_from_a_graph_equal_eager_ones(name: str, answers: dict[str, Any]) -> None:
    """Of two micro-steps, with clipping, an evaluation and a phase between."""
    same, replays = answers[name]
    assert all(same)
    assert replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_so_they_do_with_other_recipes(name: str, rest: dict[str, Any]) -> None:
    same, replays = rest[name]
    assert all(same)
    assert replays >= 4


@pytest.mark.parametrize("case", SAYS)
def test_what_cannot_be_captured_is_refused_on_all_ranks(
    case: str, answers: dict[str, Any]
) -> None:
    for said in answers[case]:
        assert SAYS[case] in said
