"""The kernels for a gradient's sums of squares against `numerics.square_norms`: on the host their
operator, plans and trees, compiled for tensors on the CPU; where there is a GPU the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.host import load_operators, on_gpu, with_operators
from zpp_lab.codecs import kernels
from zpp_lab.codecs.kernels import backend, padded_rows
from zpp_lab.codecs.numerics import square_norms
from zpp_lab.engines import norm

# around every number of levels: of one thread, of the end, of both kernels
LENGTHS = [1, 2, 3, 255, 256, 257, 1023, 4097, 32767, 32768, 32769, 65537, 100_003, 299_999]
LENGTHS += [2**18 - 1, 2**18 + 1, 1_048_577]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Callable[..., None]]:
    """The operators for tensors on the CPU, by name."""
    load_operators("host_squares", tmp_path_factory.mktemp("host"))
    return lambda name: getattr(torch.ops.zpp_host, name).default  # type: ignore[no-any-return]


@pytest.fixture
def by_host(host: Callable[[str], Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "operator", host)


def gradients(
    lengths: list[int], rows: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Of all sizes, with zeros, from squares that vanish beside others to very large ones; the
    last row lacks some elements, or all."""
    made = torch.Generator().manual_seed(len(lengths) + rows)
    found = []
    for i, numel in enumerate(lengths):
        g = torch.randn(rows * numel, generator=made) * 10.0 ** (i % 7 - 3)
        g[:: i + 3] = 0
        found.append(g[: rows * numel - min(i, numel)].to(device, dtype))
    return found


def wanted(grads: list[Tensor], lengths: list[int], rows: int) -> Tensor:
    every = zip(grads, lengths, strict=True)
    return torch.cat([square_norms([padded_rows(g, rows, numel)[None]]) for g, numel in every])


def added(sums: Tensor) -> Tensor:
    total = torch.zeros_like(sums[0])
    for each in sums:
        total = total + each
    return total


def same(a: Tensor, b: Tensor) -> None:
    assert a.cpu().view(torch.int64).tolist() == b.cpu().view(torch.int64).tolist()


@with_operators
@pytest.mark.parametrize("numel", LENGTHS)
def test_one_rows_bits_on_the_host(numel: int, by_host: None) -> None:
    grads = gradients([numel], 1)
    same(norm.square_sums(grads, [numel], 1), wanted(grads, [numel], 1))


@with_operators
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_bits_on_the_host(rows: int, dtype: torch.dtype, by_host: None) -> None:
    """More than one launch takes, added in their order."""
    lengths = [33_000, 5, 1, 0, 512, 70_001] + 170 * [7, 40]
    grads = gradients(lengths, rows, dtype=dtype)
    assert len(lengths) * rows > 2 * norm.ROWS
    found, total = norm.square_sums(grads, lengths, rows), torch.ones(rows).double()
    same(found, wanted(grads, lengths, rows))
    norm.operator("add_in_order")(found, total)
    same(total, added(found))


@with_operators
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float, by_host: None) -> None:
    grads = gradients([40_000, 9], 2)
    grads[0][71] = bad
    found = norm.square_sums(grads, [40_000, 9], 2)
    assert found.isfinite().tolist() == [[False, True], [True, True]]


@with_operators
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"grads": [torch.zeros(4).double()]}, "grads: has the wrong dtype"),
        ({"grads": [torch.zeros(2, 4)[:, ::2]]}, "grads: must be contiguous"),
        ({"grads": [torch.zeros(9)]}, "one has 9 elements, more than 2 rows of 4"),
        ({"grads": []}, "grads: must not be empty"),
        ({"numels": [4, 4]}, "numels: need one for each of 1"),
        ({"numels": [-1]}, "numels: must be from 0"),
        ({"tops": torch.zeros(7).double()}, "tops: has 7 elements, needs 8"),
        ({"sums": torch.zeros(2)}, "sums: has the wrong dtype"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], problem: str, host: Callable[[str], Callable[..., None]]
) -> None:
    good = {
        "grads": [torch.ones(7)],
        "numels": [4],
        "rows": 2,
        "tops": torch.zeros(8).double(),
        "sums": torch.zeros(2).double(),
    }
    host("square_sums")(*good.values())
    assert good["sums"].tolist() == [4.0, 3.0]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=problem):
        host("square_sums")(*(good | change).values())


@with_operators
def test_sums_that_do_not_fit_are_refused(host: Callable[[str], Callable[..., None]]) -> None:
    sums, total = torch.ones(5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="sums: need a multiple of 2"):
        host("add_in_order")(sums, total)
    with pytest.raises(RuntimeError, match="total: has the wrong dtype"):
        host("add_in_order")(sums[:4], total.float())


def test_a_cpus_gradients_take_plain_torch() -> None:
    assert not norm.serves([torch.zeros(3)], [3])
    assert not norm.serves([], [])


@on_gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_bits(rows: int, dtype: torch.dtype) -> None:
    lengths = [*LENGTHS, 2**22 + 3, 0] + 170 * [7, 4096]
    grads = gradients(lengths, rows, "cuda", dtype)
    kernels.configure("cuda")
    try:
        assert norm.serves(grads, lengths)
        found = norm.square_sums(grads, lengths, rows)
        total = norm.in_order(found)
    finally:
        backend._state.backend = "auto"
    same(found, wanted(grads, lengths, rows))
    same(total, added(found))
