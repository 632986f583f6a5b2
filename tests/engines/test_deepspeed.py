"""DeepSpeed's ZeRO-3 on the CPU beside our real engine: the same start, the same losses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.deepspeed_jobs import run_jobs
from tests.engines.fsdp_world import run_world

pytestmark = pytest.mark.slow  # its import alone takes ten seconds of a core


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = run_world(2, run_jobs)
    return found


@pytest.mark.parametrize("case", ["fp32", "bf16", "tied_checkpointed", "accumulated"])
def test_losses_are_those_of_zero3(answers: dict[str, Any], case: str) -> None:
    """Alike but for the order in which things are added up; bf16 rounds to 1/256."""
    theirs, ours, first = answers[case]
    assert theirs == pytest.approx(ours, rel=1e-3 if case == "bf16" else 1e-5)
    assert ours[0] != ours[-1]
    assert first == 0, "the first weights differ"


def test_norm_clipping_and_bytes(answers: dict[str, Any]) -> None:
    theirs, ours, sent = answers["norms"]
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert sent == {}


def test_evaluation_equals_ours(answers: dict[str, Any]) -> None:
    theirs, ours, master = answers["evaluation"]
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert theirs == master


def test_resume_repeats_the_run(answers: dict[str, Any]) -> None:
    whole, resumed = answers["resume"]
    assert whole == resumed


def test_state_goes_to_our_engine_and_back(answers: dict[str, Any]) -> None:
    continued, ours = answers["exchange"]
    assert continued == pytest.approx(ours, rel=1e-5)


def test_other_models_and_uneven_counts_are_refused(answers: dict[str, Any]) -> None:
    other, uneven, cpu = answers["refused"]
    assert "of another model" in other
    assert "a different number of times" in uneven
    assert "engine.device=cuda" in cpu
