"""A rank's masters under FSDP2: fp32 shards, or (train.masters=split) their high planes.

FSDP2 shards, gathers and gives gradients to the high planes, in bf16; the low ones lie next to
them, sharded alike. In turn no fp32 master and no fp32 gradient exists (`codecs/planes.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import torch
from torch import Tensor, nn

from zpp_lab.codecs.planes import joined, split
from zpp_lab.engines.fsdp.base import own_rows
from zpp_lab.engines.optim.shards import local, sharded_as
from zpp_lab.engines.optim.update import zeros


class Masters:
    """Made before FSDP2 takes the model; complete once `keep` was called. low: the low planes by
    name, DTensors; {} where masters are fp32."""

    def __init__(
        self,
        model: nn.Module,
        skip: Set[str],
        cut: bool,
        shards: int,
        part: int,
        far: Collection[str] = (),
    ) -> None:
        """`cut`: whether parameters, but those in `skip`, become high planes. `part`: which of the
        shards is this rank's. `far`: whose low planes lie in host memory."""
        self.cut, self.shards, self.part, self.far = cut, shards, part, far
        self.low: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}  # low planes of a model that is whole already
        for name, p in model.named_parameters():
            if not cut or name in skip:
                continue
            if p.is_meta:
                p.data = p.data.to(torch.bfloat16)
            else:
                p.data, self.whole[name] = split(p.detach())

    def put(self, name: str, p: Tensor, values: Tensor) -> None:
        """Set this rank's rows of a parameter to fp32 values."""
        own = local(p.detach())
        if not self.cut:
            own.copy_(values)
            return
        high, low = split(values.to(own.device, torch.float32))
        own.copy_(high)
        local(self._low(name, p)).copy_(low)

    def keep(self, parameters: Mapping[str, Tensor]) -> None:
        """Have the low planes of all parameters: those of a whole model's values, or as `put`, or
        zeros."""
        for name, p in parameters.items() if self.cut else ():
            own = local(self._low(name, p))
            if name in self.whole:
                rows = slice(*own_rows(tuple(p.shape), self.shards, self.part))
                own.copy_(self.whole[name][rows])
        self.whole = {}

    def _low(self, name: str, p: Tensor) -> Tensor:
        if name not in self.low:
            high = local(p.detach())
            own = zeros(tuple(high.shape), torch.int16, high.device, name in self.far)
            self.low[name] = sharded_as(p, own, p.shape)
        return self.low[name]


def master(p: Tensor, low: Tensor | None) -> Tensor:
    """Return this rank's rows of a master, fp32: the parameter's own, or new ones of two planes."""
    own = local(p.detach())
    return own if low is None else joined(own, local(low).to(own.device))
