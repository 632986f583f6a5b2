"""Where FSDP2's reduced gradients lie: in memory of the stream that computes.

torch's allocator keeps what a stream has freed for that stream alone. FSDP2 allocates gradients on
its reductions' stream, so they never come to lie where the activations were that the same backward
frees. A GPU then needs room for both, though they are hardly there together; where it has none the
allocator gives memory back and fetches it again all through the step, and waits for the device
each time (`num_alloc_retries`; experiments/baseline has what that costs at 32.5B).

FSDP2 asks a ReduceScatter of its own making for the output first and runs it afterwards. Here it
gets a tensor without memory, which is given some once the reduction has run. The memory is safe to
write: FSDP2 lets the reductions' stream wait for the computing one just before it asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class Landing:
    """Of one unit on one of `world` ranks; `dtype`: its gradients', which is its weights'."""

    def __init__(self, world: int, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.computing: torch.cuda.Stream | None = None
        self._output_numel: int | None = None  # of the reduction whose input was allocated

    def is_output(self, numel: int, device: torch.device) -> bool:
        """Whether this allocation of a reduction is the second, its output's. The first is made on
        the stream that computes."""
        if numel == self._output_numel:
            self._output_numel = None
            return True
        self._output_numel = numel // self.world
        if device.type == "cuda":
            self.computing = torch.cuda.current_stream(device)
        return False

    def expected(self, size: Sequence[Any], device: torch.device) -> Tensor:
        """The output [numel] that a reduction will have: one element's memory for all."""
        return torch.empty_strided((math.prod(size),), (0,), dtype=self.dtype, device=device)

    def land(self, expected: Tensor, dtype: torch.dtype, run: Callable[[Tensor], Any]) -> None:
        """Give `expected` memory with the gradient that `run` writes to a tensor [numel] of
        `dtype`, on the current stream."""
        if dtype == self.dtype:
            gradient = self._room(expected)
            run(gradient)
        else:
            sums = torch.empty(expected.numel(), dtype=dtype, device=expected.device)
            run(sums)
            gradient = self._room(expected)
            gradient.copy_(sums)
        expected.set_(gradient)  # type: ignore[call-overload]

    def _room(self, expected: Tensor) -> Tensor:
        if expected.device.type != "cuda":
            return torch.empty(expected.numel(), dtype=self.dtype)
        with torch.cuda.stream(self.computing):
            made = torch.empty(expected.numel(), dtype=self.dtype, device=expected.device)
        # FSDP2 may let go of it while this stream still reads it: added to what a micro-step
        # before left, or on its way to host memory.
        made.record_stream(torch.cuda.current_stream(expected.device))
        return made


class LandedReduce(ReduceScatter):
    """FSDP2's own reduce-scatter of one unit but for where its output lies."""

    def __init__(self, landing: Landing) -> None:
        self.landing = landing

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.landing.is_output(math.prod(size), device):
            return self.landing.expected(size, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        def run(out: Tensor) -> None:
            dist.reduce_scatter_tensor(out, input_tensor, op=op, group=group)

        self.landing.land(output_tensor, input_tensor.dtype, run)
        return None
