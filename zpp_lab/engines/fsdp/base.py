"""A frozen base under FSDP2, which shall gather it, place it and free it, but not keep it.

FSDP2 wants a shard of every parameter that it gathers. What it gets for a parameter of the base is
one NaN that claims to be the whole shard (all its strides are 0), in the dtype that is gathered, so
that FSDP2 never casts it. The base itself is this rank's payload row, held by the unit's `Gather`,
and travels with the adapters in one shipment. Should FSDP2 ever read the shard itself, the loss
turns NaN and the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.transport import Group, all_gather
from zpp_lab.engines.frozen import Marks, decode_shards, encode_shards, mark
from zpp_lab.engines.fsdp.comm import Installed, managed
from zpp_lab.engines.optim import host

Rows = Callable[[str, int, int], Tensor]  # parameter, first row, last + 1 → fp32


def set_aside(
    model: nn.Module, wrapped: Iterable[nn.Module], names: Set[str], device: torch.device
) -> None:
    """Put a shard without memory in the place of each parameter of the base that is wrapped."""
    if not names:
        return
    known = {id(p): n for n, p in model.named_parameters()}
    for module in wrapped:
        for p in managed(module):
            if known[id(p.sharded_param)] in names:
                _without_memory(p, device)


def _without_memory(p: Any, device: torch.device, trained: bool = False) -> None:
    """`p`: FSDP2's parameter object. Both tensors share one storage, which tells FSDP2 at its
    lazy start that nothing was exchanged and nothing needs padding."""
    nan = torch.full((), torch.nan, dtype=p.sharded_param.dtype, device=device)
    p._sharded_param_data = nan.expand(p.padded_sharded_param_size.numel())
    shard = p.to_sharded_dtensor(nan.expand(p.sharded_size))
    p.sharded_param = nn.Parameter(shard, requires_grad=trained)
    p._setattr_on_modules(p.sharded_param)


def place_in_whole(p: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Let the shard of a tensor part, and its gradient, be DTensors of the whole parameter, which
    `mesh` and `placements` cut; FSDP2 itself goes on with the part. `p`: its parameter object."""
    old = p.sharded_param
    shape = [
        n * mesh.size(0) if placements[0] == Shard(dim) else n for dim, n in enumerate(old.shape)
    ]
    stride = torch.empty(shape, device="meta").stride()
    own = old.detach().to_local()
    made = DTensor.from_local(
        own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    p._sharding_spec = made._spec
    p.sharded_param = nn.Parameter(p.to_sharded_dtensor(own), requires_grad=old.requires_grad)
    p._setattr_on_modules(p.sharded_param)


def move_out(p: Any, device: torch.device) -> Tensor:
    """Let host memory have a shard; returns it with its padding. `p`: FSDP2's parameter object,
    whose parameter stays one of `device`, as its gradients lie there."""
    before, trained = p._sharded_param_data, p.sharded_param.requires_grad
    out = host.zeros(p.padded_sharded_param_size, before.dtype, device, True)
    if not before.is_meta:
        out.view(-1).copy_(before)
    _without_memory(p, device, trained)
    p._sharded_param_data = out.view(-1)
    p.sharded_param._local_tensor = out[: p.sharded_size[0]]
    return out


class FrozenBase:
    """A rank's part of the base: made before FSDP2 takes the model, loaded after it."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        if plan.stored and plan.recipe.cluster.world == 1:
            raise ValueError(
                "model.lora with engine=fsdp needs two ranks or more: FSDP2 gathers nothing for "
                "one; use engine=virtual, or a larger cluster"
            )
        self.names, self.shards = plan.stored, plan.recipe.shards
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n in self.names}
        # a model that is whole already: its values, before they are set aside
        self.whole = {
            n: p.detach() for n, p in model.named_parameters() if n in self.names and not p.is_meta
        }
        self.marks: Marks = {}

    def load(
        self,
        units: Sequence[Installed],
        start: Rows | None,
        part: int,
        device: torch.device,
        agreed: Callable[[Callable[[], Marks]], Marks],
        group: Group = None,
    ) -> None:
        """Encode this rank's rows, shard `part` of each parameter, one parameter at a time.

        start: of a model that was on the meta device. agreed: runs a job and raises on all ranks
        where it fails on one. ValueError, naming it, for a weight that is not finite.
        """
        own = agreed(lambda: self._encode(units, start, part, device))
        self.whole = {}
        self.marks = added(own, device, group)

    def _encode(
        self, units: Sequence[Installed], start: Rows | None, part: int, device: torch.device
    ) -> Marks:
        """Keep this rank's encoded rows at their units; returns their marks."""
        own: Marks = {}
        for unit in units:
            stored = unit.plan.stored
            row = torch.empty(1, stored.nbytes, dtype=torch.uint8, device=device)
            for segment in stored.segments:
                name = segment.name
                first, last = own_rows(self.shapes[name], self.shards, part)
                rows = start(name, first, last) if start else self.whole[name][first:last]
                rows = rows.to(device)
                own[name] = mark(rows, first, self.shapes[name])
                payload = encode_shards(segment, rows, 1)
                decode_shards(segment, payload, torch.empty(rows.shape, device=device))
                row[:, segment.offset : segment.offset + segment.nbytes] = payload
            unit.gather.base = row
        return own


def own_rows(shape: tuple[int, ...], shards: int, part: int) -> tuple[int, int]:
    """FSDP2's cut along dimension 0: a shard's first row, and the one after its last."""
    rows = -(-shape[0] // shards)
    first = min(part * rows, shape[0])
    return first, min(first + rows, shape[0])


def added(own: Marks, device: torch.device, group: Group = None) -> Marks:
    """Marks of all ranks' rows together."""
    if not own:
        return {}
    names = sorted(own)
    sums = torch.stack([own[n][0] for n in names]).to(device)
    every = torch.empty(dist.get_world_size(group), len(names), dtype=sums.dtype, device=device)
    all_gather(every.view(-1), sums, group=group)
    total = every.sum(0).cpu()
    return {n: torch.cat((total[i : i + 1], own[n][1:])) for i, n in enumerate(names)}
