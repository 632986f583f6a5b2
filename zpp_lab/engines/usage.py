"""Which units a forward and its backward ran, seen by hooks on their blocks.

A model may leave a module unused or take one branch of several. Such a unit has nothing gathered
and nothing reduced, so the plan must know. All ranks of a cluster must run the same units: the
transfers of one that does not would be waited for for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.collectives.plan import PassUse
from zpp_lab.engines.in_turn import InTurn, grad_outputs, when_reached


class Usage:
    """Counts the calls of each unit, by name, since `start`: from the first of its modules to the
    last. The last of `units` is the root. ValueError, while the model runs, where the modules of
    one do not run in turn."""

    def __init__(self, units: Mapping[str, Sequence[nn.Module]]) -> None:
        self.start()
        InTurn(units)
        for name, modules in units.items():
            modules[0].register_forward_pre_hook(partial(self._entered, name))
            modules[-1].register_forward_hook(partial(self._left, name))

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
        outputs = grad_outputs(output)
        if outputs and torch.is_grad_enabled():
            self.needed.append(name)
            when_reached(outputs, partial(self._came_back, name))

    def _came_back(self, name: str, grad: Tensor) -> None:
        self.backwards[name] += 1
