"""FSDP2's reduced gradients: who has one, in which memory it lies, and in which dtype it comes.

Who (`Present`): FSDP2 tells a reduction its gradients without names; hooks say whose they are.

Memory (`Landing`, `LandedReduce`). torch's allocator keeps what a stream has freed for that stream
alone. FSDP2 allocates gradients on its reductions' stream, so they never come to lie where the
activations were that the same backward frees. A GPU then needs room for both, though they are never
there whole together; where it has none the allocator gives memory back and fetches it again all
through the step, and waits for the device each time (`num_alloc_retries`; experiments/baseline
has what that costs at 32.5B). FSDP2 asks a ReduceScatter of its own making for the output first
and runs it afterwards. Here it gets a tensor without memory, which is given some of the computing
stream's when the reduction runs. The memory is safe to write: FSDP2 lets the reductions' stream
wait for the computing one just before it asks.

Dtype (`GradDtypes`): the same with every torch. Up to torch 2.13 autograd hands over a gradient in
the dtype of the gathered weight, and what waits for a later reduction waits in reduce_dtype. torch
2.15's FSDP2 lets gradients have reduce_dtype at once: one that autograd makes in fp32 for a bf16
weight (a norm's) is no longer rounded, and with a narrower reduce_dtype each one is rounded before
it is encoded. Runs would then have other bits than the virtual engine, and than the same run with
an older torch. This file takes that back; with the older ones it finds nothing to do. One
difference stays: where a bf16 weight is used several times in one pass and autograd makes some of
its gradients in fp32, torch 2.15 adds them up before they are rounded.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.utils import deterministic

from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.reduce import Names
from zpp_lab.collectives.transport import reduce_scatter
from zpp_lab.engines.optim.shards import local

# of a reduction: ids of who was seen, in their order, and who that is, in FSDP2's; their shapes
Found = tuple[tuple[int, ...], Names, list[torch.Size]]
Hook = Callable[..., None]  # gets a module first


def _nothing(*_: Any) -> None:
    pass


def on_forward(
    module: nn.Module, *, before: Hook = _nothing, entered: Hook = _nothing, after: Hook = _nothing
) -> None:
    """Call hooks around the forwards of a module that FSDP2 has wrapped: `before` it gathers,
    `entered` once it has, and `after` the forward. Methods that users register as forwards
    (`register_fsdp_forward_method`) bypass module hooks, but ask FSDP2's state for these two."""
    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_pre_hook(entered)
    module.register_forward_hook(after)
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    begin, end = state._pre_forward, state._post_forward

    def begun(own: nn.Module, args: Any, kwargs: Any) -> Any:
        before(own)
        given = begin(own, args, kwargs)
        entered(own)
        return given

    def ended(own: nn.Module, args: Any, output: Any) -> Any:
        output = end(own, args, output)
        after(own)
        return output

    state._pre_forward, state._post_forward = begun, ended


class Present:
    """Which parameters of a unit got a gradient since its last reduction.

    FSDP2 hands over gradients without names. A hook on each gathered parameter notes the
    parameter when autograd has accumulated its gradient. FSDP2 makes these parameters in the
    unit's first forward and keeps them.
    """

    def __init__(
        self, model: nn.Module, module: nn.Module, names: Names, own_dtypes: bool = True
    ) -> None:
        """`module`: the unit's first; `names` in FSDP2's order, and in `model`. `own_dtypes`:
        whether gradients are given the weights' dtype."""
        self.names, self.own_dtypes = names, own_dtypes
        self.seen: list[Tensor] = []
        self.taken: list[Names] = []  # of each reduction since the step began, if nobody is told
        self.hooked: dict[int, tuple[str, Tensor]] = {}  # by id, in FSDP2's order
        self.last: Found = (), (), []  # mostly the next one's too
        self.dtypes = GradDtypes()
        self.places = {n: _place(model, n) for n in names}
        self.known = self.trained()
        self.fresh = True  # whether trained parameters may have no hook yet
        # told before each reduction whose gradients it takes, and whether others than before
        self.tell: Callable[[Names, bool], None] | None = None
        on_forward(module, entered=self._attach)

    def trained(self) -> frozenset[str]:
        """The names of the unit's parameters that are trained at the moment."""
        places = self.places.items()
        return frozenset(n for n, (owner, a) in places if owner._parameters[a].requires_grad)  # type: ignore[union-attr]

    @torch.compiler.disable
    def _attach(self, *_: Any) -> None:
        if not self.fresh:
            return
        self.fresh, before, self.hooked = False, self.hooked, {}
        for name, (owner, attribute) in self.places.items():
            parameter = getattr(owner, attribute)
            if parameter.requires_grad and id(parameter) not in before:
                if self.own_dtypes:
                    self.dtypes.attach(parameter)
                # a function of C: Python's would cost every gradient some microseconds
                parameter.register_post_accumulate_grad_hook(self.seen.append)
            if parameter.requires_grad:
                self.hooked[id(parameter)] = name, parameter
        self.last = (), (), []

    def take(self, grads: Sequence[Tensor]) -> tuple[Names, Sequence[Tensor]]:
        """The names of `grads`, in order, and these in their dtypes; start anew."""
        seen = self._take(len(grads))
        names, shapes = self.last[1:]
        assert [g.shape for g in grads] == shapes, "FSDP2 reduces other gradients than seen"
        if self.dtypes.waiting:
            own = [parameter for _, parameter in self._given(seen)]
            grads = self.dtypes.own(own, grads, Counter(seen))
        return names, grads

    def note(self, numel: int, world: int) -> None:
        """A reduction over `world` ranks has begun, of so many elements with padding."""
        shapes = {id(p): tuple(local(p).shape) for p in self.seen}
        own = sum(world * Parameter("", shape, world).shard_numel for shape in shapes.values())
        self._take(len(shapes) if own == numel else len(self.hooked))

    def _take(self, count: int) -> tuple[int, ...]:
        """Ids of the parameters whose gradients, so many, a reduction takes; start anew."""
        seen, before = tuple(map(id, self.seen)), self.last[1]
        self.seen.clear()
        if count != len(set(seen)):  # FSDP2 has filled up with zeros
            seen = tuple(self.hooked)
        if seen != self.last[0]:  # the hooked parameters stay, and so do their ids
            given = self._given(seen)
            shapes = [local(parameter).shape for _, parameter in given]
            self.last = seen, tuple(name for name, _ in given), shapes
        names = self.last[1]
        if self.tell is None:
            self.taken.append(names)
        else:
            self.tell(names, names != before)
        return seen

    def _given(self, seen: tuple[int, ...]) -> list[tuple[str, Tensor]]:
        return [each for key, each in self.hooked.items() if key in seen]


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


class Landing:
    """Of one unit on one of `world` ranks; `dtype`: its gradients' in the end, None where there
    are several or FSDP2 keeps the reduction's."""

    def __init__(self, world: int, dtype: torch.dtype | None) -> None:
        self.world, self.dtype = world, dtype
        self.computing: torch.cuda.Stream | None = None
        self._input: weakref.ref[Tensor] | None = None  # of the reduction under way

    def allocate(
        self,
        size: Sequence[Any],
        dtype: torch.dtype,
        device: torch.device,
        make_input: Callable[[], Tensor],
    ) -> Tensor:
        """What FSDP2 asks for twice a reduction: its input, on the stream that computes, then its
        output. An input that has died was of a step that failed before it asked for the second."""
        waiting = self._input() if self._input is not None else None
        self._input = None
        numel = math.prod(size)
        if waiting is not None and numel * self.world == waiting.numel():
            return self.expected(numel, dtype, device)
        if device.type == "cuda":
            self.computing = torch.cuda.current_stream(device)
        made = make_input()
        self._input = weakref.ref(made)
        return made

    def forget(self) -> None:
        """The reduction under way is given up."""
        self._input = None

    def expected(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output [numel] of a reduction in `dtype`: one element's memory for all."""
        return torch.empty_strided((numel,), (0,), dtype=self.dtype or dtype, device=device)

    def land(
        self, expected: Tensor, dtype: torch.dtype, run: Callable[[Tensor], Any]
    ) -> Callable[[], None]:
        """Give `expected` memory. Returns what fills it, on the current stream: `run` writes the
        gradient to a tensor [numel] of `dtype`."""
        gradient = self._room(expected)
        expected.set_(gradient)  # type: ignore[call-overload]

        def fill() -> None:
            if dtype == gradient.dtype:
                run(gradient)
                return
            sums = torch.empty(gradient.numel(), dtype=dtype, device=gradient.device)
            run(sums)
            gradient.copy_(sums)

        return fill

    def _room(self, expected: Tensor) -> Tensor:
        numel, dtype, device = expected.numel(), expected.dtype, expected.device
        if device.type != "cuda":
            return torch.empty(numel, dtype=dtype, device=device)
        with torch.cuda.stream(self.computing):
            made = torch.empty(numel, dtype=dtype, device=device)
        here = torch.cuda.current_stream(device)
        fill: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if self.computing is not None and fill and torch.are_deterministic_algorithms_enabled():
            here.wait_stream(self.computing)  # it has just been told to fill it with NaN
        # FSDP2 may let go of it while this stream still reads it: added to what a micro-step
        # before left, or on its way to host memory.
        made.record_stream(here)
        return made


class LandedReduce(ReduceScatter):
    """The reduce-scatter of one unit, FSDP2's own but for where its output lies."""

    def __init__(self, landing: Landing, present: Present) -> None:
        self.landing, self.present = landing, present

    def make_input(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Whole gradients, a row a rank."""
        return torch.empty(*size, dtype=dtype, device=device)

    def run(self, rows: Tensor, out: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """The input → `out` [numel], this rank's, in the input's dtype."""
        self.present.note(rows.numel(), self.landing.world)
        reduce_scatter(out, rows, op=op, group=group)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.landing.allocate(
            size, dtype, device, lambda: self.make_input(size, dtype, device)
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        run = partial(self.run, input_tensor, group=group, op=op)
        self.landing.land(output_tensor, input_tensor.dtype, run)()
        return None


class GradDtypes:
    """Of one unit's gathered parameters."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, torch.dtype]] = []  # parameters, and their reduce_dtype

    def attach(self, parameter: Tensor) -> None:
        """Before the parameter's first backward."""
        wanted = parameter.grad_dtype
        if wanted is None or wanted == parameter.dtype:
            return
        self.waiting.append((parameter, wanted))
        parameter.grad_dtype = None
        parameter.register_hook(partial(_rounded, parameter.dtype))

    def keep(self) -> None:
        """After a backward without a reduction: what it left waits in reduce_dtype."""
        for parameter, wanted in self.waiting:
            if parameter.grad is not None and parameter.grad.dtype != wanted:
                parameter.grad = parameter.grad.to(wanted)

    def own(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], times: Counter[int]
    ) -> Sequence[Tensor]:
        """`grads` of `parameters`, those of one backward in the weight's dtype, without loss.

        times: how many backwards each, by the parameter's id, has gradients of.
        """
        return [
            g.to(p.dtype) if times[id(p)] == 1 and g.itemsize > p.itemsize else g
            for p, g in zip(parameters, grads, strict=True)
        ]


def _rounded(dtype: torch.dtype, grad: Tensor) -> Tensor:
    """To `dtype`'s values; a hook must not change the dtype itself."""
    return grad if grad.dtype == dtype else grad.to(dtype).to(grad.dtype)
