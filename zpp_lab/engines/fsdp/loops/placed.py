"""Training state in host memory, and split masters, in a user training loop (`zpp_lab.shard` with
place, masters, optimizer_state or clip_by).

`Placing` is what `shard` was asked for. `PlacedAdamW` is the optimizer that goes with it, to the
bits of a run: its step takes the gradients wherever they lie and hands the update to `Resident`,
which updates each unit just before its next forward.

No call of the loop is expected between a step and that forward. While an update waits, parameters
are `Watched`: the first function of torch that reads or writes one of them updates all of them
before it goes on. The optimizer's `state` does the same. A gradient in host memory leaves a
stand-in in `p.grad`, `Watched` too: the gradient counts as long as that is there, and a read of it
is refused.

Low planes belong to the bits of their high planes. Weights may be written at any time, by a load, a
swap, through `.data`. So marks of all rows are kept, and an update takes the low planes of rows
with other marks for zero: their masters are then the weights that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from zpp_lab.codecs.numerics import clip_factor
from zpp_lab.codecs.planes import row_marks
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.fsdp.resident import ByUnit, Masters, Resident, Update, updates
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.optim.adamw import CompactAdamW
from zpp_lab.engines.optim.shards import local, sharded_as
from zpp_lab.engines.units import far_names
from zpp_lab.engines.watch import unit_not_finite

USE = "use optimizer = sharded.adamw(...)"
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
    """Says so before anything reads or writes the values of a tensor that became one by its
    `__class__`."""

    __slots__ = ()
    met: Callable[[], None]  # called then
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
    """A DTensor's own rows, which are not read by a function of torch."""
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
    the rows of high planes, when their low planes were made."""

    config: Config
    residence: Residence
    far: Mapping[Any, frozenset[str]]
    masters: Masters
    marks: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, plan: Any, model: nn.Module, part: int) -> Placing:
        """`part`: which of the shards is this rank's. Cuts the model's parameters into planes with
        train.masters=split."""
        residence, cut = Residence.of(config), config.train.masters == "split"
        if residence.weights:
            raise ValueError(
                f"place={config.engine.place}: the weights of a user training loop stay on the "
                "GPU, where it may read them: leave weights out"
            )
        far = far_names(plan, residence)
        every = dict(model.named_parameters())
        skip = {n for n, p in every.items() if not p.is_floating_point()}
        small = [n for n, p in every.items() if p.requires_grad and p.dtype != torch.float32]
        if small and not cut:
            raise ValueError(
                f"{small[0]} is {every[small[0]].dtype}, and masters=fp32: convert the model by "
                "model.float(), or set masters='split'"
            )
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
    def refresh(self, parameters: Mapping[str, Tensor]) -> None:
        """Let low planes of rows that others have written be 0, before anything but an update reads
        masters."""
        own = {name: row_marks(local(parameters[name])) for name in self.marks}
        changed = {name: marks != self.marks[name] for name, marks in own.items()}
        if changed and bool(torch.stack([rows.any() for rows in changed.values()]).any()):
            for name, rows in changed.items():
                low = local(self.masters.low[name])
                low[rows.to(low.device)] = 0


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
        """Passes begin, of a step or (not `first`) of a further micro-step."""
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


class Followed(Protocol):
    """What the optimizer asks of `Loop`."""

    wrapped: Wrapped
    device: torch.device
    watched: Any  # of a transport

    def parameters(self) -> dict[str, nn.Parameter]: ...
    def total(self, own: Tensor) -> Tensor: ...
    def ended(self, norm: Tensor) -> None: ...


class PlacedAdamW(Optimizer):
    """AdamW to the bits of `zpp-lab train`, of a model that was sharded with a placement."""

    def __init__(
        self, params: Iterable[Any], loop: Followed, placing: Placing, clip: float, **defaults: Any
    ) -> None:
        """`clip`: of each unit, with clip_by='unit'. defaults: of groups, as torch's AdamW has."""
        if placing.residence.by_unit and not clip > 0:
            raise ValueError(f"sharded.adamw(clip={clip}): use a norm above 0")
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_group(group, {*defaults, "params", "param_names", "initial_lr"})
        self.loop, self.placing = loop, placing
        self.parameters, train = loop.parameters(), placing.config.train
        names = {p: n for n, p in self.parameters.items()}
        every = [p for group in self.param_groups for p in group["params"]]
        other = next((tuple(p.shape) for p in every if p not in names), None)
        if other is not None:
            raise ValueError(f"sharded.adamw: a parameter {other} is not the sharded model's")
        placing.keep(self.parameters)
        if any(p.is_meta for p in self.parameters.values()):
            raise ValueError(
                "sharded.adamw: the model has no memory yet: call model.to_empty(device=...) and "
                "give it weights before"
            )
        self.names = {names[p]: p for p in every if p.requires_grad}
        low = {p: placing.masters.low[n] for n, p in self.names.items() if placing.masters.cut}
        there: Any = {
            plane: {self.names[n] for n in far & self.names.keys()}
            for plane, far in placing.far.items()
        }
        kind, seed = train.optimizer_state, placing.config.seed
        self.inner = CompactAdamW(self.param_groups, kind, seed, **defaults, far=there, low=low)
        marks = {p: placing.marks[names[p]] for p in low}
        self.inner.marked = marks
        shown: dict[Tensor, dict[str, Tensor]] = {}
        for p in self.names.values():
            shown[p] = self.inner.state[p] = self.inner.zero_state(p)
            if low:
                as_bytes = local(low[p])[..., None].view(torch.uint8)  # backends send no int16
                shown[p] = shown[p] | {
                    "low": sharded_as(p, as_bytes, (*p.shape, 2)),
                    "mark": sharded_as(p, marks[p], p.shape[:1]),
                }
        self.shown = MappingProxyType(shown)
        self.clipped: tuple[Tensor, Tensor] | None = None  # the norm, and the factor that clips
        self.resident = self._resident(clip)

    def _resident(self, clip: float) -> LoopResident | LoopByUnit:
        loop, placing = self.loop, self.placing
        wrapped, residence = loop.wrapped, placing.residence
        modules: Any = wrapped.by_name
        where = wrapped.plan, wrapped.clock, loop.device
        if not residence.by_unit:
            how: Any = placing.far["gradients"], residence.waits, frozenset()
            return LoopResident(modules, self.parameters, *where, *how)
        how = None, self.inner, clip, loop.watched
        made = LoopByUnit(modules, self.names, *where, *how)
        made.before = self._enter
        return made

    # ------------------------------------------------------------------ a step

    def forward(self, first: bool) -> None:
        """A forward with gradients begins."""
        if self.clipped is not None and any(p.grad is not None for p in self.names.values()):
            raise ValueError(
                "sharded.clip_grad_norm_ came before the step's last backward: call it after all "
                "micro-steps"
            )
        self.clipped = None
        self.resident.forward(first)

    def _enter(self) -> None:
        """Updates within the next backward take these settings."""
        self._take_settings()
        assert isinstance(self.resident, LoopByUnit)
        self.resident.step = self.loop.wrapped.clock.step

    def _take_settings(self) -> None:
        """Keep each group's settings: a schedule may change them before a late update."""
        for group in self.param_groups:
            _check_group(group)
        self.inner.param_groups = [{**g, "lr": float(g["lr"])} for g in self.param_groups]

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Return the gradients' norm, fp64; the step scales them so that it is at most `limit`."""
        if self.placing.residence.by_unit:
            raise ValueError(
                "clip_by='unit' has clipped and updated each unit within backward: leave "
                "sharded.clip_grad_norm_ out, or use clip_by='norm'"
            )
        before: Any = 1.0 if self.clipped is None else self.clipped[1]
        norm = self._norm() * before  # gradients are as they were
        self.clipped = norm, before * clip_factor(norm, limit)
        return norm

    def _norm(self) -> Tensor:
        assert isinstance(self.resident, LoopResident)
        self.resident.settle()
        self._check_known(self.resident.grads())
        return self.loop.total(self.resident.norm())

    def _check_known(self, grads: Iterable[str]) -> None:
        if unknown := sorted(set(grads) - self.names.keys()):
            raise ValueError(
                f"{unknown[0]} has a gradient, but sharded.adamw was made without it, or while it "
                "was frozen: give sharded.adamw all parameters that are trained, unfrozen"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update with the gradients that are there and take them away; with place in host memory
        in the next forward. NonFiniteError, and no weight changes, where they are not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p is not self.parameters[n] for n, p in self.loop.parameters().items()):
            raise ValueError(
                "the model's parameters were replaced after sharded.adamw, as to_empty() does: "
                "call it afterwards"
            )
        if isinstance(self.resident, LoopByUnit):
            norm = self._end_by_unit(self.resident)
        else:
            norm = self._step(self.resident)
        self.loop.ended(norm)
        return loss

    def _end_by_unit(self, resident: LoopByUnit) -> Tensor:
        resident.end()
        self._check_known(n for n, p in self.parameters.items() if p.grad is not None)
        norms = dict(resident.norms)
        resident.start()
        if not all(bool(torch.isfinite(norm)) for norm in norms.values()):
            raise unit_not_finite(self.loop.wrapped.clock.step, norms)
        return torch.zeros((), device=self.loop.device)

    def _step(self, resident: LoopResident) -> Tensor:
        resident.settle()
        grads, step = resident.grads(), self.loop.wrapped.clock.step
        if not grads:
            return torch.zeros((), device=self.loop.device)
        self._check_known(grads)
        self._take_settings()
        clipped, self.clipped = self.clipped, None
        norm, factor = clipped or (self._norm(), None)
        if not bool(torch.isfinite(norm)):
            self._wait()
            bad = (name for name, grad in grads.items() if not bool(grad.isfinite().all()))
            raise NonFiniteError(
                step,
                f"the gradient of {next(bad, 'a parameter on another rank')} is not finite; no "
                "weight has changed. optimizer.zero_grad() drops the step, a checkpoint goes back "
                "further",
            )
        waits, passes = self.placing.residence.waits, self.placing.residence.passes
        ok, whole = torch.isfinite(norm), passes and not waits
        found: Mapping[str, nn.Parameter] = self.names
        update = updates(self.inner, found, step, factor, ok, grads, whole)
        resident.start()
        if waits:
            resident.defer(update)
        elif not whole:
            update(self.names)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, wherever they lie."""
        self.clipped = None
        super().zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ its state

    def _wait(self) -> None:
        """Finish updates, and have what lies in host memory there."""
        self.resident.settle()
        if self.loop.device.type == "cuda" and self.placing.residence.passes:
            torch.cuda.synchronize(self.loop.device)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Moments by parameter as they are kept, and with masters='split' low planes and marks."""
        if "shown" not in self.__dict__:  # torch is making it
            return {}
        self._wait()
        return self.shown

    @state.setter
    def state(self, value: Any) -> None:
        if "shown" in self.__dict__:
            raise ValueError("sharded.adamw: state cannot be set: use load_state_dict")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an optimizer with the same groups, sharded alike. Nothing is converted:
        ValueError, and nothing changes, where moments are kept otherwise."""
        groups = state_dict["param_groups"]
        sizes = [[len(g["params"]) for g in every] for every in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has groups of {sizes[0]} parameters, not {sizes[1]}")
        own, pairs = self.state, list[tuple[Any, dict[str, Tensor]]]()
        for given, group in zip(groups, self.param_groups, strict=True):
            for key, p in zip(given["params"], group["params"], strict=True):
                if p in own:
                    pairs.append((state_dict["state"].get(key, {}), own[p]))
                    self._check_same(*pairs[-1], p)
        for given, group in zip(groups, self.param_groups, strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
        for found, into in pairs:
            for name in into:
                local(into[name]).copy_(local(found[name]))

    def _check_same(self, found: Mapping[str, Any], own: Mapping[str, Tensor], p: Tensor) -> None:
        kinds = [{k: (v.dtype, local(v).shape) for k, v in each.items()} for each in (found, own)]
        if other := sorted(k for k in own.keys() | found if kinds[0].get(k) != kinds[1].get(k)):
            raise ValueError(
                f"the state of a parameter {tuple(p.shape)} does not fit in {other[0]}: set "
                "zpp_lab.shard's masters and optimizer_state to what it was saved with, and load "
                "it through torch.distributed.checkpoint"
            )


def _check_group(group: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """ValueError where a value is out of range, or (`known`) for another key."""
    if known and (unknown := sorted(group.keys() - set(known))):
        raise ValueError(
            f"sharded.adamw: a group of parameters has {unknown[0]!r}, which AdamW here does not "
            "read: use params, lr, betas, eps and weight_decay"
        )
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < inf:
            raise ValueError(f"param_groups: {name}={group[name]}: use a finite number from 0 on")
    if not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"param_groups: betas={group['betas']}: use two numbers from 0 to below 1")
