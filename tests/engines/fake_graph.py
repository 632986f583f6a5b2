"""A CUDA graph for machines without a GPU. A replay runs the captured step once more, with the
captured inputs and noise, and writes its results where the capture has left them; everything else
that it does on the host is undone, since a graph does nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from zpp_lab.engines.fsdp.comm import managed
from zpp_lab.engines.fsdp.graph import StepGraph
from zpp_lab.engines.fsdp.wrap import Wrapped

Host = dict[str, Any]
NOWHERE = object()  # a stream, unlike None


class FakeGraph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.again: Callable[[], Any] | None = None

    def take(self, again: Callable[[], Any], made: Any, graph: StepGraph) -> None:
        """A step is captured: none of its results is there before the first replay."""
        self.again, self.wrapped, self.drawn = again, graph.wrapped, graph.wrapped.clock.drawn
        self.ledgers = graph.ledgers
        self.results = results(made, graph.wrapped)
        for tensor in self.results:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def replay(self) -> None:
        assert self.again is not None, "nothing was captured"
        clock = self.wrapped.clock
        before, clock.drawn = dict(vars(clock)), self.drawn
        sent = [dict(ledger.step) for ledger in self.ledgers]
        for p in parameters(self.wrapped):
            p.grad = None
        new = results(self.again(), self.wrapped)
        for mine, other in zip(self.results, new, strict=True):
            mine.copy_(other)
        vars(clock).update(before)
        for p in parameters(self.wrapped):
            p.grad = None
        for ledger, step in zip(self.ledgers, sent, strict=True):
            ledger.step = step
        for unit in self.wrapped.installed:
            unit.present.taken = []
        self.wrapped.memories.new, self.wrapped.memories.written = {}, set()
        for reduce in self.wrapped.reduces:
            if reduce.present.tell is not None:  # of a user's loop
                loop: Any = reduce.present.tell.__self__  # type: ignore[attr-defined]
                loop.taken, loop.digest, loop.reduced = [], sha256(), []


def parameters(wrapped: Wrapped) -> list[Any]:
    return [p.sharded_param for module in wrapped.by_name.values() for p in managed(module)]  # type: ignore[arg-type]


def results(made: Any, wrapped: Wrapped) -> list[Tensor]:
    """Every tensor that a step leaves."""
    found = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]
    grads = [p.grad for p in parameters(wrapped) if p.grad is not None]
    return [*found, *(g.to_local() for g in grads), *wrapped.memories.new.values()]


class FakeCuda:
    """What StepGraph asks of torch.cuda. `fails`: called in each capture, after the step."""

    def __init__(self) -> None:
        self.graph: FakeGraph | None = None  # that captures
        self.captures = 0
        self.fails: Callable[[], None] = lambda: None

    @contextmanager
    def capture(self, graph: FakeGraph, **_: Any) -> Iterator[None]:
        self.graph, self.captures = graph, self.captures + 1
        try:
            yield
            self.fails()
        finally:
            self.graph = None

    def recorded(self, init: Callable[..., None]) -> Callable[..., None]:
        """StepGraph's start, whose `run` is taken by the graph that captures."""

        def started(own: StepGraph, run: Callable[..., Any], *rest: Any, **more: Any) -> None:
            def taken(*given: Any) -> Any:
                made = run(*given)
                if self.graph is not None:
                    self.graph.take(lambda: run(*given), made, own)
                return made

            init(own, taken, *rest, **more)

        return started


@contextmanager
def faked() -> Iterator[FakeCuda]:
    """In the body engines on the CPU replay such graphs."""
    fake = FakeCuda()
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    names = {
        "CUDAGraph": FakeGraph,
        "graph": fake.capture,
        "graph_pool_handle": nothing,
        "current_stream": nothing,
        "default_stream": lambda: NOWHERE,
        "set_sync_debug_mode": nothing,
    }
    with ExitStack() as stack:
        for name, own in names.items():
            stack.enter_context(patch.object(torch.cuda, name, own))
        for user in ("engine", "loops.graphed"):
            name = f"zpp_lab.engines.fsdp.{user}.obstacle"
            stack.enter_context(patch(name, lambda *_, **__: ""))
        start = fake.recorded(StepGraph.__init__)
        stack.enter_context(patch.object(StepGraph, "__init__", start))
        yield fake
