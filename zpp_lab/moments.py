"""The moments of a step at which a rank's memory is counted, and items that are counted there.

A step's memory rises and falls, so every item is counted at seven moments, and at two of an
evaluation, whose batches have a size of their own:

    loss        all activations are there, the loss goes back
    early       one of the first two units to go back computes, of which the second finds the
                first's reduction under way: most activations are still there
    early sent  its gradients are reduced: its weights and activations are gone
    late        the last unit to go back computes: its blocks' activations, nearly all gradients
    late sent   its gradients are reduced
    root        the root unit is reduced: activations are gone, all gradients are there
    update      norm, clipping and optimizer
    eval        a block computes held-out tokens, perhaps with the master weights
    eval loss   their losses
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Moment = Literal[
    "loss", "early", "early sent", "late", "late sent", "root", "update", "eval", "eval loss"
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

GIB = 2**30
NOT_EVALUATED: dict[Moment, int] = {"eval": 0, "eval loss": 0}


@dataclass(frozen=True)
class Item:
    """One kind of memory of one rank, in bytes at each moment. `place`: gpu or host. `outside`:
    of torch's allocator, whose statistics do not see it."""

    name: str
    nbytes: dict[Moment, int]
    place: Literal["gpu", "host"] = "gpu"
    assumed: bool = False
    outside: bool = False

    @property
    def most(self) -> int:
        return max(self.nbytes.values())


@dataclass(frozen=True)
class Estimate:
    """All items of one rank."""

    items: tuple[Item, ...]

    def at(self, moment: Moment) -> int:
        """Bytes on the GPU, assumed constants included."""
        return sum(i.nbytes[moment] for i in self.items if i.place == "gpu")

    @property
    def peak_moment(self) -> Moment:
        return max(MOMENTS, key=self.at)

    @property
    def peak(self) -> int:
        """Bytes that the device must have."""
        return self.at(self.peak_moment)

    @property
    def tensors(self) -> int:
        """What torch.cuda.max_memory_allocated would say: the peak without assumed constants, and
        without what torch's allocator does not see."""
        seen = [i for i in self.items if i.place == "gpu" and not (i.assumed or i.outside)]
        return max(sum(i.nbytes[m] for i in seen) for m in MOMENTS)

    @property
    def host(self) -> int:
        return sum(i.most for i in self.items if i.place == "host")

    def item(self, name: str) -> Item:
        return next(i for i in self.items if i.name == name)


def always(nbytes: int) -> dict[Moment, int]:
    return dict.fromkeys(MOMENTS, nbytes)


def moments(
    loss: int = 0, early: int = 0, late: int = 0, root: int = 0, update: int = 0
) -> dict[Moment, int]:
    """What a unit holds while it computes it holds while it is sent, unless told otherwise."""
    return {
        "loss": loss,
        "early": early,
        "early sent": early,
        "late": late,
        "late sent": late,
        "root": root,
        "update": update,
        **NOT_EVALUATED,
    }
