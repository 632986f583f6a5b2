"""The real engine beyond parity: shapes of models, faults, FSDP2's insides."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.engines.fsdp_jobs import run_jobs
from tests.engines.fsdp_world import run_world
from zpp_lab.engines import fsdp_comm


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = run_world(4, run_jobs)
    return found


@pytest.mark.parametrize(
    "job",
    [
        "flat_gather",
        "no_prefetch",
        "offload",
        "llama",
        "llama_tied_checkpointed",
        "forward_only",
        "missing_gradient",
    ],
)
def test_equals_the_virtual_engine(answers: dict[str, Any], job: str) -> None:
    assert answers[job] == ""


def test_meta_model_starts_with_the_same_weights(answers: dict[str, Any]) -> None:
    assert answers["meta_start"] is True


def test_telemetry(answers: dict[str, Any]) -> None:
    largest, count = answers["telemetry"]
    assert largest < 1e-6
    assert count > 10


def test_zero3_leaves_fsdp2_untouched(answers: dict[str, Any]) -> None:
    installed, far, same_bytes = answers["untouched"]
    assert installed == 0
    assert far < 1e-5
    assert same_bytes


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
    assert "went past the recipe's collectives: " in refused
    assert "engine.allow_fallback=true" in refused
    assert allowed == "went on"


def test_what_we_lean_on_exists() -> None:
    """Everything non-public that fsdp_comm.py uses of this torch."""
    for place, names in fsdp_comm.LEANS_ON.items():
        for name in names:
            assert _exists(place, name), f"torch {torch.__version__} has no {place}.{name}"


def _exists(place: str, name: str) -> bool:
    if place == "operators":
        return any(hasattr(torch.ops.fsdp, n) for n in name.split("|"))
    internals = torch.distributed.fsdp._fully_shard
    if place == "FSDPState":
        made = internals._fsdp_state.FSDPState
        known = (*dir(made), *made.__init__.__code__.co_names)
        return any(n in known for n in name.split("|")) and hasattr(fully_shard, "state")
    if place == "FSDPParamGroup":
        return name in internals._fsdp_param_group.FSDPParamGroup.__init__.__code__.co_names
    if place == "FSDPParam":
        cut = inspect.unwrap(internals._fsdp_param.FSDPParam._init_sharded_param)
        return name in cut.__code__.co_names
    return hasattr(importlib.import_module(place), name)
