"""A wrapped model between two steps, as it was before a step that could not be captured.

An error in the middle of a capture leaves FSDP2 in the middle of a step: gathered parameters,
training states, a final callback that is still awaited, and events of a capture that never ran,
for which nothing may wait (`FSDPModule.reset_iter_state` of torch 2.13 waits for them). Between two
steps all of that is known. `Idle` notes it, and puts it back: every attribute of FSDP2's objects,
whatever this version of torch has. What a step begins by itself (`start_step`) is not noted.

torch, too, is left in the middle (aten/src/ATen/cuda/CUDAGraph.cpp, capture_end): the allocator
takes the capture for one under way, and up to torch 2.12 the generators of random numbers refuse to
draw outside of one. `end_capture` ends both.
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.transport import Transport
from zpp_lab.engines.fsdp.comm import managed, param_groups
from zpp_lab.engines.fsdp.wrap import Wrapped


class Idle:
    """What FSDP2 and the rings of peer memory keep on the host between two steps."""

    def __init__(self, wrapped: Wrapped, transport: Transport) -> None:
        self.wrapped = wrapped
        objects: dict[int, Any] = {}
        for module in wrapped.by_name.values():
            state = fully_shard.state(module)  # type: ignore[attr-defined]
            groups = param_groups(module)  # type: ignore[arg-type]
            own = [state, state._state_ctx, state._comm_ctx, *groups]
            own += [p for group in groups for p in group.fsdp_params]
            objects |= {id(each): each for each in own}
        self.kept = [
            (each, {k: (v, _held(v)) for k, v in vars(each).items()}) for each in objects.values()
        ]
        rings = transport.rings.values() if isinstance(transport, PeerTransport) else ()
        self.rings = [(ring, ring.use, ring.opened) for ring in rings]

    def restore(self) -> None:
        """Forget the step that was captured half-way: nothing of it has run on the device."""
        for module in self.wrapped.by_name.values():
            for p in managed(module):  # type: ignore[arg-type]
                p.to_sharded()  # frees what was gathered
                p.sharded_param.grad = None
                if hasattr(p, "unsharded_param"):  # it has run before
                    p.unsharded_param.grad = None
        for each, attributes in self.kept:
            vars(each).clear()
            for name, (value, held) in attributes.items():
                _refill(value, held)
                vars(each)[name] = value
        self.wrapped.under_way.forget()
        for reduce in self.wrapped.reduces:
            reduce.present.seen.clear()
            reduce.landing.forget()
        for unit in self.wrapped.installed:
            unit.gather.release()
        for ring, use, opened in self.rings:
            ring.use, ring.opened = use, opened
            ring.rebase(meet=False)


def _held(value: Any) -> Any:
    return copy(value) if isinstance(value, list | dict | set) else None


def _refill(value: Any, held: Any) -> None:
    """Give a container, which others may hold too, its former content."""
    if isinstance(value, list | dict | set):
        value.clear()
        value.extend(held) if isinstance(value, list) else value.update(held)


def end_capture(device: torch.device, pool: Any, ended: bool) -> None:
    """End what a failed capture has left open in torch; `ended`: torch has ended it by itself.
    RuntimeError where the device has failed."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    if not ended:
        with suppress(RuntimeError):  # it failed after the allocator had heard of its end
            torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
        # generators are free once a capture has ended as it should
        stream, mode = torch.cuda.current_stream(device), "thread_local"
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode=mode):
            torch.zeros(1, device=device)
