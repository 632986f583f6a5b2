"""Adapters on a stored base: the real engine equals the virtual one to the bit."""

from __future__ import annotations

import pytest

from tests.engines.fsdp_world import run_world
from tests.lora.jobs import CASES, parity


@pytest.mark.parametrize(
    ("nodes", "local"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_engines_agree_to_the_bit(nodes: int, local: int) -> None:
    """Losses, norms, bytes, held-out losses and adapters."""
    assert run_world(nodes * local, parity, nodes, local) == dict.fromkeys(CASES, "")
