"""Which units a step ran, which are gathered ahead of the one that computes, and the host's time.

Hooks on the blocks see which units a forward and its backward ran (`Usage`). A model may leave a
module unused or take one branch of several. Such a unit has nothing gathered and nothing reduced,
so the plan must know. All ranks of a cluster must run the same units: the transfers of one that
does not would be waited for for ever.

The first forward shows the order (`Prefetch`). From then on a unit is gathered ahead while the one
before it computes, as long as it has run in every forward so far; a unit that was left out once is
gathered when it is called. In backward the units ahead are those of this very forward whose
outputs need a gradient, but for those that the last backward did not reach. A unit that stops
running is gathered in vain once: `wasted` says so.

`Laps` are the seconds that the parts of a step take the host: the first step's tell what a start
waits for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from zpp_lab.collectives.plan import PassUse, UnitPlan
from zpp_lab.collectives.traffic import Leg

Ahead = dict[str, list[str]]  # unit → the units gathered while it computes


class Laps:
    """Seconds of parts that follow one another; those of parts with one name are added."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class Usage:
    """Counts the calls of each unit, by name, since `start`. The last of `units` is the root.

    As FSDP2 does, it takes a unit of several modules for entered with the first that is called, for
    left once each has run, and for gathered again when backward reaches the output of the last.
    ValueError where a forward leaves some of them out, or backward reaches another one before.
    """

    def __init__(self, units: Mapping[str, Sequence[nn.Module]]) -> None:
        self.start()
        self.root = list(units)[-1]
        for name, modules in units.items():
            for module in modules:
                module.register_forward_pre_hook(partial(self._entered, name, modules))
                module.register_forward_hook(partial(self._left, name))

    def start(self) -> None:
        """A new forward begins."""
        self.forwards: Counter[str] = Counter()
        self.backwards: Counter[str] = Counter()
        self.order: list[str] = []  # of first calls
        self.awaited: dict[str, set[nn.Module]] = {}  # of a unit under way, who has still to run
        self.reached: set[tuple[str, int]] = set()  # calls that backward came back to
        self.needed: list[str] = []  # whose outputs need a gradient, in the order of calls

    def taken(self) -> PassUse:
        return PassUse(dict(self.forwards), dict(self.backwards))

    def _entered(self, name: str, modules: Sequence[nn.Module], *_: Any) -> None:
        if self.awaited.get(name):
            return
        self.awaited[name] = set(modules)
        if name not in self.forwards:
            self.order.append(name)
        self.forwards[name] += 1

    def _left(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.awaited[name].discard(module)
        if name == self.root:
            for part in (n for n, left in self.awaited.items() if left):
                raise _refused(part, "the model ran some of its blocks and skipped others")
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not outputs or not torch.is_grad_enabled():
            return
        call = name, self.forwards[name]
        if self.awaited[name]:
            when_reached(outputs, partial(self._went_on, call))
        else:
            self.needed.append(name)
            when_reached(outputs, partial(self._came_back, call))

    def _came_back(self, call: tuple[str, int], grad: Tensor) -> None:
        self.backwards[call[0]] += 1
        self.reached.add(call)

    def _went_on(self, call: tuple[str, int], grad: Tensor) -> None:
        if call not in self.reached:
            raise _refused(call[0], "backward reached one of its blocks before the last one")


def _refused(unit: str, what: str) -> ValueError:
    return ValueError(
        f"unit {unit}: {what}; blocks that are gathered together must run consecutively: set "
        "engine.blocks_per_unit=1"
    )


def when_reached(outputs: Sequence[Tensor], hook: Callable[[Tensor], None]) -> None:
    """`hook` gets the first gradient of `outputs` that a backward has, once in each backward."""
    # One tensor's own hook does that; torch's for several takes the host thrice as long.
    if len(outputs) == 1:
        outputs[0].register_hook(hook)
    else:
        register_multi_grad_hook(outputs, hook, mode="any")


class Prefetch:
    """Sets FSDP2's explicit prefetches. `root` is the last of `modules`, and runs around all."""

    def __init__(self, modules: Mapping[str, FSDPModule], root: str, count: int) -> None:
        self.modules, self.root, self.count = modules, root, count
        self.always: set[str] | None = None  # have run in every forward so far
        self.unreached: set[str] = set()  # no part of the last loss
        self.forward: Ahead = {}
        self.backward: Ahead = {}

    def before_backward(self, usage: Usage) -> None:
        """Backward's order is known now. FSDP2's own guess (one unit back) is switched off by
        naming the unit itself, which is there already."""
        order = [n for n in dict.fromkeys(usage.needed) if n not in (self.root, *self.unreached)]
        order.append(self.root)
        wanted = {
            name: order[max(0, i - max(1, self.count)) : i][::-1] for i, name in enumerate(order)
        }
        if wanted != self.backward:
            for name, ahead in wanted.items():
                self.modules[name].set_modules_to_backward_prefetch(self._of(ahead or [name]))
            self.backward = wanted

    def after_pass(self, usage: Usage) -> None:
        """Learn from a training forward."""
        ran = set(usage.order)
        self.unreached = {n for n in usage.needed if not usage.backwards[n]}
        self.always = ran if self.always is None else self.always & ran
        order = [n for n in usage.order if n in self.always and n != self.root]
        order.insert(0, self.root)
        once = [n for n in order if usage.forwards[n] == 1]  # others have no single successor
        wanted = {n: order[i + 1 : i + 1 + self.count] for i, n in enumerate(order) if n in once}
        if wanted != self.forward:
            for name, module in self.modules.items():
                module.set_modules_to_forward_prefetch(self._of(wanted.get(name, [])))
            self.forward = wanted

    def wasted(self, usage: Usage) -> tuple[Counter[str], Counter[str]]:
        """Units gathered in vain by this pass, for its forward and for its backward."""
        return (_in_vain(self.forward, usage.forwards), _in_vain(self.backward, usage.backwards))

    def settle(self, usage: Usage) -> None:
        """After a forward without a backward: drop what was gathered in vain."""
        for name in _in_vain(self.forward, usage.forwards):
            self.modules[name].unshard()  # it is under way: this only waits
            self.modules[name].reshard()

    def _of(self, names: Sequence[str]) -> list[FSDPModule]:
        return [self.modules[n] for n in names]


class InVain:
    """Gathers of one step that nobody needed, by unit: forward's and backward's."""

    def __init__(self, again: bool) -> None:
        self.again = again  # backward gathers what forward has let go (stage 3)
        self.clear()

    def clear(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.ran: set[str] = set()

    def add(self, found: tuple[Counter[str], Counter[str]], usage: Usage) -> None:
        """`found` in one pass. Where weights stay (stages 1 and 2) a unit that ran is there."""
        forward, backward = found
        stays = self.ran if not self.again else set()
        self.forward += Counter({n: c for n, c in forward.items() if n not in stays})
        if self.again:
            self.backward += backward
        self.ran |= set(usage.forwards)

    def legs(self, unit: UnitPlan) -> list[Leg]:
        return unit.gather_legs(self.forward[unit.unit.name], self.backward[unit.unit.name])


def _in_vain(ahead: Ahead, ran: Mapping[str, int]) -> Counter[str]:
    asked: Iterable[str] = {n for unit, names in ahead.items() if ran.get(unit) for n in names}
    return Counter(n for n in asked if not ran.get(n))
