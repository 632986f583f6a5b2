"""Moves bytes between ranks, counts them, and says what was under way when it fails.

Gathers and reductions are written once over `Transport`. A `Shipment` is one unit's way over one
link: the owner fills its room and sends it; on the stream that sent it, `out` is whole afterwards.
Transports have `Streams` of their own, on which bytes travel beside encoding and decoding.

`ProcessGroups` is the transport over torch.distributed, on NCCL or gloo; `peer/transport.py` has
the one for ranks that read each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.collectives.watchdog import Watch, Watchdog
from zpp_lab.config.cluster import CELL, Axis, ClusterConfig

Group = dist.ProcessGroup | None
Link = Literal["world", "local", "across"]  # all ranks; ranks of a node; same local rank of nodes
Kind = Literal["gather", "exchange"]
LINKS: dict[Link, Set[Axis]] = {"world": CELL, "local": {"gpu"}, "across": {"node"}}
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What dist.all_gather_single and dist.all_to_all_single call: a step makes hundreds of
# transfers, and the checks around these methods took the host longer than the start itself.
# The second names from torch 2.13 on; a test looks for them.
STARTS = {
    "all_gather": ("_allgather_base", "all_gather_single"),
    "all_to_all": ("alltoall_base", "all_to_all_single"),
}


class Streams(Protocol):
    """What transports ask of a device's queues; a mark is a point of a stream."""

    def mark(self, old: Any = None, outside: bool = False) -> Any:
        """This point of the current stream. `old`: a mark that nobody will wait for any more;
        waits that were asked for before stay as they are. `outside`: a CUDA graph waits for it
        that does not hold it; the same of `old`."""
        ...

    def wait(self, mark: Any) -> None:
        """The current stream goes on once `mark` is reached."""
        ...

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """In it the named stream is the current one. It does not wait for others by itself."""
        ...

    def here(self) -> AbstractContextManager[Any]:
        """In it, as often as you like, the present stream is the current one."""
        ...


class CudaStreams:
    """`Streams` of the current CUDA device. Lanes go before other work: they keep links busy."""

    def __init__(self) -> None:
        self.lanes: dict[str, torch.cuda.Stream] = {}

    def mark(self, old: torch.cuda.Event | None = None, outside: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(external=True) if outside and old is None else old
        return torch.cuda.current_stream().record_event(event)

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def lane(self, name: str) -> AbstractContextManager[Any]:
        if name not in self.lanes:
            self.lanes[name] = torch.cuda.Stream(priority=-1)
        return torch.cuda.stream(self.lanes[name])

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.current_stream())


class HostStreams:
    """`Streams` of a CPU: all is done when a call is."""

    def mark(self, old: Any = None, outside: bool = False) -> None:
        return None

    def wait(self, mark: Any) -> None:
        return None

    def lane(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Overlap:
    """Transfers on a lane of their own, one after the other: while one is under way, the stream
    that uses this encodes the next. So at most two have buffers at a time, which lie in that
    stream's memory."""

    def __init__(self, streams: Streams, lane: str) -> None:
        self.streams, self.lane = streams, lane
        self.under_way: tuple[Any, Callable[[], None]] | None = None
        self.home: AbstractContextManager[Any] = nullcontext()  # the stream that encodes

    def ship(self, send: Callable[[], Any], finish: Callable[[], None]) -> None:
        """What `send` sends is encoded: let it travel, and finish the transfer before. `finish`
        follows on this stream, in the next call or in `join`."""
        ready = self.streams.mark()
        with self.streams.lane(self.lane):
            self.streams.wait(ready)
            send()
            arrived = self.streams.mark()
        self._finish()
        self.under_way, self.home = (arrived, finish), self.streams.here()

    def join(self) -> None:
        """Finish the last transfer; what the current stream does next waits for it."""
        if self.under_way is not None:
            with self.home:  # whose memory its buffers are
                self._finish()
                done = self.streams.mark()
            self.streams.wait(done)

    def _finish(self) -> None:
        if self.under_way is not None:
            (arrived, finish), self.under_way = self.under_way, None
            self.streams.wait(arrived)
            finish()

    def forget(self) -> None:
        """Leave the last transfer unfinished: its step has failed."""
        self.under_way = None


class Shipment(Protocol):
    """One unit's bytes on one link."""

    @property
    def room(self) -> Tensor:
        """What this rank sends, for the owner to fill."""
        ...

    @property
    def out(self) -> Tensor:
        """What arrives."""
        ...

    def send(self, keep: Tensor | None = None) -> Traffic:
        """The room is filled: let it travel. The bytes that this rank hands over, inside its
        node and beyond it.

        keep: see `kept_rows`; for gathers of one row over all ranks.
        """
        ...


class Transport(Protocol):
    """`label` names the wire and the unit for errors."""

    cluster: ClusterConfig
    rank: int
    watchdog: Watchdog
    group: Group  # of all its ranks; None: the world

    def gathering(
        self, out: Tensor, link: Link, label: str, held: Tensor | None = None
    ) -> Shipment:
        """`room` uint8 [R, n] of every member → `out` uint8 [R · members, n], contiguous: the
        members' first rows in their order, then their second ones.

        held: what the room shall have, so that the owner need not fill it.
        """
        ...

    def exchanging(self, out: Tensor, link: Link, label: str) -> Shipment:
        """`room` uint8 [R · members, n]: rows i, i + members ... go to member i; `out` uint8
        [members, R, n], contiguous: row i came from member i."""
        ...

    def reserve(self, kind: Kind, link: Link, nbytes: int) -> None:
        """Shipments of up to `nbytes` in one rank's room will come."""
        ...

    def watched(self, label: str, device: torch.device) -> AbstractContextManager[Any]:
        """The body starts a transfer of its own: it is timed, and an error names it."""
        ...


def peers(cluster: ClusterConfig, link: Link) -> tuple[int, int]:
    """How many other members a link has inside a rank's node, and on other nodes."""
    nodes, local = cluster.nodes, cluster.gpus_per_node
    inside = 0 if link == "across" else local - 1
    beyond = {"world": cluster.world - local, "local": 0, "across": nodes - 1}[link]
    return inside, beyond


def members(cluster: ClusterConfig, link: Link, rank: int) -> list[int]:
    """The ranks on `rank`'s link, in the order of rows."""
    return cluster.members(LINKS[link], rank)


def kept_rows(keep: Tensor, out: Tensor, place: int) -> None:
    """`keep` uint8 [k, n] ← every (members / k)th row of `out`, from `place` modulo that on: with
    k nodes the rows of this local rank."""
    step = out.shape[0] // keep.shape[0]
    keep.copy_(out[place % step :: step])


def traffic_of(cluster: ClusterConfig, link: Link, each: int) -> Traffic:
    """What a rank hands over that sends `each` bytes to every other member."""
    inside, beyond = peers(cluster, link)
    return Traffic(inside * each, beyond * each)


class Collectives:
    """Shipments over two calls that subclasses have; each returns the bytes handed over.

    all_gather(out, row, link, label)    `row` uint8 [1, n] of every member → `out` uint8
                                         [members, n]; `row` may lie in `out`
    all_to_all(out, rows, link, label)   part i of `rows` uint8, cut along dimension 0, goes to
                                         member i; part i of `out`, as large, came from it
    """

    group: Group = None

    def __init__(self, cluster: ClusterConfig, rank: int) -> None:
        self.cluster, self.rank, self.watchdog = cluster, rank, Watchdog(0.0)
        self.places = {link: self._place(link) for link in LINKS}

    def _place(self, link: Link) -> tuple[int, int]:
        """This rank's place on a link, and how many members it has."""
        ranks = members(self.cluster, link, self.rank)
        return ranks.index(self.rank), len(ranks)

    def all_gather(self, out: Tensor, row: Tensor, link: Link, label: str) -> Traffic:
        raise NotImplementedError

    def all_to_all(self, out: Tensor, rows: Tensor, link: Link, label: str) -> Traffic:
        raise NotImplementedError

    def gathering(
        self, out: Tensor, link: Link, label: str, held: Tensor | None = None
    ) -> Shipment:
        own, count = self.places[link]
        if held is None:
            held = out[own::count] if out.shape[0] > count else out.narrow(0, own, 1)
        return _Gathering(self, held, out, link, label)

    def exchanging(
        self, out: Tensor, link: Link, label: str, held: Tensor | None = None
    ) -> Shipment:
        """held: as in `gathering`."""
        count, rows, each = out.shape
        room = out.new_empty(rows * count, each) if held is None else held
        return _Exchanging(self, room, out, link, label)

    def reserve(self, kind: Kind, link: Link, nbytes: int) -> None:
        """Nothing is kept between shipments."""

    def watched(self, label: str, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()


class _Way:
    """A shipment of `Collectives`."""

    __slots__ = ("by", "label", "link", "out", "room")

    def __init__(self, by: Collectives, room: Tensor, out: Tensor, link: Link, label: str) -> None:
        self.by, self.room, self.out, self.link, self.label = by, room, out, link, label


class _Gathering(_Way):
    __slots__ = ()

    def send(self, keep: Tensor | None = None) -> Traffic:
        own, count = self.by.places[self.link]
        if self.room.shape[0] == 1:
            sent = self.by.all_gather(self.out, self.room, self.link, self.label)
            if keep is not None:
                kept_rows(keep, self.out, own)
            return sent
        sent = NOTHING
        for out, row in zip(self.out.split(count), self.room.split(1), strict=True):
            sent += self.by.all_gather(out, row, self.link, self.label)
        return sent


class _Exchanging(_Way):
    __slots__ = ()

    def send(self, keep: Tensor | None = None) -> Traffic:
        assert keep is None, "nothing of an exchange is kept"
        parts, (count, rows, _) = self.room, self.out.shape
        if rows > 1:
            parts = parts.view(rows, count, -1).transpose(0, 1).contiguous()
        return self.by.all_to_all(self.out, parts, self.link, self.label)


class ProcessGroups(Collectives):
    """`Transport` over torch.distributed, among `ranks` of the world, in their order; None: all.
    Every one of them must build it, at the same time.

    Reductions have groups of their own where there are GPUs, so that they overlap with gathers.
    ValueError when the cluster's shape does not fit the number of ranks.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        watchdog: Watchdog | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        every = range(dist.get_world_size())
        self.ranks = tuple(every if ranks is None else ranks)
        if len(self.ranks) != cluster.world:
            raise ValueError(
                f"cluster.nodes={cluster.nodes} × cluster.gpus_per_node={cluster.gpus_per_node} "
                f"needs {cluster.world} processes, but {len(self.ranks)} are running; start that "
                "many, or change the cluster"
            )
        self.whole = self.ranks == tuple(every)
        super().__init__(cluster, self.ranks.index(dist.get_rank()))
        self.watchdog = watchdog or Watchdog(0.0)
        self.gather_options, self.exchange_options = AllgatherOptions(), AllToAllOptions()
        self.gather_options.asyncOp = self.exchange_options.asyncOp = False
        places = range(cluster.world)
        self.group = None if self.whole else self._group(places)
        self.gathers = self._groups(self.group or dist.group.WORLD)
        self.reductions = self.gathers
        if torch.cuda.is_available():
            self.reductions = self._groups(self._group(places))

    def _groups(self, world: Group) -> dict[Link, Group]:
        nodes = range(0, self.cluster.world, self.cluster.gpus_per_node)
        return {
            "world": world if self.whole or self.cluster.world > 1 else None,
            "local": self._split("local", nodes, world),
            "across": self._split("across", range(self.cluster.gpus_per_node), world),
        }

    def _split(self, link: Link, firsts: range, world: Group) -> Group:
        """This rank's group on a link, None where it would be alone. All ranks of the world make
        all groups, or members alone do."""
        own: Group = None
        for first in firsts if self.whole else (self.rank,):
            places = members(self.cluster, link, first)
            if len(places) in (1, self.cluster.world):
                return world if len(places) > 1 else None
            group = self._group(places)
            own = group if self.rank in places else own
        return own

    def _group(self, places: Sequence[int]) -> Group:
        own = [self.ranks[place] for place in places]
        return dist.new_group(own, use_local_synchronization=not self.whole)

    def all_gather(self, out: Tensor, row: Tensor, link: Link, label: str) -> Traffic:
        group = self.gathers[link]
        if group is None:
            _copy(out[0], row)
            return NOTHING
        with self.watched(label, out.device):
            _done(_start(group, STARTS["all_gather"])(out, row, self.gather_options))
        return traffic_of(self.cluster, link, row.nbytes)

    def all_to_all(self, out: Tensor, rows: Tensor, link: Link, label: str) -> Traffic:
        group = self.reductions[link]
        if group is None:
            _copy(out, rows)
            return NOTHING
        with self.watched(label, out.device):
            _done(_start(group, STARTS["all_to_all"])(out, rows, [], [], self.exchange_options))
        return traffic_of(self.cluster, link, rows.nbytes // self.places[link][1])

    def watched(self, label: str, device: torch.device) -> Watch:
        """The body starts a transfer: it is timed, and an error names it."""
        return self.watchdog.watch(label, device, self.rank)


def _start(group: dist.ProcessGroup, names: tuple[str, ...]) -> Any:
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _done(work: dist.Work | None) -> None:
    """On a GPU the current stream waits, not the host."""
    if work is not None:
        work.wait()


def _copy(out: Tensor, source: Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.view(-1).copy_(source.reshape(-1))
