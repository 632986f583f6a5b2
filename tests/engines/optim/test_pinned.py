"""Host memory of exact sizes: what a driver is asked for, and on a GPU copies."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from zpp_lab.engines.optim import host

GPU = torch.device("cuda")


class Driver:
    """Notes what is registered; `fails`: from which call on it refuses."""

    def __init__(self, fails: int = 1000) -> None:
        self.held: dict[int, int] = {}
        self.fails, self.calls = fails, 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls >= self.fails:
            return 2
        assert not any(a < start + size and start < a + n for a, n in self.held.items())
        self.held[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.held[start]
        return 0


@pytest.mark.parametrize("piece", [2**34, 2 * mmap.PAGESIZE])
@pytest.mark.parametrize("touched", [2**26, 3 * mmap.PAGESIZE])
def test_pages_are_pinned_in_pieces_and_freed(
    piece: int, touched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host, "PIECE", piece)
    monkeypatch.setattr(host, "TOUCHED", touched)
    made = host.zeros((5, 1025), torch.float32, GPU, True)
    assert made.shape == (5, 1025)
    assert not made.any()
    wanted = host.pinned_bytes(4 * 5 * 1025)
    assert wanted - mmap.PAGESIZE < made.nbytes <= wanted
    assert sum(driver.held.values()) == wanted
    assert min(driver.held) == made.data_ptr()
    assert all(size <= piece for size in driver.held.values())
    row = made[3].fill_(7)
    del made
    gc.collect()
    assert len(driver.held) > 0  # a view keeps the pages
    assert row.sum() == 7 * 1025
    del row
    gc.collect()
    assert driver.held == {}


def test_what_cannot_be_pinned_is_named_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host, "PIECE", mmap.PAGESIZE)
    with pytest.raises(MemoryError, match=r"train\.optimizer_place"):
        host.zeros((4, mmap.PAGESIZE), torch.uint8, GPU, True)
    gc.collect()
    assert driver.held == {}


def test_without_a_gpu_memory_is_plain_and_nothing_takes_none() -> None:
    assert host.zeros((3,), torch.bfloat16, torch.device("cpu"), True).dtype == torch.bfloat16
    assert host.zeros((0, 4), torch.uint8, GPU, True).shape == (0, 4)
    assert host.pinned_bytes(0) == 0
    assert host.pinned_bytes(1) == mmap.PAGESIZE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_from_and_to_it() -> None:
    there = host.zeros((3, 2**20 + 1), torch.float32, GPU, True)
    assert there.is_pinned()
    near = torch.randn(there.shape, device="cuda")
    there.copy_(near, non_blocking=True)
    back = there.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, near)
