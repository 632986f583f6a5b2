"""Where reduced gradients lie, without ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zpp_lab.engines.fsdp_landing import Landing

CPU = torch.device("cpu")


def writes(values: Tensor) -> Callable[[Tensor], None]:
    def run(out: Tensor) -> None:
        assert out.is_contiguous()
        out.copy_(values)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_holds_what_the_reduction_wrote(dtype: torch.dtype) -> None:
    landing = Landing(4, torch.float32)
    expected = landing.expected((6,), CPU)
    assert expected.shape == (6,)
    assert expected.untyped_storage().nbytes() == 4  # one element until then
    values = torch.randn(6).to(dtype)
    landing.land(expected, dtype, writes(values))
    assert expected.dtype == torch.float32
    assert torch.equal(expected, values.float())
    shard = torch.as_strided(expected, (2, 2), (2, 1), 2)  # as FSDP2 takes its parameters' shards
    assert torch.equal(shard, values.float()[2:].view(2, 2))


def test_every_second_allocation_is_the_output() -> None:
    landing = Landing(2, torch.float32)
    asked = [landing.is_output(n, CPU) for n in (8, 4, 8, 4, 6, 3)]
    assert asked == [False, True, False, True, False, True]


def test_an_input_as_large_as_the_output_before_is_an_input() -> None:
    landing = Landing(2, torch.float32)
    assert [landing.is_output(n, CPU) for n in (8, 4, 4, 2)] == [False, True, False, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gradients_lie_in_the_memory_of_the_stream_that_computes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    landing, beside = Landing(2, torch.float32), torch.cuda.Stream()
    sizes = 2**22, 2**21
    for _ in range(2):  # the second reuses the first's
        assert not landing.is_output(sizes[0], device)
        values = torch.randn(sizes[1], device=device, dtype=torch.bfloat16)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            assert landing.is_output(sizes[1], device)
            expected = landing.expected((sizes[1],), device)
            landing.land(expected, torch.bfloat16, writes(values))
        torch.cuda.current_stream().wait_stream(beside)
        assert torch.equal(expected, values.float())
        assert stream_of(expected) == torch.cuda.current_stream().cuda_stream
        assert stream_of(expected) != beside.cuda_stream
    del expected
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    again = torch.empty(sizes[1], device=device)
    assert torch.cuda.memory_reserved() == reserved, "what was freed is not given again"
    assert stream_of(again) == torch.cuda.current_stream().cuda_stream


def stream_of(tensor: Tensor) -> int:
    """Which of its streams torch's allocator keeps the tensor's memory for."""
    at = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return int(segment["stream"])
    raise AssertionError("memory that torch's allocator does not know")
