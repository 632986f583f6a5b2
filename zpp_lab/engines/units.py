"""Cuts a model into units, as FSDP2 will group its parameters.

`is_untouched` says whether FSDP2 runs a plan by itself. It stands here, so that who only counts
bytes need not import FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from zpp_lab.codecs.layout import Parameter
from zpp_lab.collectives.plan import Plan, Unit
from zpp_lab.collectives.recipe import quantizes_any
from zpp_lab.config.residence import Plane, Residence
from zpp_lab.engines.optim.shards import local

ROOT = "root"
Block = tuple[str, nn.Module]  # its name in the model
Blocks = Mapping[str, nn.Module]  # of one unit, by their names, in the order of forward


def named_units(model: nn.Module, blocks_per_unit: int) -> list[Blocks]:
    """The blocks whose parameters travel together, in the order of forward, without the root; the
    last unit may have fewer."""
    blocks: list[Block] = list(model.units())  # type: ignore[operator]
    starts = range(0, len(blocks), blocks_per_unit)
    return [dict(blocks[i : i + blocks_per_unit]) for i in starts]


def unit_name(blocks: Blocks) -> str:
    names = list(blocks)
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def with_root(model: nn.Module, units: Iterable[Blocks]) -> dict[str, Sequence[nn.Module]]:
    """Modules by the unit's name; last the root, the whole model around all units, with what they
    leave."""
    return {**{unit_name(blocks): tuple(blocks.values()) for blocks in units}, ROOT: (model,)}


def cut_units(
    model: nn.Module, units: Iterable[Blocks], world: int, stored: Set[str] = frozenset()
) -> list[Unit]:
    """The blocks' units, then the root with what is left, which stays gathered between forward and
    backward. `stored`: parameters of a frozen base. ValueError when two units share a parameter,
    or one unit trains several dtypes."""
    units = list(units)
    _check_shared(model, units)
    left = dict(model.named_parameters())
    parts: Callable[[str], int] = getattr(model, "parts_of", lambda name: 1)
    cut: list[Unit] = []
    for blocks in units:
        own: dict[str, nn.Parameter] = {}
        for name in blocks:  # block by block: sums over parameters then have one order for any size
            found = {n: left.pop(n) for n in list(left) if n.startswith(f"{name}.")}
            if not found:
                raise ValueError(
                    f"block {name!r} has no parameters of its own: set model.units "
                    "to blocks that do not overlap"
                )
            own |= found
        cut.append(_unit(unit_name(blocks), own, world, stored, True, len(blocks), parts))
    if left:
        cut.append(_unit(ROOT, left, world, stored, False, 0, parts))
    return cut


def _unit(
    name: str,
    own: dict[str, nn.Parameter],
    world: int,
    stored: Set[str],
    reshard: bool,
    blocks: int,
    parts: Callable[[str], int],
) -> Unit:
    check_dtypes(name, own)
    parameters = tuple(
        # of a parameter that others have cut already, this rank's part is ours to cut
        Parameter(
            n,
            tuple(local(p).shape),
            world,
            None if p.is_floating_point() else p.dtype,
            parts=parts(n),
        )
        for n, p in own.items()
    )
    trainable = frozenset(n for n, p in own.items() if p.requires_grad)
    return Unit(name, parameters, trainable, reshard, frozenset(stored & own.keys()), blocks)


def check_dtypes(unit: str, own: Mapping[str, nn.Parameter]) -> None:
    """ValueError where the unit's trained parameters, by name, are not all of one float dtype, as
    FSDP2 wants for their reduction."""
    found: dict[torch.dtype, str] = {}
    for name, p in own.items():
        if p.requires_grad:
            found.setdefault(p.dtype, name)
    if len(found) > 1 or any(not dtype.is_floating_point for dtype in found):
        raise ValueError(
            f"unit {unit}: {' and '.join(f'{n} is {d}' for d, n in found.items())}, but the "
            "trained parameters of a unit need one floating-point dtype: convert the model, such "
            "as model.float(), freeze one of them, or put them into other units"
        )


def _check_shared(model: nn.Module, units: Iterable[Blocks]) -> None:
    """ValueError where a parameter is in two units, the root among them: FSDP2 would shard it
    twice."""
    unit_of = {f"{block}.": unit_name(blocks) for blocks in units for block in blocks}
    seen: dict[int, tuple[str, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = next((u for prefix, u in unit_of.items() if name.startswith(prefix)), ROOT)
        first, other = seen.setdefault(id(p), (unit, name))
        if first != unit:
            raise ValueError(
                f"{other} of unit {first} and {name} of unit {unit} are one parameter, but a "
                "parameter belongs to one unit: make units of other modules, such as one that "
                "contains both, or leave both to the root, which holds what no unit has"
            )


def is_untouched(plan: Plan, ordered: bool) -> bool:
    """Whether the recipe asks for nothing that FSDP2 itself does not do."""
    config = plan.recipe.config
    if plan.stored:
        return False
    plain = not config.secondary and not config.two_hops and config.order == "rank"
    asked = ordered or not plain or plan.recipe.kept or quantizes_any(plan.recipe)
    return plan.recipe.cluster.world == 1 or not asked


def far_names(plan: Plan, residence: Residence) -> dict[Plane, frozenset[str]]:
    """Return the parameters of which host memory has each plane where the device updates them."""
    units = [[p.name for p in u.unit.parameters] for u in plan.units]
    far = residence.far(len(units))
    return {plane: frozenset(n for i in which for n in units[i]) for plane, which in far.items()}
