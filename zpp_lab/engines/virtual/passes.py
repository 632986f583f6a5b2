"""Forward and backward of one rank after another, for all ranks of a virtual cluster.

On a GPU a rank's pass is hundreds of small kernels, and starting them one by one can take longer
than running them. So the pass is captured in a CUDA graph once and replayed for every rank. A
small model also leaves most of the GPU idle: then several lanes take the ranks in turn, each with
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
SMALL = 1e12  # floating-point operations of a pass below which lanes run side by side
LANES = 4


class Passes:
    """Runs `run` on batches in turn and hands out each one's loss, gradients and units."""

    def __init__(
        self, run: Pass, weights: Mapping[str, nn.Parameter], config: EngineConfig, lanes: int
    ) -> None:
        """`lanes`: side by side at most; 0 lets the size of a pass decide."""
        self.run, self.weights, self.config, self.count = run, weights, config, lanes
        self.device = next(iter(weights.values())).device
        self.lanes: list[Lane] = []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # streams and graphs belong to the current device

    def each(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Grads, PassUse]]:
        """Loss, gradients by name and units of each batch, in turn.

        Tensors may be overwritten when the next one is asked for. Parameters that got no gradient
        are left out.
        """
        if self.device.type != "cuda":
            yield from (self._eager(batch) for batch in batches)
        elif not self.config.graph:
            yield from (self._eager(batch) for batch in self._upload(batches))
        else:
            yield from self._replayed(self._upload(batches))

    def _eager(self, batch: Batch) -> tuple[Tensor, Grads, PassUse]:
        loss, use = self.run(*batch)
        return loss, take_grads(self.weights), use

    def _replayed(self, batches: list[Batch]) -> Iterator[tuple[Tensor, Grads, PassUse]]:
        if not self.lanes or self.lanes[0].shape != _shape(batches[0]):
            self._capture(batches[0])
        main = torch.cuda.current_stream()
        for lane in self.lanes:
            lane.stream.wait_stream(main)  # for the weights and the batches
        for i, batch in enumerate(batches):
            lane = self.lanes[i % len(self.lanes)]
            lane.replay(batch)
            main.wait_stream(lane.stream)
            yield lane.loss, lane.grads, lane.use
            lane.free.record(main)  # what reads the gradients has been started by now

    def _capture(self, batch: Batch) -> None:
        self.lanes = []  # gives the memory of other shapes back
        self.lanes = [Lane(self.run, self.weights, batch) for _ in range(self._lanes(batch))]

    def _lanes(self, batch: Batch) -> int:
        if self.count:
            return self.count
        work = 6 * sum(p.numel() for p in self.weights.values()) * batch[0].numel()
        return LANES if work < SMALL else 1

    def _upload(self, batches: Iterable[Batch]) -> list[Batch]:
        """All batches on the device, in one copy that the host does not wait for."""
        sides = zip(*batches, strict=True)
        each = [torch.stack(side).pin_memory().to(self.device, non_blocking=True) for side in sides]
        return list(zip(*each, strict=True))


class Lane:
    """One captured pass: replays it on batches of one shape, on a stream of its own."""

    def __init__(self, run: Pass, weights: Mapping[str, nn.Parameter], batch: Batch) -> None:
        """ValueError, naming the fix, when the model cannot be captured."""
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
    """Gradients by name; the parameters keep none."""
    grads = {name: p.grad for name, p in weights.items() if p.grad is not None}
    for p in weights.values():
        p.grad = None
    return grads


def _shape(batch: Batch) -> tuple[int, ...]:
    return tuple(chain(*(t.shape for t in batch)))
