"""The real engine beyond parity: shapes of models, faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fsdp_jobs import GATHERED, run_jobs, small_llama
from tests.engines.fsdp_world import run_world


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    llamas = {name: small_llama(name) for name in GATHERED}  # composing takes each rank a while
    llamas["qsdp, flat"] = small_llama("qsdp", "engine.gather=flat")
    found: dict[str, Any] = run_world(4, run_jobs, llamas)
    return found


@pytest.mark.parametrize(
    "job",
    [
        "flat_gather",
        "no_prefetch",
        "offload",
        "llama",
        "llama_tied_checkpointed",
        "llama_pairs_checkpointed",
        "forward_only",
        "missing_gradient",
    ],
)
def test_equals_the_virtual_engine(answers: dict[str, Any], job: str) -> None:
    assert answers[job] == ""


@pytest.mark.parametrize("recipe", GATHERED)
def test_auto_gathers_by_the_configured_cluster(answers: dict[str, Any], recipe: str) -> None:
    """On one host, too: plan, virtual and real ranks move the same bytes between nodes."""
    same, _ = answers[f"bytes of {recipe}"]
    assert same


def test_a_flat_gather_sends_more_between_nodes(answers: dict[str, Any]) -> None:
    (same, flat), (_, usual) = answers["bytes of qsdp, flat"], answers["bytes of qsdp"]
    assert same
    assert flat > usual


def test_meta_model_starts_with_the_same_weights(answers: dict[str, Any]) -> None:
    assert answers["meta_start"] is True


def test_zero3_leaves_fsdp2_untouched(answers: dict[str, Any]) -> None:
    installed, far, same_bytes, telemetry = answers["untouched"]
    assert installed == 0
    assert far < 1e-5
    assert same_bytes
    assert telemetry == [{}, {}]  # no codec, no error of one, in either engine


@pytest.mark.parametrize("job", ["nan_weight", "huge_weight"])
def test_non_finite_is_named_alike(answers: dict[str, Any], job: str) -> None:
    real, virtual = answers[job]
    assert real == virtual != "nothing"


def test_non_finite_without_collectives_of_ours(answers: dict[str, Any]) -> None:
    assert "the mean gradient of embed.weight is not finite" in answers["untouched_nan"]


def test_missing_bytes_name_the_unit(answers: dict[str, Any]) -> None:
    assert "unit " in answers["ledger_error"]
    assert "weights_forward" in answers["ledger_error"]


@pytest.mark.parametrize("job", ["unknown_gather", "unknown_reduce"])
def test_unknown_operator_is_no_silent_fallback(answers: dict[str, Any], job: str) -> None:
    refused, allowed = answers[job]
    assert "engine.allow_fallback=true" in refused
    assert "engine.allow_fallback=true" in refused
    assert allowed == "went on"
