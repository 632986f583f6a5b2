"""Sums have the tree of their shape alone, however they are batched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zpp_lab.codecs.numerics import TOP, fold_sum, square_norms


def by_halves(x: list[float]) -> float:
    """The definition, in Python's floats."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        sums = [a + b for a, b in zip(x, x[half:], strict=False)]
        x = sums + x[len(sums) : half]
    return x[0] if x else 0.0


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 7, 64, 1001])
def test_fold_sum_adds_halves(numel: int) -> None:
    x = torch.randn(2, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(numel))
    before = x.clone()
    assert fold_sum(x).tolist() == [by_halves(row) for row in x.tolist()]
    assert torch.equal(x, before)


@pytest.mark.parametrize("numel", [0, 1, 5, TOP, TOP + 1, 5 * TOP + 3])
def test_square_norms_do_not_depend_on_stacks(numel: int) -> None:
    x = torch.randn(3, 2, numel, generator=torch.Generator().manual_seed(1))
    before, wanted = x.clone(), fold_sum(x.double().square())

    def bits(found: Tensor) -> list[list[float]]:
        assert found.dtype == torch.float64
        return found.tolist()

    assert bits(square_norms([x])) == bits(square_norms(x.split([1, 2]))) == bits(wanted)
    assert torch.equal(x, before)
