"""The peer transport's protocol on streams that are threads: order, reuse, sizes, bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.collectives.shared import Boards, ThreadPeers, peers
from tests.collectives.threads import on_ranks
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Link, Shipment, members, traffic_of
from zpp_lab.config.schema import ClusterConfig

SHAPES = [(1, 3), (2, 2), (3, 1)]


def stamp(rank: int, use: int) -> int:
    return (rank * 61 + use * 17 + 1) % 256


def fill(transport: ThreadPeers, shipment: Shipment, use: int) -> None:
    """Encode, as a kernel would: on the current stream, every byte of the room."""
    room, value = shipment.room, stamp(transport.rank, use)
    if shipment.out.dim() == 3:  # a row for each member
        rows = torch.arange(room.shape[0], dtype=torch.uint8)[:, None] % shipment.out.shape[0]
        transport.lanes.do(lambda: (room.copy_(rows + value), None)[1])
    else:
        transport.lanes.do(lambda: (room.fill_(value), None)[1])


def ship(
    transport: ThreadPeers, kind: str, link: Link, nbytes: int, use: int, rows: int = 1
) -> tuple[Tensor, Traffic]:
    """One shipment, encoded on one stream, sent on another (not always the same) and read on a
    third, as FSDP2 does, with a copy of what arrived."""
    count = len(members(transport.cluster, link, transport.rank))
    lead = (rows * count,) if kind == "gather" else (count, rows)
    out = torch.zeros(*lead, nbytes, dtype=torch.uint8)
    make = transport.gathering if kind == "gather" else transport.exchanging
    lanes = transport.lanes
    with lanes.lane("encode"):
        shipment = make(out, link, "test")
        fill(transport, shipment, use)
        filled = lanes.mark()
    with lanes.lane(f"send {use % 2}"):
        lanes.wait(filled)
        sent = shipment.send()
        arrived = lanes.mark()
    lanes.wait(arrived)
    seen = torch.empty_like(out)
    lanes.do(lambda: (seen.copy_(out), None)[1])
    return seen, sent


def expected(
    transport: ThreadPeers, kind: str, link: Link, nbytes: int, use: int, rows: int = 1
) -> Tensor:
    ranks = members(transport.cluster, link, transport.rank)
    own = ranks.index(transport.rank) if kind == "exchange" else 0
    column = torch.tensor([(stamp(r, use) + own) % 256 for r in ranks], dtype=torch.uint8)
    if kind == "gather":
        return column.repeat(rows)[:, None].expand(-1, nbytes)
    return column[:, None, None].expand(-1, rows, nbytes)


def all_equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["gather", "exchange"])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_reused_in_order(kind: str, shape: tuple[int, int]) -> None:
    """Many uses, sizes that grow and shrink, random delays: every byte is of its own use."""
    cluster = ClusterConfig(nodes=shape[0], gpus_per_node=shape[1])

    def job(transport: ThreadPeers) -> bool:
        found, wanted = [], []
        for use in range(9):
            nbytes = 16 * (1 + use % 4)
            seen, sent = ship(transport, kind, "world", nbytes, use)
            assert sent == traffic_of(cluster, "world", nbytes)
            found.append(seen)
            wanted.append(expected(transport, kind, "world", nbytes, use))
        transport.lanes.finish()
        return all_equal(found, wanted)

    assert all(on_ranks(cluster, job, peers(Boards())))


WAYS: list[tuple[str, Link, int]] = [
    ("gather", "across", 1),
    ("exchange", "local", 2),
    ("gather", "local", 2),
    ("exchange", "across", 1),
]


def test_links_and_kinds_have_slots_of_their_own() -> None:
    """Rows of several nodes; shipments on different links under way at once."""
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)

    def job(transport: ThreadPeers) -> bool:
        found, wanted = [], []
        for use in range(4):
            for kind, link, rows in WAYS:
                seen, sent = ship(transport, kind, link, 48, use, rows)
                assert sent == traffic_of(cluster, link, 48 * rows)
                found.append(seen)
                wanted.append(expected(transport, kind, link, 48, use, rows))
        transport.lanes.finish()
        return all_equal(found, wanted)

    assert all(on_ranks(cluster, job, peers(Boards())))


def test_what_is_held_is_copied_into_the_slot() -> None:
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)

    def job(transport: ThreadPeers) -> Tensor:
        held = torch.full((2, 16), transport.rank, dtype=torch.uint8)
        out = torch.zeros(4, 16, dtype=torch.uint8)
        transport.gathering(out, "local", "test", held).send()
        transport.lanes.finish()
        return out[:, 0].view(2, 2)

    results = on_ranks(cluster, job, peers(Boards()))
    assert [r.tolist() for r in results] == [[[0, 1]] * 2] * 2 + [[[2, 3]] * 2] * 2


def test_memory_is_allocated_once_for_what_is_reserved() -> None:
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)

    def job(transport: ThreadPeers) -> list[int]:
        counts = []
        for nbytes in (100, 700):
            transport.reserve("gather", "world", nbytes)
        for use, nbytes in enumerate((16, 688, 64, 1600, 16)):
            ship(transport, "gather", "world", nbytes, use)
            counts.append(transport.memories[0].allocations)
        transport.lanes.finish()
        return counts

    assert on_ranks(cluster, job, peers(Boards())) == [[1, 1, 1, 2, 2]] * 2


def read_late(transport: ThreadPeers, after: threading.Event, seconds: float) -> None:
    """This rank's reads wait for `after`, no longer than `seconds`: it may never come."""
    memory = transport.memories[0]
    pull = memory.pull

    def late(*args: Any) -> None:
        transport.lanes.do(lambda: (after.wait(seconds), None)[1])
        pull(*args)

    memory.pull = late  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", ["read", "barriers", None])
def test_a_slow_reader_needs_both_rules(rule: str | None) -> None:
    """Where one rank reads slowly, the others overwrite it without either of the ring's waits."""
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)
    overwritten = threading.Event()  # rank 0 has filled its first slot again

    def job(transport: ThreadPeers) -> bool:
        ring, found, wanted = transport.ring("gather", "world"), [], []
        if transport.rank == 1:
            read_late(transport, overwritten, 0.2 if rule is None else 240)
        for use in range(6):
            if rule is not None:
                setattr(ring, rule, None if rule == "read" else [None] * ring.slots)
            seen, _ = ship(transport, "gather", "world", 32, use)
            found.append(seen)
            wanted.append(expected(transport, "gather", "world", 32, use))
            if transport.rank == 0 and use == ring.slots:
                with transport.lanes.lane("encode"):
                    transport.lanes.do(overwritten.set)
        try:
            transport.lanes.finish()
        except AssertionError:  # without a rule meetings may come out of turn, too
            assert rule is not None
            return False
        return all_equal(found, wanted)

    boards = Boards() if rule is None else Boards(patience=5)
    assert on_ranks(cluster, job, peers(boards))[1] == (rule is None)
