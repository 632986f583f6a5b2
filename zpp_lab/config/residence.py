"""Where a rank's training state lies, by plane and unit, and what updates it.

`engine.place` says it by plane; `engine.offload` and `train.optimizer_place` are short-hands.
Whatever needs to know where something lies asks `Residence.of`, not the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from zpp_lab.config.schema import Config, Plane, TrainConfig

T = TypeVar("T")
Place = Literal["device", "host"]
PLANES: tuple[Plane, ...] = get_args(Plane)
EVERY = 2**31  # more units than a model has
# the order in which engine.place=auto moves them: the way out of gradients is idle, moments and low
# planes come and go once a step, and weights come for each gather
LEAVING: tuple[Plane, ...] = ("gradients", "moments", "masters", "weights")


def movable(train: TrainConfig) -> tuple[Plane, ...]:
    """Return the planes that host memory can have, in the order in which they go there."""
    found: tuple[Plane, ...] = () if train.optimizer_state == "fp32" else LEAVING[:2]
    if train.masters == "split":
        found = LEAVING
    # clipped by unit, gradients are not stored
    return tuple(p for p in found if p != "gradients" or train.clip_by == "norm")


def fewest(
    planes: Sequence[Plane], units: int, at: Callable[[Any], T], over: Callable[[T], int]
) -> T:
    """Return `at` of the engine.place that moves as few units' state as suffices for `over`, bytes
    too many on the GPU, to be 0; where none does, of all these planes. They leave in order; then,
    from the last to leave on, of each as many units come back as have room."""
    best, gone = at("device"), dict[Plane, int]()
    for plane in planes:
        if not over(best):
            break
        gone[plane] = units
        best = at(gone)
    for plane in [] if over(best) else reversed([*gone]):
        low, high = 0, units
        while low < high:
            middle = (low + high) // 2
            less = {one: count for one, count in (gone | {plane: middle}).items() if count}
            if over(found := at(less or "device")):
                low = middle + 1
            else:
                best, high = found, middle
        gone[plane] = high
    return best


@dataclass(frozen=True)
class Residence:
    """How many units have each plane in host memory; 0: none. With train.masters=split `masters`
    are their low planes, and `weights` the high ones, which gathers read. `waits`: whether a unit
    is updated before its next forward, not at the end of the step."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0
    weights: int = 0
    updates_on: Place = "device"
    waits: bool = False
    by_unit: bool = False  # updated within backward, so that no gradient stays

    @classmethod
    def of(cls, config: Config) -> Residence:
        place, train = config.engine.place, config.train
        if place == "auto":
            raise ValueError(
                "engine.place=auto: `zpp-lab train` and `zpp-lab plan` choose a placement; set "
                "engine.place to the one that `zpp-lab plan` prints"
            )
        if config.engine.offload:
            return cls(EVERY, EVERY, EVERY, updates_on="host")
        counts: Mapping[Plane, int] = {}
        if isinstance(place, dict):
            counts = place
        elif place == "host":
            counts = dict.fromkeys((p for p in movable(train) if p != "weights"), EVERY)
        elif train.optimizer_place == "host":
            counts = {"moments": EVERY}
        # node-replicated weights leave for other nodes at the end of the step
        at_once = config.recipe.kept and config.cluster.nodes > 1
        by_unit = train.clip_by == "unit"
        waits = place != "device" and not (at_once or by_unit)
        masters, moments, gradients, weights = (counts.get(plane, 0) for plane in PLANES)
        return cls(masters, moments, gradients, weights, waits=waits, by_unit=by_unit)

    @property
    def offloads(self) -> bool:
        """Whether FSDP2 keeps its shards in host memory, where they are updated."""
        return self.updates_on == "host"

    @property
    def passes(self) -> bool:
        """Whether something comes from host memory to be updated on the device."""
        return not self.offloads and any(getattr(self, plane) for plane in PLANES)

    @property
    def obstacle(self) -> str:
        """Return why no CUDA graph can hold a step (`engine.graph`); "" where one can."""
        moved = self.gradients or self.weights
        if self.waits or (moved and not self.offloads):
            return "engine.place brings state from host memory"
        if self.by_unit:
            return "train.clip_by=unit updates units within backward"
        return "engine.offload=true updates on the host" if self.offloads else ""

    def far(self, units: int) -> dict[Plane, range]:
        """Return which of a plan's units, of which the root is the last, have each plane in host
        memory where the device updates it: the last blocks first, then the root."""
        found: dict[Plane, range] = {}
        for plane in PLANES:
            count = 0 if self.offloads else min(getattr(self, plane), units)
            found[plane] = range(max(0, units - 1 - count), units - (count < units))
        return found
