"""What copies and kernels add to a model: the calls that are timed, and what follows from times."""

from __future__ import annotations

from collections.abc import Callable

import torch

from experiments.collectives.beside import table
from tests.collectives.shared import Boards, ThreadPeers, peers
from tests.collectives.threads import Post, on_ranks
from zpp_lab.bench.pulls import KINDS, Beside, Row, Unit, crossovers
from zpp_lab.collectives.pulls import Pull
from zpp_lab.config import ClusterConfig
from zpp_lab.crossover import Crossover

CPU = torch.device("cpu")


def test_every_way_is_called_alone_and_beside_products() -> None:
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)

    def connect(cluster: ClusterConfig, rank: int, post: Post) -> dict[str, ThreadPeers]:
        ways: tuple[Pull, ...] = ("copy", "kernel")
        return {way: peers(boards[way], True, way)(cluster, rank, post) for way in ways}

    boards = {way: Boards() for way in ("copy", "kernel")}

    def job(ways: dict[str, ThreadPeers]) -> list[Row]:
        calls = []

        def timed(call: Callable[[], object]) -> float:
            call()
            calls.append(call)
            return float(len(calls))

        beside = Beside(ways, timed, CPU, width=8)
        return [row for kind in KINDS for row in beside.rows(kind, 1, 4)]

    rows = on_ranks(cluster, job, connect)[0]
    assert [(r.kind, r.way) for r in rows] == [(k, w) for k in KINDS for w in ("copy", "kernel")]
    # of eight products, two ways alone, products, two ways beside them
    assert [r.alone_ms for r in rows] == [2.0, 3.0, 7.0, 8.0]
    assert [r.products_ms for r in rows] == [4.0, 4.0, 9.0, 9.0]
    assert [r.added_ms for r in rows] == [1.0, 2.0, 1.0, 2.0]
    assert rows[0].received == Unit(2, 0, 1, 4, CPU).layout.nbytes
    assert (
        table(rows).splitlines()[2]
        == "| exchange | 1 | 4 | 0.1 | 7.000 / +1.000 | 8.000 / +2.000 |"
    )


def row(kind: str, received: int, bits: int, way: str, added: float) -> Row:
    return Row(kind, bits, 1, received, way, 9.0, added, 9.0)  # type: ignore[arg-type]


def test_a_crossover_is_where_the_kernel_wins_from_there_on() -> None:
    rows = []
    for received, copied, pulled in ((10, 1, 3), (20, 3, 2), (40, 4, 5), (80, 9, 6), (160, 9, 7)):
        rows += [row("gather", received, 4, "copy", copied)]
        rows += [row("gather", received, 4, "kernel", pulled)]
        rows += [
            row("exchange", received, 4, "copy", 1.0),
            row("exchange", received, 4, "groups", 0),
        ]
        rows += [row("exchange", received, 4, "kernel", 1.0)]
    assert crossovers(2, rows) == Crossover(2, gather=80.0, exchange=None)
    assert crossovers(2, []) == Crossover(2)
