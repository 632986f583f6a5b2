"""Which units a forward and its backward ran, seen by hooks on their blocks.

A model may leave a module unused or take one branch of several. Such a unit has nothing gathered
and nothing reduced, so the plan must know. All ranks of a cluster must run the same units: the
transfers of one that does not would be waited for for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from zpp_lab.collectives.plan import PassUse


class Usage:
    """Counts the calls of each unit, by name, since `start`. The last of `units` is the root."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self.start()
        for name, module in units.items():
            module.register_forward_pre_hook(partial(self._entered, name))
            module.register_forward_hook(partial(self._left, name))

    def start(self) -> None:
        """A new forward begins."""
        self.forwards: Counter[str] = Counter()
        self.backwards: Counter[str] = Counter()
        self.order: list[str] = []  # of first calls
        self.needed: list[str] = []  # whose outputs need a gradient, in the order of calls

    def taken(self) -> PassUse:
        return PassUse(dict(self.forwards), dict(self.backwards))

    def _entered(self, name: str, *_: Any) -> None:
        if name not in self.forwards:
            self.order.append(name)
        self.forwards[name] += 1

    def _left(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if outputs and torch.is_grad_enabled():
            self.needed.append(name)
            when_reached(outputs, partial(self._came_back, name))

    def _came_back(self, name: str, grad: Tensor) -> None:
        self.backwards[name] += 1


def when_reached(outputs: Sequence[Tensor], hook: Callable[[Tensor], None]) -> None:
    """`hook` gets the first gradient of `outputs` that a backward has, once in each backward."""
    # One tensor's own hook does that; torch's for several takes the host thrice as long.
    if len(outputs) == 1:
        outputs[0].register_hook(hook)
    else:
        register_multi_grad_hook(outputs, hook, mode="any")
