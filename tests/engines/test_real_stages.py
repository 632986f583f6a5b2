"""Stages in processes of their own, over gloo and in every schedule: every bit is the virtual
engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import cells_world
from tests.engines.cells_world import STAGES, both_dtypes, compared
from tests.engines.test_stages import Shape
from tests.two_ranks import answers_of, two_gpus, two_ranks

FAST: dict[Shape, tuple[str, ...]] = {
    (1, 2, 1, 2): ("raw", "pipe8"),
    (1, 4, 1, 4): ("overlap",),
    (2, 2, 1, 2): ("mixed", "interleaved_last", "overlap_one"),
    (1, 4, 2, 2): ("acts8",),
}
NODES = ("differences", "differences_g4")  # need several nodes of a stage
WHOLE = ("recomputed", "compiled")  # no tensor parts; test_real_parts.py compiles some
SLOW: dict[Shape, list[str]] = {
    (1, 2, 1, 2): [
        *("raw", "raw_bf16", "pipe8", "pipe8_fp32", "sham", "hadamard", "recomputed", "compiled"),
        "overlap",
    ],
    (2, 2, 1, 2): both_dtypes(c for c in STAGES if c not in (*NODES, "compiled")),
    (1, 4, 2, 2): ["raw", "acts8", "pipe8"],
    (2, 4, 2, 2): both_dtypes(c for c in STAGES if c not in (*NODES, *WHOLE)),
    (4, 1, 1, 2): both_dtypes(["differences", "pipe8"]),
    (4, 2, 1, 2): both_dtypes(["differences_g4"]),
    (4, 1, 1, 4): ["raw_bf16", "pipe8", "overlap"],
    (4, 2, 1, 4): ["mixed", "last", "overlap_last", "overlap_one"],
}


@pytest.mark.parametrize("shape", FAST, ids=str)
def test_real_stages_have_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, FAST[shape])
    assert said == dict.fromkeys(FAST[shape], "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SLOW, ids=str)
def test_every_real_case_has_the_virtual_ones_bits(shape: Shape) -> None:
    said = compared(shape, SLOW[shape])
    assert said == dict.fromkeys(SLOW[shape], "")


# ---------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=two_ranks), pytest.param(4, marks=two_gpus)]
)
def test_parts_and_stages_on_gpus(world: int, tmp_path: Path) -> None:
    """Two tensor parts, and two stages, over NCCL."""
    found = answers_of("tests.engines.cells_world", tmp_path, 400, world)
    wanted = dict.fromkeys(cells_world.names(world), "")
    assert {name: found.get(name, "missing") for name in wanted} == wanted, found["output"]
