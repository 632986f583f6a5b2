"""Forward and backward of one rank after another, for all ranks of a virtual cluster.

On a GPU a rank's pass is hundreds of small kernels, and starting them one by one can take longer
than running them. So the pass is captured in a CUDA graph once and replayed for every rank. A
small model also leaves most of the GPU idle: then several streams take the ranks in turn, each with
a graph, a stream, inputs, activations and gradients of its own. A pass runs the same kernels in
the same order either way, and gradients are handed out rank by rank, so no bit depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from zpp_lab.collectives.plan import PassUse
from zpp_lab.config.schema import EngineConfig
from zpp_lab.engines.base import Batch

Grads = dict[str, Tensor]
# One rank's batch → its loss (fp32 scalar, detached) and the units that ran; gradients are left
# on the weights. What is captured runs the same units at every replay.
Pass = Callable[..., tuple[Tensor, PassUse]]

WARM_UP = 2  # passes before a capture: libraries start, tables are made
SMALL = 1e12  # floating-point operations of a pass below which streams run side by side
STREAMS = 4


class Passes:
    """Runs `run` on batches in turn and hands out each one's loss, gradients and units."""

    def __init__(
        self, run: Pass, weights: Mapping[str, nn.Parameter], config: EngineConfig, lanes: int
    ) -> None:
        """Take a pass. `lanes`: streams that run at most at a time; 0: by the size of a pass."""
        self.run, self.weights, self.config, self.count = run, weights, config, lanes
        self.device = next(iter(weights.values())).device
        self.captured: list[Captured] = []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # streams and graphs belong to the current device

    def each(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Grads, PassUse]]:
        """Yield loss, gradients by name and units of each batch, in turn. Tensors may be
        overwritten when the next one is asked for. Parameters without a gradient are left out."""
        if self.device.type != "cuda":
            yield from (self.eager(batch) for batch in batches)
        elif not self.config.graph:
            yield from (self.eager(batch) for batch in self._upload(batches))
        else:
            yield from self._replayed(self._upload(batches))

    def eager(self, batch: Batch) -> tuple[Tensor, Grads, PassUse]:
        """Run the pass on a batch on the device; returns what `each` yields."""
        loss, use = self.run(*batch)
        return loss, take_grads(self.weights), use

    def _replayed(self, batches: list[Batch]) -> Iterator[tuple[Tensor, Grads, PassUse]]:
        if not self.captured or self.captured[0].shape != _shape(batches[0]):
            self._capture(batches[0])
        main = torch.cuda.current_stream()
        for one in self.captured:
            one.stream.wait_stream(main)  # for the weights and the batches
        for i, batch in enumerate(batches):
            one = self.captured[i % len(self.captured)]
            one.replay(batch)
            main.wait_stream(one.stream)
            yield one.loss, one.grads, one.use
            one.free.record(main)  # what reads the gradients has been started by now

    def _capture(self, batch: Batch) -> None:
        self.captured = []  # gives the memory of other shapes back
        work = 6 * sum(p.numel() for p in self.weights.values()) * batch[0].numel()
        count = self.count or (STREAMS if work < SMALL else 1)
        self.captured = [Captured(self.run, self.weights, batch) for _ in range(count)]

    def _upload(self, batches: Iterable[Batch]) -> list[Batch]:
        """Copy all batches to the device at once, without waiting."""
        sides = zip(*batches, strict=True)
        each = [torch.stack(side).pin_memory().to(self.device, non_blocking=True) for side in sides]
        return list(zip(*each, strict=True))


class Captured:
    """One captured pass: replays it on batches of one shape, on a stream of its own."""

    def __init__(self, run: Pass, weights: Mapping[str, nn.Parameter], batch: Batch) -> None:
        """Capture the pass; ValueError, naming the fix, when that is impossible."""
        self.shape = _shape(batch)
        self.inputs = tuple(t.clone() for t in batch)
        self.stream, self.free = torch.cuda.Stream(), torch.cuda.Event()
        self.graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                run(*self.inputs)
                take_grads(weights)
        try:
            # a stream of its own also means a cuBLAS workspace of its own
            with torch.cuda.graph(
                self.graph, stream=self.stream, capture_error_mode="thread_local"
            ):
                self.loss, self.use = run(*self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"this model's pass cannot be captured in a CUDA graph ({error}): "
                "set engine.graph=false"
            ) from error
        self.grads = take_grads(weights)

    def replay(self, batch: Batch) -> None:
        """Start the pass once the gradients of the former one are no longer needed."""
        self.stream.wait_event(self.free)
        with torch.cuda.stream(self.stream):
            for mine, new in zip(self.inputs, batch, strict=True):
                mine.copy_(new)
            self.graph.replay()


def take_grads(weights: Mapping[str, nn.Parameter]) -> Grads:
    """Return gradients by name, and remove them from the parameters."""
    grads = {name: p.grad for name, p in weights.items() if p.grad is not None}
    for p in weights.values():
        p.grad = None
    return grads


def _shape(batch: Batch) -> tuple[int, ...]:
    return tuple(chain(*(t.shape for t in batch)))
