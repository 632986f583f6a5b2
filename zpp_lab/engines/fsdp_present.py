"""Which parameters of an FSDP2 unit got a gradient: what a reduction is told, without names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.collectives.reduce import Names
from zpp_lab.engines.fsdp_dtypes import GradDtypes

# of a reduction: ids of who was seen, in their order, and who that is, in FSDP2's; their shapes
Found = tuple[tuple[int, ...], Names, list[torch.Size]]


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
        self.last: Found = (), (), []  # mostly the next one's too
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
        seen = tuple(map(id, self.seen))
        self.seen.clear()
        if seen != self.last[0]:  # the hooked parameters stay, and so do their ids
            given = self._given(seen)
            shapes = [parameter.shape for _, parameter in given]
            self.last = seen, tuple(name for name, _ in given), shapes
        _, names, shapes = self.last
        self.taken.append(names)
        assert [g.shape for g in grads] == shapes, "FSDP2 reduces other gradients than seen"
        if self.dtypes.waiting:
            own = [parameter for _, parameter in self._given(seen)]
            grads = self.dtypes.own(own, grads, Counter(seen))
        return names, grads

    def _given(self, seen: tuple[int, ...]) -> list[tuple[str, Tensor]]:
        return [each for key, each in self.hooked.items() if key in seen]


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
