"""Tensor parts in processes of their own, over gloo: every bit is the virtual engine's."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.engines.cells_world import (
    PARTS,
    both_dtypes,
    compare,
    compared,
    own_state,
    real,
    replayed,
    same_bits,
    size,
    steps,
)
from tests.engines.fake_graph import faked
from tests.engines.fsdp_world import run_world
from tests.engines.test_stages import Shape
from zpp_lab.codecs import RawCodec
from zpp_lab.collectives.acts import Parts
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.config.cluster import ClusterConfig
from zpp_lab.config.wires import ACTS_FORWARD
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints

FAST: dict[Shape, tuple[str, ...]] = {
    (1, 4, 2, 1): ("mixed", "qwen2"),
    (1, 2, 2, 1): ("raw_bf16", "qwen3"),
    (1, 4, 4, 1): ("acts8",),
}
SHAPE: Shape = (1, 4, 2, 1)
SOME_NODES = ("zeropp", "differences", "node")  # need several nodes with several GPUs of a cell


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_parts_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, FAST[shape])
    assert said == dict.fromkeys(FAST[shape], "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (1, 4, 2, 1), (1, 4, 4, 1), (2, 4, 2, 1)], ids=str)
def test_all_recipes_with_real_parts(shape: Shape) -> None:
    several, alone = shape[0] > 1, size(shape) == shape[2]
    cases = [case for case in PARTS if several or case not in SOME_NODES]
    cases = [case for case in cases if not case.startswith(("compiled", "traced"))]
    weights = ("mixed", "qwen2")  # a cell of one sends none
    cases = both_dtypes(case for case in cases if not alone or case not in weights)
    said = compared(shape, cases)
    assert said == dict.fromkeys(cases, "")


def raw_slices() -> list[str]:
    """Sizes and dtypes at which real parts exchange other values than parts of one process."""
    groups, bad = ProcessGroups(ClusterConfig(1, 2)), []
    dtypes = torch.float32, torch.bfloat16
    for rows, own, sent, plain in product((1, 3, 4), dtypes, dtypes, (False, True)):
        recipe = SimpleNamespace(acts_codec=lambda _, sent=sent: RawCodec(sent))
        plan: Any = SimpleNamespace(tp=2, recipe=recipe)
        both = [Parts(plan, Clock(0), Ledger(), transport) for transport in (groups, None)]
        for parts in both:
            parts.plain = plain
        made = torch.Generator().manual_seed(rows)
        for kind, each in (("gather", rows), ("scatter", 2 * rows)):
            xs = [torch.randn(each, 6, generator=made).to(own) for _ in range(2)]
            (found,) = getattr(both[0], kind)(ACTS_FORWARD, "x", [xs[groups.rank]])
            wanted = getattr(both[1], kind)(ACTS_FORWARD, "x", xs)[groups.rank]
            if found.dtype != wanted.dtype or not torch.equal(found, wanted):
                bad.append(f"{kind} {rows} {own} {sent} {plain}")
    return bad


def test_raw_slices_of_all_sizes_arrive() -> None:
    """Whether they travel from where they lie, or as payloads filled up to 16 bytes."""
    assert run_world(2, raw_slices) == []


def from_fake_graphs(shape: Shape, cases: list[str]) -> dict[str, str]:
    with faked():
        return replayed(shape, cases)


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        ((1, 2, 2, 1), ["drawn", "qwen3"]),
        pytest.param((2, 4, 2, 1), ["mixed", "zeropp", "last"], marks=pytest.mark.slow),
        pytest.param((1, 4, 4, 1), ["raw", "drawn"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_from_a_graph_equal_eager_ones(shape: Shape, cases: list[str]) -> None:
    """Around telemetry, and where each step's batches come a step ahead."""
    assert run_world(size(shape), from_fake_graphs, shape, cases) == dict.fromkeys(cases, "")


def resumed_between_replays(folder: str) -> list[Any]:
    """Whether steps, weights and moments are those of the run that went on, and both replayed."""
    torch.use_deterministic_algorithms(True)
    with faked():
        first, other = (real("drawn", (1, 2, 2, 1), graph="auto") for _ in range(2))
        steps(first, 0, 5)
        store = Checkpoints(Path(folder), 1, shared=True)
        store.save(5, first.state_dict())
        store.wait()
        dist.barrier()
        done, step = steps(first, 5, 10), other.load_checkpoint(Saved(store.path(5)))
        again, (a, b) = steps(other, step, 10), (own_state(first), own_state(other))
        same = done == again and all(same_bits(value, b[name]) for name, value in a.items())
        return [same, step, min(first.graph.replays - 3, other.graph.replays) > 0]


def test_parts_resume_between_replays(tmp_path: Path) -> None:
    assert run_world(2, resumed_between_replays, str(tmp_path)) == [True, 5, True]


def graphs_of_regions() -> dict[str, Any]:
    """Both engines with compiled blocks, traced, but not built: what differs, and the graphs of the
    real one."""
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        found: dict[str, Any] = compare((1, 2, 2, 1), ["traced"])
        counters.clear()
        engine = real("traced", (1, 2, 2, 1))
    steps(engine, 0, 2)
    found["step"] = counters["stats"]["unique_graphs"]
    found["breaks"] = dict(counters["graph_break"])
    return found


def test_compiled_parts_share_a_graph_for_each_region() -> None:
    """Attention, MLP, and what lies between; exchanges are in none of them."""
    assert run_world(2, graphs_of_regions) == {"traced": "", "step": 3, "breaks": {}}


COMPILED: dict[Shape, list[str]] = {
    (1, 2, 2, 1): both_dtypes(["compiled"]),
    (2, 2, 2, 1): [*both_dtypes(["compiled"]), "compiled_mixed"],
    (1, 4, 2, 2): ["compiled"],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_compiled_parts_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, COMPILED[shape])
    assert said == dict.fromkeys(COMPILED[shape], "")
