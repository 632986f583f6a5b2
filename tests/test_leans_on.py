"""Everything non-public of torch that the package leans on exists in the torch that is here.

Names that the code spells out are found by reading it. The rest (attributes of torch's objects,
operators, options) stands in tables beside the code, LEANS_ON.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from zpp_lab.collectives.peer import symmetric
from zpp_lab.collectives.transport import STARTS
from zpp_lab.engines import compile
from zpp_lab.engines.fsdp import comm, mesh, packed
from zpp_lab.engines.optim import shards

PACKAGE = Path(__file__).parents[1] / "zpp_lab"
TABLES = (comm.LEANS_ON, mesh.LEANS_ON, shards.LEANS_ON, symmetric.LEANS_ON, compile.LEANS_ON)


@cache
def spelled_out() -> list[str]:
    """Dotted names below torch that are not public, as the code imports or writes them."""
    found: set[str] = set()
    for text in (path.read_text() for path in PACKAGE.rglob("*.py")):
        if "torch" in text:
            found |= {name for name in _names(ast.parse(text)) if "._" in name}
    return sorted(found)


def _names(tree: ast.Module) -> Iterator[str]:
    known: dict[str, str] = {}  # local name → dotted name
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            own = [a for a in node.names if a.name.split(".")[0] == "torch"]
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in own}
    yield from known.values()
    for node in nodes:
        rest: list[str] = []
        while isinstance(node, ast.Attribute):
            rest.insert(0, node.attr)
            node = node.value
        if rest and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *rest])


def look_up(dotted: str) -> Any:
    """AttributeError or ImportError, naming the torch, when it is not there."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ImportError(dotted)


def test_the_code_is_read() -> None:
    names = spelled_out()
    assert "torch.distributed._symmetric_memory.rendezvous" in names
    assert "torch._dynamo.config.fail_on_recompile_limit_hit" in names


def test_what_the_code_spells_out_exists() -> None:
    missing = {}
    for dotted in spelled_out():
        try:
            look_up(dotted)
        except (AttributeError, ImportError) as error:
            missing[dotted] = error
    assert missing == {}, torch.__version__


@pytest.mark.parametrize(
    ("place", "name"), [(p, n) for table in TABLES for p, names in table.items() for n in names]
)
def test_what_the_tables_list_exists(place: str, name: str) -> None:
    assert _exists(place, name), f"torch {torch.__version__} has no {place}.{name}"


def _exists(place: str, name: str) -> bool:
    if place == "operators":
        return any(hasattr(torch.ops.fsdp, n) for n in name.split("|"))
    internals = torch.distributed.fsdp._fully_shard
    if place in ("FSDPState", "FSDPStateContext"):
        made = getattr(internals._fsdp_state, place)
        known = (*dir(made), *made.__init__.__code__.co_names)
        return any(n in known for n in name.split("|")) and hasattr(fully_shard, "state")
    if place == "FSDPParamGroup":
        group = internals._fsdp_param_group.FSDPParamGroup
        return name in (*dir(group), *group.__init__.__code__.co_names)
    if place == "FSDPParam":
        made = internals._fsdp_param.FSDPParam
        cut = inspect.unwrap(made._init_sharded_param)
        return name in (*dir(made), *made.__annotations__, *cut.__code__.co_names)
    return hasattr(look_up(place), name)


@pytest.mark.parametrize("operator", [n for n in packed.HANDLERS if n.startswith("fsdp::")])
def test_operators_of_fsdp2_fit_their_handlers(operator: str) -> None:
    overloads = getattr(torch.ops.fsdp, operator.removeprefix("fsdp::"), None)
    if overloads is None:  # a name of another torch; the table says which one must be there
        pytest.skip(f"torch {torch.__version__} has no {operator}")
    arguments = overloads.default._schema.arguments
    given = [a.name for a in arguments if not a.kwarg_only]
    named = {a.name: None for a in arguments if a.kwarg_only}
    inspect.signature(packed.HANDLERS[operator]).bind(*given, **named)


def test_what_transfers_start_with_exists() -> None:
    """The methods of torch's process groups behind its public functions."""
    for names in STARTS.values():
        assert any(hasattr(dist.ProcessGroup, name) for name in names), names
