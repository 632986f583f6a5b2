"""Cuts a model into units, as FSDP2 will group its parameters."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import nn

from zpp_lab.layout import Parameter
from zpp_lab.plan import Unit


def cut_units(
    model: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
    world: int,
    stored: Set[str] = frozenset(),
) -> list[Unit]:
    """One unit for each named module, then the root with what is left, which stays gathered
    between forward and backward. `stored`: parameters of a frozen base. ValueError when two units
    share a parameter."""
    left = dict(model.named_parameters())
    cut: list[Unit] = []
    for name, _ in units:
        own = {n: left.pop(n) for n in list(left) if n.startswith(f"{name}.")}
        if not own:
            raise ValueError(f"unit {name!r} has no parameters of its own: do units overlap?")
        cut.append(_unit(name, own, world, stored, reshard=True))
    if left:
        cut.append(_unit("root", left, world, stored, reshard=False))
    return cut


def _unit(
    name: str, own: dict[str, nn.Parameter], world: int, stored: Set[str], reshard: bool
) -> Unit:
    parameters = tuple(Parameter(n, tuple(p.shape), world) for n, p in own.items())
    trainable = frozenset(n for n, p in own.items() if p.requires_grad)
    return Unit(name, parameters, trainable, reshard, frozenset(stored & own.keys()))
