"""The rotation is the orthonormal Hadamard matrix, and its own inverse."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch

from zpp_lab.codecs import Rotation
from zpp_lab.codecs.hadamard import SIZES, signs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("random_signs", [False, True])
def test_equals_the_matrix(size: int, random_signs: bool) -> None:
    x = torch.randn(2, 3 * size, generator=torch.Generator().manual_seed(size))
    matrix = torch.from_numpy(scipy.linalg.hadamard(size)).double() / size**0.5
    groups = x.double().view(2, 3, size) * (signs(size) if random_signs else 1.0)
    expected = (groups @ matrix.T).view(2, -1).float()
    rotation = Rotation(size, random_signs)
    torch.testing.assert_close(rotation.forward(x), expected)
    torch.testing.assert_close(rotation.inverse(rotation.forward(x), 3 * size), x)


def test_partial_group_is_filled_with_zeros() -> None:
    rotation, x = Rotation(16), torch.randn(1, 21)
    assert rotation.padded(21) == 32
    torch.testing.assert_close(rotation.inverse(rotation.forward(x), 21), x)


def test_signs_are_balanced_and_fixed() -> None:
    assert signs(256).abs().eq(1).all()
    assert abs(float(signs(256).sum())) < 5 * 16  # five deviations of 256 fair signs
    assert torch.equal(signs(256)[:64], signs(64))
