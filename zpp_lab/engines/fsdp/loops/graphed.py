"""A user's forward and backward from a CUDA graph (`zpp_lab.api.Sharded.graphed`).

The user hands over a function that does all micro-steps of a step. What it has done is read from
the loop's and the model's state after each eager call: which gradients were reduced, in which
micro-step, and what was sent. Two calls that are equal in all of that are followed by a capture.
What follows from the end of a step - new weights for other nodes, residuals, a phase, changed
masters - is done before the function runs, and so never inside of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from zpp_lab.collectives.plan import add_bytes
from zpp_lab.collectives.transport import Transport
from zpp_lab.config.residence import Residence
from zpp_lab.engines.base import Batch
from zpp_lab.engines.fsdp.comm import managed
from zpp_lab.engines.fsdp.graph import WARM_UP, StepGraph, obstacle
from zpp_lab.engines.fsdp.loops.loop import Loop

T = TypeVar("T")
EAGER = "call the function itself, without sharded.graphed"
CHANGES = (
    "sharded.graphed: the function has changed weights: let it do forward and backward alone, and "
    "step the optimizer after the call"
)


class Graphed(Generic[T]):
    """Calls `function`, from a CUDA graph once two calls were equal. ValueError where the ranks
    cannot have one."""

    def __init__(self, function: Callable[[Any], T], loop: Loop, transport: Transport) -> None:
        self.function, self.loop, self.wrapped = function, loop, loop.wrapped
        if loop.placing is not None:
            raise ValueError(
                "sharded.graphed does not go with zpp_lab.shard's place, masters, optimizer_state "
                f"and clip_by: leave these out, or {EAGER}"
            )
        if why_not := obstacle(loop.device, Residence(), static=True):
            raise ValueError(f"sharded.graphed: {why_not}: {EAGER}")
        if loop.group is not None:
            raise ValueError(
                "sharded.graphed needs a mesh of all ranks without other dimensions: shard over "
                f"all of them, or {EAGER}"
            )
        if "cpu:" not in str(dist.get_backend_config()):
            raise ValueError(
                "sharded.graphed: ranks compare batches on the host, but the process group has no "
                "backend for it: call zpp_lab.init() or init_process_group('cpu:gloo,cuda:nccl')"
            )
        if loop.graph is not None:
            raise ValueError("sharded.graphed was called before: hand over one function, once")
        if loop.entered:
            raise ValueError(
                "sharded.graphed after a forward: autograd has noted another stream by now; call "
                "it before the model first runs"
            )
        self.graph = loop.graph = StepGraph(self._run, self.wrapped, transport, "auto", "")
        self.graph.fix = EAGER
        self.tree: Any = None  # of a batch
        self.spec: tuple[Any, ...] = ()  # what a batch consists of
        self.like: Any = None  # what the last eager call has done
        self.installed = self.wrapped.installed  # of the phase and the trained parameters
        self.left: tuple[Any, ...] = ()  # what a captured call leaves in the loop

    def __call__(self, batch: Any) -> T:
        """Run the function; returns what it returns, detached."""
        loop, graph = self.loop, self.graph
        leaves, tree = tree_flatten(batch)
        self._check_grads()
        self._take(leaves, tree)
        self._begin()
        loop.inside = True
        try:
            if self.wrapped.installed is not self.installed:
                self.installed = self.wrapped.installed
                graph.restart()
            before = [dict(unit.ledger.step) for unit in self.wrapped.installed]
            for unit in self.wrapped.installed:
                unit.ledger.start_step()
            step = self.wrapped.clock.step
            tensors = [tuple(x.to(loop.device) for x in leaves if isinstance(x, Tensor))]
            if graph.ready and self.wrapped.memories.steady(step):
                made = graph.replay(step, tensors).made
                if graph.step is not None:
                    self._put_back()
            else:
                made = self._eager(step, tensors)
            for unit, sent in zip(self.wrapped.installed, before, strict=True):
                add_bytes(unit.ledger.step, sent)
        finally:
            loop.inside = False
        own: T = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, made)
        return own

    def drop(self) -> None:
        """Give the graph's memory back; to be called before torch.distributed ends."""
        self.graph.drop()

    def _begin(self) -> None:
        """End the last step and begin the next, outside of any graph."""
        loop = self.loop
        loop.arrived, self.wrapped.clock.grad = False, True
        loop.arrive(True)
        loop.arrived = False

    def _put_back(self) -> None:
        loop, (taken, digest, reduced, micro) = self.loop, self.left
        loop.taken, loop.digest, loop.reduced = [*taken], digest.copy(), [*reduced]
        self.wrapped.clock.micro = micro

    def _take(self, leaves: list[Any], tree: Any) -> None:
        """Compare a batch with the ones before. ValueError on all ranks where a rank has another
        one while the graph is there."""
        spec = (
            tree,
            *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves),
        )
        same = spec == self.spec
        if self.graph.ready and not all(self.loop.every(int(same))):
            raise ValueError(
                "sharded.graphed: a rank's batch has other shapes, dtypes or values that are no "
                f"tensors than the captured one: pad it, or on all ranks {EAGER}"
            )
        if not same:
            self.like = None
        self.spec, self.tree, self.leaves = spec, tree, leaves

    def _check_grads(self) -> None:
        for module in self.loop.modules:
            for p in managed(module):
                if p.sharded_param.grad is not None:
                    raise ValueError(
                        "sharded.graphed: gradients are there already, and a graph writes new "
                        "ones: call optimizer.zero_grad(set_to_none=True) before each call, and "
                        "do all micro-steps within one"
                    )
                waiting = getattr(p, "unsharded_accumulated_grad", None)
                if waiting is not None or _grad(p) is not None:
                    raise ValueError(
                        "sharded.graphed: a micro-step outside of it has left gradients: do all "
                        "micro-steps of a step within one call, the last of them with "
                        "model.set_requires_gradient_sync(True)"
                    )

    def _run(self, step: int, batches: Sequence[Batch]) -> Any:
        """The function's work, on the tensors that are given in place of the batch's."""
        loop, clock = self.loop, self.wrapped.clock
        loop.begun, loop.norm_at_end = False, None  # what a failed capture has left
        loop.begin()
        given = iter(batches[0])
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        made = self.function(tree_unflatten(leaves, self.tree))
        if loop.norm_at_end is not None:
            raise ValueError(CHANGES)
        if clock.drawn is not None:
            micro = clock.micro
            self.left = [*loop.taken], loop.digest.copy(), [*loop.reduced], micro
            if loop.digest.digest() != self.like[1]:
                raise ValueError("the function has reduced other gradients than in the call before")
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, made)

    def _eager(self, step: int, tensors: list[Batch]) -> Any:
        """Run it by itself, and note what it has done."""
        loop, seldom = self.loop, self.graph.seen < WARM_UP
        masters = loop.marks() if seldom else None
        made = self.graph.eager(step, tensors)
        sent = [dict(unit.ledger.step) for unit in self.wrapped.installed]
        if not any(p.sharded_param.grad is not None for m in loop.modules for p in managed(m)):
            raise ValueError(
                "sharded.graphed: the function has left no gradients: let it call backward(), for "
                "the last micro-step with model.set_requires_gradient_sync(True)"
            )
        facts = self.spec, loop.digest.digest(), self.wrapped.clock.micro, sent
        changed = masters is not None and bool(loop.marks() != masters)
        found = loop.every(2 * changed + (facts != self.like))  # ranks capture at the same time
        if any(each >= 2 for each in found):
            raise ValueError(CHANGES)
        if any(found):
            self.like = facts
        self.graph.micros = self.wrapped.clock.micro + 1
        self.graph.note(self.like)
        return made


def _grad(p: Any) -> Tensor | None:
    """What an FSDP2 parameter's gathered one holds."""
    whole = getattr(p, "unsharded_param", None)
    return None if whole is None else whole.grad
