"""The optimizer of a model that `zpp_lab.shard` was given with place, masters, optimizer_state or
clip_by: AdamW to the bits of a run.

Its step takes the gradients wherever they lie and hands the update to `Resident`, which updates
each unit just before its next forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zpp_lab.codecs.numerics import clip_factor
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.fsdp.loops.placed import LoopByUnit, LoopResident, Placing
from zpp_lab.engines.fsdp.resident import updates
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.optim.adamw import CompactAdamW
from zpp_lab.engines.optim.shards import local, sharded_as
from zpp_lab.engines.watch import unit_not_finite

USE = "use optimizer = sharded.adamw(...)"


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
        cut = placing.masters.cut
        fix = "bfloat16()" if cut else "float(), or set masters='split'"
        for name, p in self.names.items():
            if p.dtype != (torch.bfloat16 if cut else torch.float32):
                raise ValueError(
                    f"{name} is {p.dtype}, and masters={'split' if cut else 'fp32'}: convert the "
                    f"model by model.{fix}"
                )
        low = {p: placing.masters.low[n] for n, p in self.names.items() if cut}
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
        self.marked: dict[str, tuple[int, int]] = {}  # of the gradients that it clips
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
        """Begin a forward with gradients."""
        if self.clipped is not None and any(p.grad is not None for p in self.names.values()):
            raise ValueError(
                "sharded.clip_grad_norm_ came before the step's last backward: call it after all "
                "micro-steps"
            )
        self.clipped = None
        self.resident.forward(first)

    def _enter(self) -> None:
        """Let updates within the next backward take the present settings."""
        self._take_settings()
        assert isinstance(self.resident, LoopByUnit)
        self.resident.step = self.loop.wrapped.clock.step

    def _take_settings(self) -> None:
        """Keep each group's settings: a schedule may change them before a late update."""
        for group in self.param_groups:
            _check_group(group)
        self.inner.param_groups = self._settings()

    def _settings(self) -> list[dict[str, Any]]:
        return [{**g, "lr": float(g["lr"])} for g in self.param_groups]

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Return the gradients' norm, fp64; the step scales them so that it is at most `limit`."""
        if self.placing.residence.by_unit:
            raise ValueError(
                "clip_by='unit' has clipped and updated each unit within backward: leave "
                "sharded.clip_grad_norm_ out, or use clip_by='norm'"
            )
        assert isinstance(self.resident, LoopResident)
        grads = self._grads(self.resident)
        before: Any = 1.0 if self.clipped is None else self.clipped[1]
        norm = self.loop.total(self.resident.norm()) * before  # gradients are as they were
        if grads:
            self.clipped = norm, before * clip_factor(norm, limit)
            self.marked = self._marked(grads)
        return norm

    def _grads(self, resident: LoopResident) -> dict[str, Tensor]:
        """Return the gradients that are there. ValueError for some that `clip` did not see."""
        resident.settle()
        grads = resident.grads()
        self._check_known(grads)
        if self.clipped is not None and (
            new := dict(self._marked(grads).items() - self.marked.items())
        ):
            raise ValueError(
                f"the gradient of {min(new)} has changed since sharded.clip_grad_norm_: call it "
                "after the last backward, and change gradients before it"
            )
        return grads

    def _marked(self, grads: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Return what shows whether gradients are other ones, or have changed in place, where a
        DTensor counts for itself."""
        found = {}
        for name, grad in grads.items():
            whole = self.parameters[name].grad
            more = whole._version if type(whole) is DTensor else 0
            found[name] = grad.data_ptr(), grad._version + more
        return found

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
        left = [name for name, p in self.parameters.items() if p.grad is not None]
        self._check_known(left)
        if left:
            raise ValueError(
                f"clip_by='unit' has updated {left[0]} within backward, so a gradient that was set "
                "since then would be lost: use clip_by='norm'"
            )
        for found, group in zip(self.inner.param_groups, self._settings(), strict=True):
            for name in self.defaults if resident.norms else ():
                if found[name] != group[name]:
                    raise ValueError(
                        f"param_groups: {name}={group[name]} was set after the forward, but "
                        f"clip_by='unit' has updated with {found[name]} within backward: set it "
                        "before the step's first forward, or use clip_by='norm'"
                    )
        norms = dict(resident.norms)
        resident.start()
        if not all(bool(torch.isfinite(norm)) for norm in norms.values()):
            raise unit_not_finite(self.loop.wrapped.clock.step, norms)
        return torch.zeros((), device=self.loop.device)

    def _step(self, resident: LoopResident) -> Tensor:
        grads, step = self._grads(resident), self.loop.wrapped.clock.step
        if not grads:
            return torch.zeros((), device=self.loop.device)
        self._take_settings()
        clipped, self.clipped = self.clipped, None
        norm, factor = clipped or (self.loop.total(resident.norm()), None)
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
        """Return moments by parameter, in their stored dtype; with masters='split' low planes and
        marks too."""
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
        """Load the state of an optimizer with the same groups and sharding. ValueError, and nothing
        changes, where its moments have another dtype or shape."""
        groups = state_dict["param_groups"]
        sizes = [[len(g["params"]) for g in every] for every in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has groups of {sizes[0]} parameters, not {sizes[1]}")
        own, pairs = self.state, list[tuple[Any, dict[str, Tensor]]]()
        for given, group in zip(groups, self.param_groups, strict=True):
            for key, p in zip(given["params"], group["params"], strict=True):
                if p in own:
                    pairs.append((state_dict["state"].get(key, {}), own[p]))
                    _check_same(*pairs[-1], p)
        for given, group in zip(groups, self.param_groups, strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
        for found, into in pairs:
            for name in into:
                local(into[name]).copy_(local(found[name]))


_TORCHS = ("amsgrad", "maximize")  # what torch's AdamW has besides


def _check_same(found: Mapping[str, Any], own: Mapping[str, Tensor], p: Tensor) -> None:
    """ValueError where a parameter's state is kept otherwise."""
    kinds = [{k: (v.dtype, local(v).shape) for k, v in each.items()} for each in (found, own)]
    if other := sorted(k for k in own.keys() | found if kinds[0].get(k) != kinds[1].get(k)):
        raise ValueError(
            f"the state of a parameter {tuple(p.shape)} does not fit in {other[0]}: set "
            "zpp_lab.shard's masters and optimizer_state to what it was saved with, freeze the "
            "same parameters, and load it through torch.distributed.checkpoint"
        )


def _check_group(group: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """ValueError where a value is out of range, or for a key that would be ignored: another one
    than those in `known`, or of torch's AdamW. Schedules may add keys."""
    others = group.keys() - set(known) if known else {k for k in _TORCHS if group.get(k)}
    if unknown := sorted(others):
        raise ValueError(
            f"sharded.adamw: a group of parameters has {unknown[0]!r}, which AdamW here does not "
            "read: use params, lr, betas, eps and weight_decay"
        )
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < inf:
            raise ValueError(f"param_groups: {name}={group[name]}: use a finite number from 0 on")
    if not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"param_groups: betas={group['betas']}: use two numbers from 0 to below 1")
