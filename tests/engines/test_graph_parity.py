"""Steps from a CUDA graph equal eager ones to the bit, and what keeps a graph from being used."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines import graph_world
from tests.engines.fsdp_world import run_world
from tests.engines.graph_jobs import NAMES, hindered, on_cpu
from tests.two_ranks import environment, starting, two_ranks

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
    """No rank can tell the others before they replay, and the next one where it was launched."""
    assert found["one rank differs"] == [True, 4]  # the last in vain
    assert found["one rank differs ahead"] == [True, 6]  # the last two


def test_a_step_launched_behind_one_that_is_not_finite_leaves_nothing(
    found: dict[str, Any],
) -> None:
    same, replays = found["not finite"]
    assert same
    assert replays > 4


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
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All answers of one start of two ranks; with its output where it has failed."""
    answers = tmp_path_factory.mktemp("graphs") / "answers"
    command = starting("tests.engines.graph_world", str(answers))
    log = answers.with_suffix(".log")
    with log.open("wb") as file:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=environment(),
            stdout=file,
            stderr=file,
            timeout=300,
            check=False,
        )
    lines = answers.read_text().splitlines() if answers.exists() else []
    text = log.read_text(errors="replace") if done.returncode else ""
    return {"output": text[-6000:], **dict(json.loads(line) for line in lines)}


@pytest.mark.gpu
@two_ranks
@pytest.mark.parametrize("name", graph_world.names())
def test_real_graphs(name: str, on_gpus: dict[str, Any]) -> None:
    """The same over NCCL and over peer memory, whatever fails in a capture."""
    assert name in on_gpus, on_gpus["output"]
    if name in graph_world.FAILS:
        assert on_gpus[name] == [["", ""], True, 0, False]
    elif name in graph_world.ALONE or name.startswith("graphed"):
        same, replays = on_gpus[name]
        assert same in (True, [True, True])
        assert replays >= 3
    else:
        assert on_gpus[name] == ""
