"""Our collectives inside an untouched FSDP2, whose insides only this file and its neighbours know.

FSDP2 lets a unit have an AllGather and a ReduceScatter of its own. What their `allocate`
returns here is a `Packed` buffer: a tensor without storage that owns a packet. FSDP2's own
copy-in and copy-out operators then land there (`packed.py`):

    fsdp::all_gather_copy_in      this rank's shards are encoded           (copy-in stream)
    AllGather.__call__            payload rows travel                      (gather stream)
    fsdp::split_with_sizes_copy   payload is decoded into the parameters   (compute stream)
    fsdp::chunk_cat               the gradients are noted down             (compute stream)
    ReduceScatter.__call__        encode, hops, sum in rank order, divide  (reduce stream)

The last hop of a reduction has a lane of its own, and is decoded when the next unit's has left
(`UnderWay`). Else streams and lifetimes stay FSDP2's own: it keeps the gather's buffer until the
copy-out is done, and the reduction's input until its event has passed, and a packet (payload, or
the gradients) lives in that buffer. Nothing here waits on the host. After a step `sent.py` compares
what a unit really sent with what its plan says.

Facts that this file relies on: `allocate` runs twice for a reduction, first for its input.
FSDP2 orders a unit's parameters in its own way. Parameters without a gradient are left out of
`chunk_cat`. Comms are per module, or per list of modules that it was given as one, whose first
speaks for all; not recursive. FSDP2 names the division in the op: AVG, or PREMUL_SUM with a
factor, and after a forced SUM it divides by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from zpp_lab.collectives.context import Clock, Memories
from zpp_lab.collectives.exchange import Exchange
from zpp_lab.collectives.gather import Gather, GatherSpec, Packet
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.plan import Unit, UnitPlan
from zpp_lab.collectives.reduce import Names, Reduce, ReduceSpec
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import (
    Overlap,
    Transport,
    all_gather,
    peers,
    reduce_scatter,
)
from zpp_lab.config.wires import INTER, INTRA, UPDATE
from zpp_lab.engines.fsdp.gradients import LandedReduce, Landing, Present
from zpp_lab.engines.fsdp.packed import Box, Fallbacks, Packed

# What the files fsdp_*.py lean on beyond the names that they spell out; a test looks for each.
LEANS_ON = {
    # what fully_shard.state(module) returns; several groups a module from torch 2.13 on
    "FSDPState": (
        *("_fsdp_param_groups|_fsdp_param_group", "_pre_forward", "_post_forward", "_lazy_init"),
        *("_state_ctx", "_comm_ctx"),  # for idle.py
    ),
    "FSDPStateContext": ("post_backward_final_callback_queued",),
    "FSDPParamGroup": (
        *("fsdp_params", "_init_mp_dtypes"),
        # for resident.py
        *("unshard", "wait_for_unshard", "_wait_all_gather_streams_on_event"),
        *("is_sharded", "_training_state"),
    ),
    "FSDPParam": (
        "sharded_param",
        # the rest for base.py
        "_sharded_param_data",
        "padded_sharded_param_size",
        "sharded_size",
        "to_sharded_dtensor",
        *("_setattr_on_modules", "_sharding_spec"),
        *("to_sharded", "unsharded_param"),  # for idle.py
        "unsharded_accumulated_grad",  # for loops
    ),
    "operators": (
        "all_gather_copy_in",
        "split_with_sizes_copy",
        "chunk_cat|chunk_cat_mixed_dtype",  # the second name from torch 2.15 on
    ),
}


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def check_ended(module: nn.Module) -> None:
    """ValueError where an exception ended the last backward: FSDP2 would not end the next one."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    if state._state_ctx.post_backward_final_callback_queued:
        raise ValueError(
            "an exception ended the last backward, and gradients are incomplete: call "
            "model.reset_iter_state() of torch 2.13, which drops them, on every rank and begin the "
            "step again, or resume from a checkpoint"
        )


class PackedGather(AllGather):
    """FSDP2's AllGather for one unit."""

    def __init__(
        self, gather: Gather, fallbacks: Fallbacks, places: Sequence[int] | None = None
    ) -> None:
        """`places`: where FSDP2 has each of the layout's parameters, if in another order."""
        self.gather, self.fallbacks, self.places = gather, fallbacks, places
        self.peers = peers(gather.cluster, "local" if gather.copied else "world")
        self.dtypes = [getattr(s.codec, "dtype", gather.spec.dtype) for s in gather.raw.segments]
        self.mixed = not all(dtype.is_floating_point for dtype in self.dtypes)
        self.arrive = lambda: None  # called before each gather outside of backward

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not dtype.is_floating_point and not self.mixed:  # several dtypes travel as bytes
            self.fallbacks.note(f"a gather of {dtype}")
            return torch.empty(*size, dtype=dtype, device=device)
        return Packed(Box(self, math.prod(size), dtype, device), size)

    def copy_in(self, output: Packed, shards: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if not (backward := in_backward()):
            self.arrive()
        output.box.packet = self.gather.pack(self._ordered(shards), backward)
        return output, output

    def reads(self) -> bool:
        """Return whether a gather that begins now reads this rank's shards."""
        return self.gather.reads(in_backward())

    def unpack(self, packet: Packet, outs: Sequence[Tensor]) -> None:
        self.gather.unpack(packet, self._ordered(outs))

    def _ordered(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.places is not None:
            return [tensors[i] for i in self.places]
        if self.mixed:  # FSDP2 hands over bytes
            return [t.view(dtype) for t, dtype in zip(tensors, self.dtypes, strict=True)]
        return tensors

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if isinstance(output_tensor, Packed) and output_tensor.box.packet is not None:
            self.gather.send(output_tensor.box.packet)
            return None
        self.fallbacks.note("an all-gather of plain tensors")
        wire = self.gather.wire(in_backward())
        self.gather.ledger.add(wire, Traffic(*(n * _nbytes(input_tensor) for n in self.peers)))
        out = output_tensor.box.plain if isinstance(output_tensor, Packed) else output_tensor
        row = input_tensor.box.plain if isinstance(input_tensor, Packed) else input_tensor
        return all_gather(out, row, group=group, async_op=async_op)


class UnderWay(Overlap):
    """The last reduction of a backward, on its way while FSDP2's stream encodes the next one.

    FSDP2 lets the computing stream wait for each reduction before it starts the next. If it waits
    for the encoding alone, transfers follow each other without a gap. Only who calls `join` after
    the backward may ask for that (`open`): gradients are not there before.
    """

    open = False


class PackedReduce(LandedReduce):
    """FSDP2's ReduceScatter for one unit."""

    def __init__(
        self,
        reduce: Reduce,
        present: Present,
        fallbacks: Fallbacks,
        landing: Landing,
        under_way: UnderWay,
        parameters: Sequence[Any],
    ) -> None:
        """`parameters`: the unit's as FSDP2 manages them."""
        super().__init__(landing, present)
        self.reduce, self.fallbacks = reduce, fallbacks
        self.under_way, self.parameters = under_way, parameters

    def make_input(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        return Packed(Box(self, math.prod(size), dtype, device), size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        box = input_tensor.box if isinstance(input_tensor, Packed) else None
        if box is None or not box.grads:
            self.under_way.join()
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        send, finish = self.reduce.begin(*self.present.take(box.grads))

        def run(out: Tensor) -> None:
            finish(out)
            _divide(out, op, self.reduce.cluster.world)

        self.under_way.ship(send, self.landing.land(output_tensor, input_tensor.dtype, run))
        if not self.under_way.open or op != dist.ReduceOp.AVG or self._is_read_at_once():
            self.under_way.join()
        return None

    def _is_read_at_once(self) -> bool:
        """Whether FSDP2 casts what has been reduced, or adds it to what is there, on this very
        stream."""
        there = (p.sharded_param.grad is not None for p in self.parameters)
        return self.landing.dtype is None or any(there)

    def run(self, rows: Tensor, out: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        self._plain(rows.box.plain if isinstance(rows, Packed) else rows, out, group)
        _divide(out, op, self.reduce.cluster.world)

    def _plain(self, rows: Tensor | None, out: Tensor, group: dist.ProcessGroup) -> None:
        self.fallbacks.note("a reduce-scatter of plain tensors")
        if self.reduce.cut != self.reduce.cluster.world:
            raise RuntimeError(
                "plain gradients would be summed only inside the node: use "
                "recipe.sharding.grads=world"
            )
        inside, beyond = peers(self.reduce.cluster, "world")
        self.reduce.ledger.add(INTRA, Traffic(inside * _nbytes(out), 0))
        self.reduce.ledger.add(INTER, Traffic(0, beyond * _nbytes(out)))
        reduce_scatter(out, rows, group=group)


def _divide(sums: Tensor, op: Any, world: int) -> None:
    """As FSDP2 asks of a reduction: AVG, or a factor of the user's
    (`set_gradient_divide_factor`). After SUM it divides by itself."""
    if op == dist.ReduceOp.AVG:
        sums.div_(world)
    elif op == dist.ReduceOp.PREMUL_SUM:
        sums.mul_(op.__getstate__()[1])


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize  # a packed buffer has no bytes of its own


# ---------------------------------------------------------------------- installation


@dataclass(frozen=True)
class Installed:
    """One unit's collectives inside FSDP2, under one phase's plan. Phases share all but `plan`,
    `gather` and `reduce`."""

    plan: UnitPlan
    ledger: Ledger
    gather: Gather
    reduce: Reduce
    present: Present
    inside: tuple[PackedGather, PackedReduce]  # what FSDP2 calls
    update: Exchange | None = None  # where nodes keep the weights

    def follow(self, before: Installed) -> None:
        """In place of `before`, which is nowhere under way."""
        packed_gather, packed_reduce = self.inside
        packed_gather.gather, packed_reduce.reduce = self.gather, self.reduce
        self.gather.base = before.gather.base
        if self.update is not None:
            self.update.follow(self.plan)

    def start_step(self) -> None:
        self.ledger.start_step()
        self.present.taken = []
        self.reduce.start_step()


def parameter_order(module: nn.Module, names: dict[int, str]) -> Names:
    """The names of a unit's parameters as FSDP2 orders them; `module`: any of the unit's.

    `names`: id of each sharded parameter of the model → its full name.
    """
    return tuple(names[id(p.sharded_param)] for p in managed(module))


def managed(module: nn.Module) -> list[Any]:
    """FSDP2's own parameter objects of a wrapped module and those it travels with, in its
    order."""
    return [p for group in param_groups(module) for p in group.fsdp_params]


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's groups of the parameters of a wrapped module and those it travels with."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in groups or [state._fsdp_param_group] if g]


@contextmanager
def held(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Unshard modules, of which the last is the root, and keep their weights whole until the end,
    across methods too that users registered as forwards: FSDP2 reshards after one that calls the
    module's own forward. `set_reshard_after_forward` must have said what follows."""
    states = [fully_shard.state(module) for module in modules]  # type: ignore[attr-defined]
    states[-1]._lazy_init()  # makes streams, as the first forward does, which unshards need
    methods = [(state._pre_forward, state._post_forward) for state in states]
    try:
        for module, state in zip(modules, states, strict=True):
            module.unshard()
            state._pre_forward = lambda own, args, kwargs: (args, kwargs)
            state._post_forward = lambda own, args, output: output
        yield
    finally:
        for state, (begun, ended) in zip(states, methods, strict=True):
            state._pre_forward, state._post_forward = begun, ended


def retrain(module: nn.Module, reduce: LandedReduce | None = None) -> None:
    """Others of a unit's parameters are trained from now on: let FSDP2 look at dtypes again, which
    it does for trained ones alone. `reduce`: the unit's, on several ranks."""
    for group in param_groups(module):
        group._init_mp_dtypes()
    if reduce is not None:
        reduce.landing.dtype, reduce.present.fresh = gradient_dtype(module), True


def gradient_dtype(module: nn.Module) -> torch.dtype | None:
    """Of a unit's reduced gradients, to which FSDP2 casts them: their weights' dtype, or with torch
    2.15 the weights' grad_dtype. None where it is not one, which torch 2.15 allows."""
    found = {
        getattr(p, "sharded_grad_dtype", p.sharded_param.dtype)
        for p in managed(module)
        if p.sharded_param.requires_grad
    }
    return found.pop() if len(found) == 1 else None


def gather_spec(plan: UnitPlan) -> GatherSpec:
    recipe = plan.recipe
    secondary = recipe.config.secondary and plan.gathers_backward
    return GatherSpec(
        plan.unit.name,
        plan.forward,
        plan.backward,
        recipe.weights_dtype,
        secondary,
        plan.hierarchical,
        len(plan.unit.stored),
        recipe.kept,
        recipe.shards,
        plan.rollout,
    )


def reduce_spec(plan: UnitPlan) -> ReduceSpec:
    recipe = plan.recipe
    turned = recipe.config.order == "reversed"
    return ReduceSpec(plan.unit.name, recipe.hops, plan.hops, turned, recipe.cut, recipe.node_sums)


def install(
    model: nn.Module,
    modules: dict[str, nn.Module],
    plans: Sequence[UnitPlan],
    transport: Transport,
    clock: Clock,
    fallbacks: Fallbacks,
    device: torch.device,
    memories: Memories,
    under_way: UnderWay,
) -> list[Installed]:
    """Give every unit of a model that `fully_shard` has wrapped our collectives.

    `modules`: each unit's first module by the unit's name; the root unit's is `model`.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    done = []
    for plan in plans:
        module = modules[plan.unit.name]
        assert isinstance(module, FSDPModule), f"unit {plan.unit.name} is not wrapped"
        order = parameter_order(module, names)
        own = UnitPlan(_ordered(plan.unit, order), plan.recipe, plan.hierarchical)
        ledger, update = Ledger(), None
        gather = Gather(gather_spec(own), transport, ledger, clock)
        if own.recipe.kept:
            streams = under_way.streams
            update = Exchange(UPDATE, "across", own, transport, ledger, clock, device, streams)
            gather.rows = update.rows
        reduce = Reduce(reduce_spec(own), transport, ledger, clock, memories)
        present = Present(model, module, order)
        places = [order.index(p.name) for p in own.unit.parameters] if own.unit.stored else None
        landing = Landing(own.recipe.shards, gradient_dtype(module))
        inside = (
            PackedGather(gather, fallbacks, places),
            PackedReduce(reduce, present, fallbacks, landing, under_way, managed(module)),
        )
        module.set_custom_all_gather(inside[0])
        module.set_custom_reduce_scatter(inside[1])
        done.append(Installed(own, ledger, gather, reduce, present, inside, update))
    return done


def install_later(
    units: Sequence[Installed],
    plans: Sequence[UnitPlan],
    transport: Transport,
    clock: Clock,
    memories: Memories,
) -> list[Installed]:
    """The same units under the plans of a later phase, which follow when it begins. Made at the
    start, as buffers of peers are as large as any phase needs."""
    done = []
    for unit, plan in zip(units, plans, strict=True):
        own = replace(plan, unit=replace(unit.plan.unit, trainable=plan.unit.trainable))
        gather = Gather(gather_spec(own), transport, unit.ledger, clock)
        gather.rows = unit.gather.rows
        reduce = Reduce(reduce_spec(own), transport, unit.ledger, clock, memories)
        if unit.update is not None:
            transport.reserve("gather", "across", own.update.nbytes)
        done.append(replace(unit, plan=own, gather=gather, reduce=reduce))
    return done


def land(model: nn.Module, modules: Iterable[nn.Module], world: int) -> list[LandedReduce]:
    """Let the gradients of units that FSDP2 reduces by itself lie in the computing stream's
    memory; `modules`: each unit's first, on `world` > 1 ranks."""
    names, found = {id(p): n for n, p in model.named_parameters()}, []
    for module in modules:
        assert isinstance(module, FSDPModule)
        present = Present(model, module, parameter_order(module, names), own_dtypes=False)
        found.append(LandedReduce(Landing(world, gradient_dtype(module)), present))
        module.set_custom_reduce_scatter(found[-1])
    return found


def _ordered(unit: Unit, order: Names) -> Unit:
    by_name = {p.name: p for p in unit.parameters}
    assert set(by_name) == set(order), f"unit {unit.name}: FSDP2 manages other parameters"
    last = sorted(order, key=lambda n: n in unit.stored)  # a frozen base ends the payload
    parameters = tuple(by_name[n] for n in last)
    return replace(unit, parameters=parameters)
