"""Cuts a model into units, as FSDP2 will group its parameters.

`is_untouched` says whether FSDP2 runs a plan by itself. It stands here, so that who only counts
bytes need not import FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import nn

from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import quantizes_any
from zpp_lab.engines.optim.shards import local

ROOT = "root"
Block = tuple[str, nn.Module]  # its name in the model


def named_units(model: nn.Module) -> list[Block]:
    """The blocks whose parameters travel together, in the order of forward, without the root."""
    return list(model.units())  # type: ignore[operator]


def with_root(model: nn.Module, blocks: Iterable[Block]) -> dict[str, nn.Module]:
    """By name; last the root, the whole model around all blocks, with what they leave."""
    return dict([*blocks, (ROOT, model)])


def cut_units(
    model: nn.Module, blocks: Iterable[Block], world: int, stored: Set[str] = frozenset()
) -> list[Unit]:
    """One unit for each block, then the root with what is left, which stays gathered between
    forward and backward. `stored`: parameters of a frozen base. ValueError when two blocks share
    a parameter."""
    left = dict(model.named_parameters())
    cut: list[Unit] = []
    for name, _ in blocks:
        own = {n: left.pop(n) for n in list(left) if n.startswith(f"{name}.")}
        if not own:
            raise ValueError(f"unit {name!r} has no parameters of its own: do units overlap?")
        cut.append(_unit(name, own, world, stored, True))
    if left:
        cut.append(_unit(ROOT, left, world, stored, False))
    return cut


def _unit(
    name: str, own: dict[str, nn.Parameter], world: int, stored: Set[str], reshard: bool
) -> Unit:
    # of a parameter that others have cut already, this rank's part is ours to cut
    parameters = tuple(Parameter(n, tuple(local(p).shape), world) for n, p in own.items())
    trainable = frozenset(n for n, p in own.items() if p.requires_grad)
    return Unit(name, parameters, trainable, reshard, frozenset(stored & own.keys()))


def is_untouched(plan: Plan, ordered: bool) -> bool:
    """Whether the recipe asks for nothing that FSDP2 itself does not do."""
    config = plan.recipe.config
    if plan.stored:
        return False
    plain = not config.secondary and not config.two_hops and config.order == "rank"
    asked = ordered or not plain or plan.recipe.kept or quantizes_any(plan.recipe)
    return plan.recipe.cluster.world == 1 or not asked
