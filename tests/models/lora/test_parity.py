"""Adapters on a stored base: the real engine equals the virtual one to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.fsdp_world import run_world
from tests.models.lora.jobs import CASES, parity, pretrained
from tests.models.lora.models import save_base, save_hf

BETWEEN_NODES = ["raw_bf16", "q2_zeropp", "one_block"]
INSIDE = ["q4_bf16", "stochastic", "backward_other_codec", "stage2"]


@pytest.mark.parametrize(
    ("names", "nodes", "local"),
    [
        pytest.param(INSIDE, 1, 2, id="1x2"),
        pytest.param(BETWEEN_NODES, 2, 1, id="2x1"),
        pytest.param([*CASES], 2, 2, id="2x2", marks=pytest.mark.slow),
    ],
)
def test_engines_agree_to_the_bit(names: list[str], nodes: int, local: int) -> None:
    """Losses, norms, bytes, held-out losses and adapters."""
    found = run_world(nodes * local, parity, names, nodes, local)
    assert found == dict.fromkeys(names, "")


def test_the_decoder_from_a_folder_agrees_to_the_bit(tmp_path: Path) -> None:
    bases = {
        "plain": replace(save_base(tmp_path / "plain"), checkpoint_activations=True),
        "tied": save_base(tmp_path / "tied", tied_head=True, loss_chunk=8),
    }
    assert run_world(2, pretrained, bases) == dict.fromkeys(bases, "")


@pytest.mark.slow
def test_models_of_transformers_agree_to_the_bit(tmp_path: Path) -> None:
    bases = {
        "qwen2": replace(save_hf(tmp_path / "qwen2", "qwen2"), checkpoint_activations=True),
        "gpt2": replace(save_hf(tmp_path / "gpt2", "gpt2"), loss_chunk=8),
    }
    assert run_world(2, pretrained, bases) == dict.fromkeys(bases, "")
