"""Where FSDP2's reduced gradients lie: in memory of the stream that computes.

torch's allocator keeps what a stream has freed for that stream alone. FSDP2 allocates gradients on
its reductions' stream, so they never come to lie where the activations were that the same backward
frees. A GPU then needs room for both, though they are never there whole together; where it has none
the allocator gives memory back and fetches it again all through the step, and waits for the device
each time (`num_alloc_retries`; experiments/baseline has what that costs at 32.5B).

FSDP2 asks a ReduceScatter of its own making for the output first and runs it afterwards. Here it
gets a tensor without memory, which is given some once the reduction has run. The memory is safe to
write: FSDP2 lets the reductions' stream wait for the computing one just before it asks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.utils import deterministic

from zpp_lab.collectives.transport import reduce_scatter


class Landing:
    """Of one unit on one of `world` ranks; `dtype`: its gradients' in the end, None where there
    are several or FSDP2 keeps the reduction's."""

    def __init__(self, world: int, dtype: torch.dtype | None) -> None:
        self.world, self.dtype = world, dtype
        self.computing: torch.cuda.Stream | None = None
        self._input: weakref.ref[Tensor] | None = None  # of the reduction under way

    def allocate(
        self,
        size: Sequence[Any],
        dtype: torch.dtype,
        device: torch.device,
        make_input: Callable[[], Tensor],
    ) -> Tensor:
        """What FSDP2 asks for twice a reduction: its input, on the stream that computes, then its
        output. An input that has died was of a step that failed before it asked for the second."""
        waiting = self._input() if self._input is not None else None
        self._input = None
        numel = math.prod(size)
        if waiting is not None and numel * self.world == waiting.numel():
            return self.expected(numel, dtype, device)
        if device.type == "cuda":
            self.computing = torch.cuda.current_stream(device)
        made = make_input()
        self._input = weakref.ref(made)
        return made

    def expected(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output [numel] of a reduction in `dtype`: one element's memory for all."""
        return torch.empty_strided((numel,), (0,), dtype=self.dtype or dtype, device=device)

    def land(self, expected: Tensor, dtype: torch.dtype, run: Callable[[Tensor], Any]) -> None:
        """Give `expected` memory with the gradient that `run` writes to a tensor [numel] of
        `dtype`, on the current stream."""
        if dtype == expected.dtype:
            gradient = self._room(expected)
            run(gradient)
        else:
            sums = torch.empty(expected.numel(), dtype=dtype, device=expected.device)
            run(sums)
            gradient = self._room(expected)
            gradient.copy_(sums)
        expected.set_(gradient)  # type: ignore[call-overload]

    def _room(self, expected: Tensor) -> Tensor:
        numel, dtype, device = expected.numel(), expected.dtype, expected.device
        if device.type != "cuda":
            return torch.empty(numel, dtype=dtype, device=device)
        with torch.cuda.stream(self.computing):
            made = torch.empty(numel, dtype=dtype, device=device)
        here = torch.cuda.current_stream(device)
        if self.computing is not None and _fills():
            here.wait_stream(self.computing)  # it has just been told to fill it with NaN
        # FSDP2 may let go of it while this stream still reads it: added to what a micro-step
        # before left, or on its way to host memory.
        made.record_stream(here)
        return made


def _fills() -> bool:
    """Whether torch writes to all new memory, which deterministic kernels ask for."""
    fill: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fill and torch.are_deterministic_algorithms_enabled()


class LandedReduce(ReduceScatter):
    """The reduce-scatter of one unit, FSDP2's own but for where its output lies."""

    def __init__(self, landing: Landing) -> None:
        self.landing = landing

    def make_input(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Whole gradients, a row a rank."""
        return torch.empty(*size, dtype=dtype, device=device)

    def run(self, rows: Tensor, out: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """The input → `out` [numel], this rank's, in the input's dtype."""
        reduce_scatter(out, rows, op=op, group=group)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.landing.allocate(
            size, dtype, device, lambda: self.make_input(size, dtype, device)
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.landing.land(
            output_tensor, input_tensor.dtype, lambda out: self.run(input_tensor, out, group, op)
        )
        return None
