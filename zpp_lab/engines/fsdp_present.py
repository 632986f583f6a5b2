"""Which parameters of an FSDP2 unit got a gradient: what a reduction is told, without names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.collectives.reduce import Names
from zpp_lab.engines.fsdp_dtypes import GradDtypes


class Present:
    """Which parameters of a unit got a gradient since its last reduction.

    FSDP2 hands over gradients without names. A hook on each gathered parameter notes the
    parameter when autograd has accumulated its gradient. FSDP2 makes these parameters in the
    unit's first forward and keeps them.
    """

    def __init__(self, model: nn.Module, module: nn.Module, names: Names) -> None:
        """`module`: the unit's first; `names` in FSDP2's order, and in `model`."""
        self.names = names
        self.seen: list[Tensor] = []
        self.taken: list[Names] = []  # of each reduction since the step began
        self.hooked: dict[int, tuple[str, Tensor]] = {}  # by id, in FSDP2's order
        self.found: dict[Names, list[torch.Size]] = {}  # shapes
        self.dtypes = GradDtypes()
        self.places = {n: _place(model, n) for n in names}
        self.handle = module.register_forward_pre_hook(self._attach)

    @torch.compiler.disable
    def _attach(self, *_: Any) -> None:
        for name, (owner, attribute) in self.places.items():
            parameter = getattr(owner, attribute)
            if parameter.requires_grad:
                self.dtypes.attach(parameter)
                # a function of C: Python's would cost every gradient some microseconds
                parameter.register_post_accumulate_grad_hook(self.seen.append)
                self.hooked[id(parameter)] = name, parameter
        self.handle.remove()

    def take(self, grads: Sequence[Tensor]) -> tuple[Names, Sequence[Tensor]]:
        """The names of `grads`, in order, and these in their dtypes; start anew."""
        seen = Counter(map(id, self.seen))
        self.seen.clear()
        names = tuple([name for key, (name, _) in self.hooked.items() if key in seen])
        self.taken.append(names)
        if names not in self.found:
            shapes = {name: parameter.shape for name, parameter in self.hooked.values()}
            self.found[names] = [shapes[name] for name in names]
        own = [g.shape for g in grads]
        assert own == self.found[names], "FSDP2 reduces other gradients than seen"
        if self.dtypes.waiting:
            given = [parameter for key, (_, parameter) in self.hooked.items() if key in seen]
            grads = self.dtypes.own(given, grads, seen)
        return names, grads


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
