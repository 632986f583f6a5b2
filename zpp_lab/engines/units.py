"""Cuts a model into units, as FSDP2 will group its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torch import nn

from zpp_lab.collectives.plan import Unit
from zpp_lab.layout import Parameter

ROOT = "root"
Block = tuple[str, nn.Module]  # its name in the model


@dataclass(frozen=True)
class Group:
    """Consecutive blocks of a model whose parameters travel together; `root`: the whole model,
    around all blocks, with what they leave."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for _, module in self.blocks)

    @property
    def for_fsdp2(self) -> nn.Module | list[nn.Module]:
        """What `fully_shard` takes for it: one module, or a list that travels as one."""
        return self.modules[0] if len(self.blocks) == 1 else list(self.modules)


def grouped(blocks: Iterable[Block], at_once: int = 1) -> list[Group]:
    """So many blocks a unit, in their order; the last unit may have fewer. One block gives the
    unit its name; of several `layers.0` and `layers.1` make `layers.0-1`."""
    every = list(blocks)
    parts = [tuple(every[i : i + at_once]) for i in range(0, len(every), at_once)]
    return [Group(_name([name for name, _ in part]), part) for part in parts]


def root_group(model: nn.Module) -> Group:
    return Group(ROOT, (("", model),))


def _name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    (path, _, _), (same, _, last) = names[0].rpartition("."), names[-1].rpartition(".")
    return f"{names[0]}-{last if path == same else names[-1]}"


def cut_units(
    model: nn.Module, groups: Sequence[Group], world: int, stored: Set[str] = frozenset()
) -> list[Unit]:
    """One unit for each group, then the root with what is left, which stays gathered between
    forward and backward. `stored`: parameters of a frozen base. ValueError when two blocks share
    a parameter."""
    left = dict(model.named_parameters())
    cut: list[Unit] = []
    for each in groups:
        own: dict[str, nn.Parameter] = {}
        for name, _ in each.blocks:
            found = {n: left.pop(n) for n in list(left) if n.startswith(f"{name}.")}
            if not found:
                raise ValueError(f"unit {name!r} has no parameters of its own: do units overlap?")
            own |= found
        cut.append(_unit(each.name, own, world, stored, True, len(each.blocks)))
    if left:
        cut.append(_unit(ROOT, left, world, stored, False, 1))
    return cut


def _unit(
    name: str,
    own: dict[str, nn.Parameter],
    world: int,
    stored: Set[str],
    reshard: bool,
    blocks: int,
) -> Unit:
    parameters = tuple(Parameter(n, tuple(p.shape), world) for n, p in own.items())
    trainable = frozenset(n for n, p in own.items() if p.requires_grad)
    return Unit(name, parameters, trainable, reshard, frozenset(stored & own.keys()), blocks)
