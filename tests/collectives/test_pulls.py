"""Rows that are read where they lie, later and on any stream: order, reuse of slots, equal bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.collectives.shared import Boards, ThreadPeers, peers
from tests.collectives.test_peer import all_equal, expected, fill, stamp
from tests.collectives.threads import on_ranks
from zpp_lab.codecs import BlockCodec, Codec, RawCodec
from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.gather import Gather, GatherSpec
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.peer import _Shown
from zpp_lab.collectives.pulls import Pulls
from zpp_lab.collectives.reduce import Reduce, ReduceSpec
from zpp_lab.collectives.ring import FREE
from zpp_lab.collectives.transport import Kind, Link, Shipment, Transport, members, traffic_of
from zpp_lab.config import ClusterConfig, Wire
from zpp_lab.crossover import Crossover
from zpp_lab.layout import Layout
from zpp_lab.ops import MAX_ROWS
from zpp_lab.ops.rows import Rows, whole


def show(
    transport: ThreadPeers, kind: Kind, link: Link, nbytes: int, use: int, rows: int = 1
) -> Shipment:
    """Encoded on one stream and sent on another, not always the same; nobody has read it yet."""
    count = len(members(transport.cluster, link, transport.rank))
    shape = (rows * count, nbytes) if kind == "gather" else (count, rows, nbytes)
    lanes = transport.lanes
    with lanes.lane("encode"):
        shipment = transport.pulling(kind, link, shape, "test")
        if kind == "gather":
            room, value = shipment.room, stamp(transport.rank, use)
            lanes.do(lambda: (room.fill_(value), None)[1])
        else:
            fill(transport, _Sized(shipment, torch.empty(shape)), use)  # type: ignore[arg-type]
        filled = lanes.mark()
    with lanes.lane(f"send {use % 2}"):
        lanes.wait(filled)
        assert shipment.send() == traffic_of(transport.cluster, link, rows * nbytes)
    return shipment


class _Sized:
    """What `fill` looks at."""

    def __init__(self, shipment: Shipment, out: Tensor) -> None:
        self.room, self.out = shipment.room, out


def read(
    transport: ThreadPeers, shipment: Shipment, lane: str, late: threading.Event | None = None
) -> Tensor:
    """What arrived, read on a stream that waits for nobody by itself."""
    assert isinstance(shipment, _Shown)
    seen, lanes = torch.zeros(shipment.shape, dtype=torch.uint8), transport.lanes
    with lanes.lane(lane), shipment.reading() as rows:
        if late is not None:
            lanes.do(lambda: (late.wait(0.2), None)[1])
        lanes.do(lambda: (seen.copy_(whole(rows)), None)[1])
    return seen


def program(seed: int, kinds: tuple[Kind, ...], ahead: int) -> Iterator[tuple[str, int, Kind, int]]:
    """Shipments that are copied or shown, and readings up to `ahead` shipments later, in any
    order of uses, each once: (what, use, kind, bytes)."""
    draw, unread = random.Random(seed), []
    for use in range(24):
        kind, nbytes = draw.choice(kinds), 16 * draw.choice((1, 2, 3, 5 + use // 8))
        way = draw.choice(("copy", "show", "show", "show"))
        yield way, use, kind, nbytes
        unread += [(use, kind, nbytes)] * (way == "show")
        while unread and (len(unread) > ahead or draw.random() < 0.5):
            yield ("read", *unread.pop(draw.randrange(len(unread)) if ahead > 1 else 0))
    for left in unread:
        yield ("read", *left)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(2))
def test_every_byte_is_of_its_own_use(ahead: int, seed: int) -> None:
    """Readings on several streams, late, out of order, more of them open than there are slots, and
    buffers that grow meanwhile."""
    from tests.collectives.test_peer import ship

    cluster, kinds = ClusterConfig(nodes=1, gpus_per_node=3 - seed), ("gather", "exchange")

    def job(transport: ThreadPeers) -> bool:
        found, wanted, shown = [], [], {}
        for what, use, kind, nbytes in program(seed * 10 + ahead, kinds, ahead):  # type: ignore[arg-type]
            if what == "show":
                shown[use] = show(transport, kind, "world", nbytes, use)
                continue
            if what == "copy":
                found.append(ship(transport, kind, "world", nbytes, use)[0])
            else:
                found.append(read(transport, shown.pop(use), f"read {use % 3}"))
            wanted.append(expected(transport, kind, "world", nbytes, use))
        transport.lanes.finish()
        return all_equal(found, wanted)

    assert all(on_ranks(cluster, job, peers(Boards())))


@pytest.mark.parametrize("rule", ["read", "freed", None])
def test_a_slow_kernel_needs_both_rules(rule: str | None) -> None:
    """Where one rank's kernel reads slowly, the others overwrite its rows without either rule; or
    the ranks meet out of turn, and wait for each other in vain."""
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)
    overwritten = threading.Event()  # rank 0 has filled its first slot again

    def job(transport: ThreadPeers) -> bool:
        ring, found, wanted = transport.ring("gather", "world"), [], []
        late = overwritten if transport.rank == 1 else None
        for use in range(6):
            if rule == "read":
                ring.read = None
            elif rule == "freed":
                ring.freed = [FREE] * ring.slots
            found.append(read(transport, show(transport, "gather", "world", 32, use), "main", late))
            wanted.append(expected(transport, "gather", "world", 32, use))
            if transport.rank == 0 and use == ring.slots:
                with transport.lanes.lane("encode"):
                    transport.lanes.do(overwritten.set)
        transport.lanes.finish()
        return all_equal(found, wanted)

    boards = Boards() if rule is None else Boards(patience=5)
    try:
        right = on_ranks(cluster, job, peers(boards))[1]
    except AssertionError as error:
        if rule is None or "never met" not in str(error):
            raise
        right = False
    assert right == (rule is None)


def test_one_unit_ahead_costs_no_meeting_and_no_copy() -> None:
    """FSDP2's order: the next unit is encoded and sent once this one is decoded."""
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)

    def job(transport: ThreadPeers) -> tuple[int, bool]:
        shipment, here = show(transport, "gather", "world", 32, 0), []
        for use in range(1, 9):
            read(transport, shipment, "main")
            shipment = show(transport, "gather", "world", 32, use)
            here.append(shipment.here)  # type: ignore[attr-defined]
        transport.lanes.finish()
        return transport.memories[0].calls, all(h is None for h in here)

    assert on_ranks(cluster, job, peers(Boards())) == [(9, True)] * 2


def test_what_was_never_read_leaves_its_slot_as_a_copy() -> None:
    cluster = ClusterConfig(nodes=1, gpus_per_node=2)

    def job(transport: ThreadPeers) -> bool:
        first = show(transport, "gather", "world", 32, 0)
        for use in range(1, 4):
            show(transport, "gather", "world", 32, use)  # a unit gathered in vain
        seen = read(transport, first, "main")
        transport.lanes.finish()
        with pytest.raises(AssertionError, match="read once"):
            first.reading()
        return torch.equal(seen, expected(transport, "gather", "world", 32, 0))

    assert all(on_ranks(cluster, job, peers(Boards())))


def outcome(transport: Transport, codec: Codec, reverse: bool, hierarchical: bool) -> list[Tensor]:
    """Gathers, with hpZ's backward, and reductions of units of odd sizes."""
    cluster, found = transport.cluster, []
    several = min(cluster.nodes, cluster.gpus_per_node) > 1
    hops: tuple[Wire, ...] = ("grads_intra", "grads_inter") if several else ("grads_intra",)
    for number, numels in enumerate([(3, 1000), (8192, 77, 1), (20_000, 16)]):
        names = [f"p{i}" for i in range(len(numels))]
        codecs = [codec] * (len(numels) - 1) + [RawCodec(torch.float32)]  # the last one is exempt
        layout = Layout.build(names, numels, codecs)
        rng = torch.Generator().manual_seed(100 * number + transport.rank)
        shards = [torch.randn(n, generator=rng) for n in numels]
        grads = [torch.randn(cluster.world * n, generator=rng) for n in numels]
        spec = GatherSpec("u", layout, layout, torch.float32, True, several and hierarchical)
        gather = Gather(spec, transport, Ledger(), Clock(1))
        for backward in (False, True):
            packet = gather.pack(shards, backward)
            gather.send(packet)
            outs = [torch.empty(cluster.world * n) for n in numels]
            gather.unpack(packet, outs)
            found += outs
        out = torch.empty(layout.numel)
        reduction = ReduceSpec("u", hops, (layout,) * len(hops), reverse)
        Reduce(reduction, transport, Ledger(), Clock(1)).run(tuple(names), grads, out)
        found.append(out)
    return found


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_kernels_and_copies_give_the_same_bits(
    shape: tuple[int, int], bits: int, symmetric: bool
) -> None:
    cluster = ClusterConfig(nodes=shape[0], gpus_per_node=shape[1])
    codec = BlockCodec(bits, 64, symmetric, "nearest", "fp32", 16 if bits == 4 else 0)

    def job(transport: Transport) -> list[Tensor]:
        return outcome(transport, codec, reverse=bits == 8, hierarchical=bits != 6)

    ways = [on_ranks(cluster, job, peers(Boards(), True, pull)) for pull in ("copy", "kernel")]
    for copied, pulled in zip(*ways, strict=True):
        assert all_equal(copied, pulled)


def test_who_pulls() -> None:
    """Kernels from the measured size on, for the measured number of ranks and kind alone."""
    assert not Pulls("copy").by_kernel("gather", 2, 2, 1 << 40)
    assert Pulls("kernel").by_kernel("exchange", 2, 2, 1)
    assert not Pulls("kernel").by_kernel("gather", 4, MAX_ROWS + 1, 1)
    auto = Pulls("auto", 0, {2: Crossover(2, gather=100.0)})
    assert auto.by_kernel("gather", 2, 2, 200)
    assert not auto.by_kernel("gather", 2, 2, 199)
    assert not auto.by_kernel("exchange", 2, 2, 1 << 40)
    assert not auto.by_kernel("gather", 4, 4, 1 << 40)
    assert (auto.share("gather"), auto.share("exchange")) == (0, 32)
    assert Pulls("kernel", 16).share("gather") == 16
    assert [bool(p.describe()) for p in (Pulls("auto"), auto, Pulls("kernel"))] == [0, 1, 1]


def test_rows_are_those_of_their_stack() -> None:
    room = torch.arange(3 * 2 * 16, dtype=torch.uint8).view(3, 2, 16)
    rows = Rows((room[2, 0], room[0, 0], room[1, 0]), (2, 0, 1), 1)
    assert torch.equal(rows.stacked(), room[:, 0])
    assert torch.equal(rows.columns(3, 5).stacked(), room[:, 0, 3:8])
    table = rows.table.tolist()
    assert table[:4] == [1, 16, 0, 1]
    assert table[4:6] == [room[2, 0].data_ptr(), 2]
    sums = Rows(tuple(room), (0, 1, 2))
    assert torch.equal(sums.flip(0).stacked(), room.flip(0))
    assert sums.table.tolist()[:4] == [0, 16, 16, 2]
    with pytest.raises(AssertionError, match="each row once"):
        Rows(tuple(room), (0, 1, 1))
