"""Refuses a model that runs a unit's blocks otherwise than one after the other.

FSDP2 gathers a unit of several blocks before the first of them runs, frees it after the last, and
gathers it again when the gradient of the last one's output is there. A forward that leaves one of
them out, or a backward that does not begin at the last, would find weights that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


def grad_outputs(output: Any) -> list[Tensor]:
    """The tensors of a module's output that need a gradient."""
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]


def when_reached(outputs: Sequence[Tensor], hook: Callable[[Tensor], None]) -> None:
    """`hook` gets the first gradient of `outputs` that a backward has, once in each backward."""
    # One tensor's own hook does that; torch's for several takes the host thrice as long.
    if len(outputs) == 1:
        outputs[0].register_hook(hook)
    else:
        register_multi_grad_hook(outputs, hook, mode="any")


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class InTurn:
    """Watches the units of several modules; the last of `units` is the root, around all."""

    def __init__(self, units: Mapping[str, Sequence[nn.Module]]) -> None:
        """ValueErrors come out of the model's forward, or of its backward."""
        self.next: dict[str, int] = {}  # the block of each unit that may run now
        self.calls: dict[str, int] = {}
        self.came_back: set[tuple[str, int]] = set()  # calls whose last block backward has reached
        grouped = {name: modules for name, modules in units.items() if len(modules) > 1}
        for name, modules in grouped.items():
            for place, module in enumerate(modules):
                module.register_forward_pre_hook(partial(self._enter, name, place, len(modules)))
                module.register_forward_hook(partial(self._leave, name, place, len(modules)))
        if grouped:
            (root,) = list(units.values())[-1]
            root.register_forward_pre_hook(self._start)
            root.register_forward_hook(self._end)

    def _start(self, *_: Any) -> None:
        self.next, self.calls, self.came_back = {}, {}, set()

    def _enter(self, name: str, place: int, count: int, *_: Any) -> None:
        if in_backward():  # what a checkpoint around the block runs again
            return
        if self.next.get(name, 0) != place:
            wanted = self.next.get(name, 0)
            raise _refused(name, f"its block {place + 1} ran where block {wanted + 1} was next")
        self.next[name] = (place + 1) % count
        self.calls[name] = self.calls.get(name, 0) + (place == 0)

    def _leave(
        self, name: str, place: int, count: int, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        if outputs := grad_outputs(output):
            reached = partial(self._reached, name, self.calls[name], place == count - 1)
            when_reached(outputs, reached)

    def _reached(self, name: str, call: int, last: bool, grad: Tensor) -> None:
        if last:
            self.came_back.add((name, call))
        elif (name, call) not in self.came_back:
            raise _refused(name, "backward reached one of its blocks before the last one")

    def _end(self, *_: Any) -> None:
        for name, place in self.next.items():
            if place and not in_backward():
                raise _refused(name, f"a forward ran only {place} of its blocks")


def _refused(name: str, what: str) -> ValueError:
    return ValueError(
        f"unit {name}: {what}; blocks that travel together must run one after the other: use "
        "engine.blocks_per_unit=1 (of zpp_lab.shard: blocks_per_unit=1)"
    )
