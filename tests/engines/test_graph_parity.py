"""Steps from a CUDA graph equal eager ones to the bit, and what keeps a graph from being used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.engines import graph_world
from tests.engines.fsdp_world import run_world
from tests.engines.graph_jobs import NAMES, hindered, on_cpu
from tests.two_ranks import answers_of, four_gpus, two_ranks

# drawn noise and secondary weights; differences and residuals over micro-steps
QUICK = ("stochastic_secondary", "residual_differences")
REST = tuple(name for name in NAMES if name not in QUICK)
WORLDS = {"quick": (2, 1, QUICK), "rest": (2, 1, REST), "2x2": (2, 2, NAMES)}


@pytest.fixture(scope="module")
def answers() -> Callable[[str], dict[str, str]]:
    """One start of ranks serves all cases of a world."""

    @cache
    def of_world(world: str) -> dict[str, str]:
        nodes, local, names = WORLDS[world]
        found: dict[str, str] = run_world(nodes * local, on_cpu, nodes, local, names)
        return found

    return of_world


CASES = [
    pytest.param(world, case, marks=[pytest.mark.slow] if world != "quick" else [])
    for world, (_, _, names) in WORLDS.items()
    for case in names
]


@pytest.mark.parametrize(("world", "case"), CASES)
def test_steps_from_a_graph_equal_eager_ones(
    answers: Callable[[str], dict[str, str]], world: str, case: str
) -> None:
    """Around telemetry, an evaluation, a checkpoint, another shape of batch, a phase, a resume."""
    assert answers(world)[case] == ""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answers: dict[str, Any] = run_world(2, hindered, 2, 1)
    return answers


def test_a_step_runs_again_where_one_rank_has_another_shape(found: dict[str, Any]) -> None:
    """No rank can tell the others before they replay, and the next one where it was launched."""
    assert found["one rank differs"] == [True, 4]  # the last in vain
    assert found["one rank differs ahead"] == [True, 6]  # the last two


def test_a_step_launched_behind_one_that_is_not_finite_leaves_nothing(
    found: dict[str, Any],
) -> None:
    same, replays = found["not finite"]
    assert same
    assert replays > 4


def test_batches_of_a_step_are_made_once(found: dict[str, Any]) -> None:
    """Also by steps before a graph is there, which launch nothing."""
    assert found["made once"] == [*[1] * 9, 7]


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


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """All answers of one start of so many ranks; with its output where it has failed."""

    @cache
    def of_ranks(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("graphs")
        return answers_of("tests.engines.graph_world", folder, 300, ranks)

    return of_ranks


ON_GPUS = [
    pytest.param(ranks, name, marks=mark)
    for ranks, mark in ((2, two_ranks), (4, four_gpus))
    for name in graph_world.names(ranks)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "name"), ON_GPUS)
def test_real_graphs(ranks: int, name: str, on_gpus: Callable[[int], dict[str, Any]]) -> None:
    """The same over NCCL and over peer memory, whatever fails in a capture."""
    found = on_gpus(ranks)
    assert name in found, found["output"]
    if name in graph_world.FAILS:
        assert found[name] == [[""] * ranks, True, 0, False]
    elif name in graph_world.ALONE or name.startswith("graphed"):
        same, replays = found[name]
        assert same in (True, [True] * ranks)
        assert replays >= 3
    else:
        assert found[name] == ""
