"""Reduced gradients: where they lie, and when their squares are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import test_branches as branches
from tests.engines.fsdp_jobs import altered, real
from tests.engines.fsdp_world import run_world
from tests.engines.test_branches import Branches, through
from tests.engines.uneven import batch
from zpp_lab.engines.fsdp.gradients import Landing
from zpp_lab.engines.norm import SquareSums, squares

CPU = torch.device("cpu")


def writes(values: Tensor) -> Callable[[Tensor], None]:
    def run(out: Tensor) -> None:
        assert out.is_contiguous()
        out.copy_(values)

    return run


def asked(landing: Landing, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As FSDP2 asks for a reduction's input or output."""
    return landing.allocate((numel,), dtype, CPU, lambda: torch.zeros(numel, dtype=dtype))


def has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_holds_what_the_reduction_wrote(dtype: torch.dtype) -> None:
    landing = Landing(4, torch.float32)
    expected = landing.expected(6, dtype, CPU)
    assert expected.shape == (6,)
    assert expected.untyped_storage().nbytes() == 4  # one element until then
    values = torch.randn(6).to(dtype)
    landing.land(expected, dtype, writes(values))()
    assert expected.dtype == torch.float32
    assert torch.equal(expected, values.float())
    shard = torch.as_strided(expected, (2, 2), (2, 1), 2)  # as FSDP2 takes its parameters' shards
    assert torch.equal(shard, values.float()[2:].view(2, 2))


def test_a_step_that_failed_between_the_two_is_forgotten() -> None:
    landing = Landing(2, torch.float32)
    asked(landing, 8)  # and no output: the step has ended, and the input with it
    first = asked(landing, 4)
    second = asked(landing, 2)
    assert has_memory(first)
    assert not has_memory(second)


def test_an_input_that_found_no_memory_is_forgotten() -> None:
    def fails() -> Tensor:
        raise torch.OutOfMemoryError("full")

    landing = Landing(2, torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        landing.allocate((8,), torch.float32, CPU, fails)
    first = asked(landing, 4)
    assert has_memory(first)
    assert not has_memory(asked(landing, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gradients_lie_in_the_memory_of_the_stream_that_computes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    landing, beside = Landing(2, torch.float32), torch.cuda.Stream()
    sizes = 2**22, 2**21

    def allocate(numel: int) -> Tensor:
        def make_input() -> Tensor:
            return torch.empty(numel, device=device, dtype=torch.bfloat16)

        return landing.allocate((numel,), torch.bfloat16, device, make_input)

    for _ in range(2):  # the second reuses the first's
        rows = allocate(sizes[0])
        assert rows.dtype == torch.bfloat16
        # drawn on the CPU: a capture that failed in another test leaves the GPU's generator closed
        values = torch.randn(sizes[1], dtype=torch.bfloat16).to(device)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            expected = allocate(sizes[1])
            assert expected.untyped_storage().nbytes() == 4
            landing.land(expected, torch.bfloat16, writes(values))()
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_torchs_filling_of_new_memory_comes_before_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deterministic kernels have it on; it runs on the stream that computes, here a late one."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    device = torch.device("cuda", torch.cuda.current_device())
    landing, beside, numel = Landing(2, torch.float32), torch.cuda.Stream(), 2**21
    values = torch.randn(numel).to(device)
    rows = landing.allocate(
        (2 * numel,), torch.float32, device, lambda: torch.empty(2 * numel, device=device)
    )
    torch.use_deterministic_algorithms(True)
    try:
        beside.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(10**8)
        with torch.cuda.stream(beside):
            expected = landing.allocate((numel,), torch.float32, device, lambda: rows)
            landing.land(expected, torch.float32, writes(values))()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    assert torch.equal(expected, values)


def stream_of(tensor: Tensor) -> int:
    """Which of its streams torch's allocator keeps the tensor's memory for."""
    at = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return int(segment["stream"])
    raise AssertionError("memory that torch's allocator does not know")


# ---------------------------------------------------------------------- squares


def first_micro_alone(model: Branches, x: Tensor) -> Tensor:
    """Block 1 runs in every other pass."""
    model.passes = getattr(model, "passes", 0) + 1
    return through(model, x, 0, *[1] * (model.passes % 2), 2, 3)


# name → case of the parity table, path, frozen blocks
SUMMED: dict[str, tuple[str, branches.Path, int]] = {
    "every": ("zeropp_every", branches.every, 0),
    "last": ("zeropp_last", branches.every, 0),
    "phases": ("phases_hops", branches.every, 0),
    "kept": ("kept", branches.every, 0),
    "kept_split": ("split_kept", branches.every, 0),
    "frozen": ("zero3_bf16", branches.every, 2),
    "unused": ("zeropp", branches.unused, 0),
    "twice": ("zeropp", branches.twice, 0),
    "mixture": ("zeropp_every", branches.mixture, 0),
    "first_micro": ("zeropp_every", first_micro_alone, 0),
    "untouched": ("zero3", branches.every, 0),
}


def summed(nodes: int, names: list[str]) -> dict[str, list[Any]]:
    """Of each step: whether the sum's bits are those of all gradients in one call, and whose
    squares only the step's end has summed."""
    found: dict[str, list[Any]] = {}
    for name in names:
        case, path, frozen = SUMMED[name]
        config = altered(case, nodes, 1, ordered=name != "untouched")
        engine = real(config, Branches(path, frozen))
        taken, own = found.setdefault(name, []), engine.resident.squares

        def both(
            grads: Mapping[str, Tensor],
            known: frozenset[str],
            engine: Any = engine,
            taken: list[Any] = taken,
            own: Callable[..., Tensor] = own,
        ) -> Tensor:
            total = own(grads, known)
            wanted = squares(grads, engine.plan, engine.device)
            taken.append([torch.equal(total, wanted), sorted(grads.keys() - known)])
            return total

        engine.resident.squares = both  # type: ignore[method-assign]
        for step in range(3):
            engine.model.step = step
            engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_squares_are_summed_behind_the_passes(world: int) -> None:
    names = list(SUMMED) if world > 1 else ["untouched"]
    assert run_world(world, summed, world, names) == {name: [[True, []]] * 3 for name in names}


def test_sums_are_those_of_one_call_whatever_is_taken_together() -> None:
    lengths = {"a": 70_001, "b": 3, "c": 0, "d": 70_001, "e": 5, "f": 40_000}
    parameters = [SimpleNamespace(name=n, shard_numel=k) for n, k in lengths.items()]
    plan: Any = SimpleNamespace(
        units=[SimpleNamespace(unit=SimpleNamespace(parameters=parameters))]
    )
    made = torch.Generator().manual_seed(0)
    grads = {n: torch.randn(k, generator=made) for n, k in lengths.items() if n != "e"}
    sums = SquareSums(plan, lengths.keys() - {"c"}, CPU)
    for calls in (["df", "a", "b", "ab"], ["fa"]):  # some again; a step with fewer gradients
        sums.start()
        for together in calls:
            sums.take({n: grads[n] for n in together})
        assert sums.known == set("".join(calls))
        own = {n: grads[n] for n in sums.known}
        assert torch.equal(sums.total(), squares(own, plan, CPU))
    beside = SquareSums(plan, lengths, torch.device("meta"))  # gradients lie in host memory
    for together in ("ab", "fa"):  # neighbours in the plan, and others
        beside.take({n: grads[n] for n in together})
