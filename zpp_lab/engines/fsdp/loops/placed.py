"""Training state in host memory, and split masters, in a user training loop (`zpp_lab.shard` with
place, masters, optimizer_state or clip_by). The optimizer that goes with it is in `optimizer.py`.

A unit's update may wait for its next forward, and no call of the loop is expected before that.
While an update waits, parameters are `Watched`: before a function of torch reads or writes one of
them, all waiting updates are made. Reading the optimizer's `state` makes them too. In place of a
gradient in host memory `p.grad` holds a `Watched` stand-in: the gradient counts while the stand-in
is there, and reading its values is refused.

Low planes belong to the bits of their high planes. Weights may be written at any time, by a load, a
swap, through `.data`. So marks of all rows are kept, and an update takes the low planes of rows
with other marks for zero: their masters are then the weights that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zpp_lab.codecs.planes import row_marks
from zpp_lab.collectives.plan import Plan
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.engines.fsdp.resident import ByUnit, Masters, Resident, Update
from zpp_lab.engines.optim.shards import local, sharded_as
from zpp_lab.engines.units import far_names

_TENSOR: Any = Tensor
# functions that neither read nor write a tensor's values
_METADATA = {
    *(_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__),
    *(_TENSOR.dtype.__get__, _TENSOR.device.__get__, _TENSOR.shape.__get__),
    *(_TENSOR.requires_grad.__get__, _TENSOR.is_leaf.__get__, _TENSOR.ndim.__get__),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size),
}
_ADD = {Tensor.add_, Tensor.__iadd__}
_LOCAL: Any = DTensor._local_tensor


class Watched:
    """Calls `met` before anything reads or writes the values of a tensor with this `__class__`."""

    __slots__ = ()
    met: Callable[[], None]
    added: Callable[[Tensor, Tensor], None] | None = None  # in place of adding another tensor to it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADD and cls.added is not None and len(args) == 2 and not kwargs:
            cls.added(*args)
            return args[0]
        if func not in _METADATA:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Watched):
                    each.met()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@property  # type: ignore[misc]
def _rows(self: Any) -> Tensor:
    """Return a DTensor's own rows, which are read without a function of torch."""
    self.met()
    found: Tensor = _LOCAL.__get__(self)
    return found


def watched(base: type[Tensor], **own: Any) -> Any:
    """Return a class of such tensors, with these calls."""
    calls = {name: staticmethod(v) if callable(v) else v for name, v in own.items()}
    return type(f"Watched{base.__name__}", (Watched, base), {"__slots__": (), **calls})


def _refuse() -> None:
    raise ValueError(
        "a gradient lies in host memory (zpp_lab.shard with place): clip by "
        "sharded.clip_grad_norm_ and update by sharded.adamw, or keep gradients on the GPU by a "
        "place without them, such as place={'moments': N}"
    )


# ---------------------------------------------------------------------- settings


@dataclass
class Placing:
    """What `shard` was asked for, as a run's settings, before FSDP2 takes the model. `marks`: of
    the rows of high planes that their low planes belong to."""

    config: Config
    residence: Residence
    far: Mapping[Any, frozenset[str]]
    masters: Masters
    marks: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, plan: Plan, model: nn.Module, part: int) -> Placing:
        """`part`: which of the shards is this rank's. Cuts the model's parameters into planes with
        train.masters=split."""
        residence, cut = Residence.of(config), config.train.masters == "split"
        if residence.weights:
            raise ValueError(
                f"place={config.engine.place}: the weights of a user training loop stay on the "
                "GPU, where it may read them: leave weights out"
            )
        far = far_names(plan, residence)
        skip = {n for n, p in model.named_parameters() if not p.is_floating_point()}
        shards = plan.recipe.shards
        masters = Masters(model, skip, cut, shards, part, far["masters"])
        return cls(config, residence, far, masters)

    def keep(self, parameters: Mapping[str, Tensor]) -> None:
        """Make the low planes and note whose they are; of a model without memory not yet."""
        floats = {n: p for n, p in parameters.items() if p.is_floating_point()}
        if not any(p.is_meta for p in floats.values()):
            self.masters.keep(floats)
        for name, low in self.masters.low.items():
            if name not in self.marks:
                self.marks[name] = row_marks(local(parameters[name].detach()))
                assert local(low).shape == local(parameters[name]).shape

    @torch.no_grad()
    def low(self, name: str, p: Tensor) -> Tensor | None:
        """Return the low plane of a parameter's rows, 0 where others have written them. The plane
        itself stays: weights that were swapped out may come back."""
        if name not in self.marks:
            return None
        written = row_marks(local(p)) != self.marks[name]  # a look, which finishes updates
        own = local(self.masters.low[name]).to(p.device, non_blocking=True)
        return own.masked_fill(written.view(-1, *[1] * (own.ndim - 1)), 0)


# ---------------------------------------------------------------------- gradients and updates


class LoopResident(Resident):
    """`Resident`, where the loop's code may look at parameters and gradients at any time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waiting = watched(DTensor, met=self.settle, _local_tensor=_rows)
        calls = {"met": _refuse, "added": self._add}
        kinds = watched(Tensor, **calls), watched(DTensor, **calls)
        self.gone: dict[str, Tensor] = {}  # what stands for gradients in host memory
        self.whose: dict[int, str] = {}  # by id, of stand-ins and of their rows
        for name in self.sums.places.keys() & set(args[5]):
            rows, self.gone[name] = _stand_in(self.parameters[name], *kinds)
            self.whose |= {id(rows): name, id(self.gone[name]): name}

    def forward(self, first: bool) -> None:
        """Begin the passes of a step, or (not `first`) of a further micro-step."""
        if first:
            self.start()
            for name, stand_in in self.gone.items():
                if self.parameters[name].grad is stand_in:
                    self.parameters[name].grad = None

    @torch.no_grad()
    def _take(self, name: str, p: nn.Parameter) -> None:
        if p.grad is self.gone[name]:
            return  # FSDP2 has added a micro-step's: `_add`
        self.there.pop(name, None)  # the loop has dropped it
        super()._take(name, p)
        p.grad = self.gone[name]

    def _add(self, stand_in: Tensor, grad: Tensor) -> None:
        name = self.whose[id(stand_in)]
        if name not in self.there:
            _refuse()  # of a step that is over
        self._send(name, local(grad))

    def grads(self) -> dict[str, Tensor]:
        self.there = {n: g for n, g in self.there.items() if self._is_gone(n)}
        return super().grads()

    def _near(self) -> dict[str, Tensor]:
        own = {n: p.grad for n, p in self.parameters.items() if not self._is_gone(n)}
        return {n: local(grad) for n, grad in own.items() if grad is not None}

    def _is_gone(self, name: str) -> bool:
        return name in self.gone and self.parameters[name].grad is self.gone[name]

    def norm(self) -> Tensor:
        """Return the sum of this rank's squares of all gradients."""
        known, grads = self.end(), self.grads()
        if known - grads.keys():
            self.sums.start()
            known = frozenset()
        return self.squares(grads, known)

    def defer(self, update: Update) -> None:
        super().defer(update)
        for name in self.sums.places:
            p: Any = self.parameters[name]
            p.__class__ = self.waiting

    def _update(self, unit: str, gathers: bool = True) -> None:
        for name in self.units[unit]:
            p: Any = self.parameters[name]
            if type(p) is self.waiting:
                p.__class__ = DTensor
        with torch.inference_mode(False):  # a forward in it may be the next one
            super()._update(unit, gathers)


def _stand_in(p: Tensor, rows: Any, whole: Any) -> tuple[Tensor, Tensor]:
    """Return a gradient of `p` without memory of its own, of these classes: this rank's rows, to
    which FSDP2 adds, and the DTensor."""
    own = torch.full((), torch.nan, dtype=p.dtype, device=local(p).device).expand(local(p).shape)
    made = sharded_as(p, own, p.shape)
    own.__class__, made.__class__ = rows, whole
    return own, made


class LoopByUnit(ByUnit):
    """`ByUnit`, where the loop decides how many backwards a step has."""

    before: Callable[[], None]  # called before a step's passes

    def forward(self, first: bool) -> None:
        if self.norms:
            raise ValueError(
                "clip_by='unit' updates within backward, so a step has one: call optimizer.step() "
                "after each backward, and model.set_requires_gradient_sync(False) before all but "
                "the last of several, or use clip_by='norm'"
            )
        if first:
            self.start()
            self.before()

    @torch.no_grad()
    def _finish(self) -> None:
        if self.landed and self.now in self.norms:
            raise ValueError(
                f"clip_by='unit': unit {self.now} was reduced twice in a step, but its first "
                "gradient has been used: use clip_by='norm'"
            )
        super()._finish()
