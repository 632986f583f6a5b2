"""experiments/deepspeed: gradients that are compared."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engines.fsdp_world import run_world
from tests.experiments.scripts import loaded

pytestmark = pytest.mark.slow  # four ranks


def script(name: str) -> ModuleType:
    return loaded(f"experiments/deepspeed/{name}.py")


class Steep(nn.Module):
    """Its gradient is `x`, in the weight's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight.float() * x).sum()


def of_gradients() -> dict[str, Any]:
    """What rank 0 of four found; rank 3 alone has a steep gradient."""
    gradient, rank = script("gradient"), torch.distributed.get_rank()
    steep = torch.full((2, 4), 6.0 if rank == 3 else 0.5)
    found: dict[str, Any] = {}
    for name, dtype in gradient.DTYPES.items():
        grads, scale = gradient.local_grads(Steep(), dtype, (steep, steep))
        found[name] = [scale, float(grads["weight"].max()), str(grads["weight"].dtype)]
    found["first"] = gradient.first_scale(Steep(), (steep, steep))
    try:
        gradient.local_grads(Steep(), torch.float16, (steep * 1e4, steep))
    except ValueError as error:
        found["refused"] = str(error)
    one = torch.arange(1.0, 5.0)
    found["double"] = gradient.compared([(2 * one, one)])
    found["zero"] = gradient.compared([(0 * one, one)])
    bad = one.clone()
    bad[: rank % 2] = float("nan")
    found["bad"] = gradient.compared([(bad, one), (one, one)])
    found["emulated"] = emulated(gradient, rank)
    return found


def emulated(gradient: ModuleType, rank: int) -> list[float]:
    """Numbers that four bits hold: the reduction is exact but for the node's sum."""
    grad = torch.zeros(4, 8)
    grad[:, 0], grad[:, 1:4] = -8.0, 2.0 * (rank % 2)
    exact = gradient.exact_mean({"x": grad})["x"]
    got = gradient.emulated(grad)
    return [float((got - 2 * gradient.chunk(exact)).abs().max()), float(got.abs().max())]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answers: dict[str, Any] = run_world(4, of_gradients)
    return answers


def test_the_loss_scale_is_the_largest_at_which_no_sum_overflows(found: dict[str, Any]) -> None:
    """6 × 2^11 × 4 ranks = 49152; twice that is no fp16 number. Ranks agree on it."""
    assert found["fp16"] == [2.0**11, 0.5 * 2**11, "torch.float16"]
    assert found["bf16"] == [1.0, 0.5, "torch.bfloat16"]
    assert found["fp32"] == [1.0, 0.5, "torch.float32"]
    assert "not finite in torch.float16" in found["refused"]
    first = {key: found["first"][key] for key in ("loss_scale", "not_finite", "norm_ratio")}
    assert first == {"loss_scale": 65536.0, "not_finite": 8, "norm_ratio": None}


def test_what_is_not_finite_is_counted_and_not_a_number_in_a_file(found: dict[str, Any]) -> None:
    assert found["double"] == {"norm_ratio": 2.0, "cosine": 1.0}
    assert found["zero"] == {"norm_ratio": 0.0, "cosine": None}
    assert found["bad"] == {"norm_ratio": None, "cosine": None, "not_finite": 2}


def test_the_emulation_leaves_a_nodes_sum_undivided(found: dict[str, Any]) -> None:
    assert found["emulated"] == [0.0, 16.0]
