"""A `Transport` between threads of one process: gathers and reductions without any backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Collectives, Link, members, traffic_of
from zpp_lab.config.schema import ClusterConfig


class Post:
    """Where ranks leave tensors for each other."""

    def __init__(self, world: int) -> None:
        self.slots: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=240)


class ThreadTransport(Collectives):
    """All ranks make the same calls, so one barrier for all links will do."""

    def __init__(self, cluster: ClusterConfig, rank: int, post: Post) -> None:
        super().__init__(cluster, rank)
        self.post = post

    def all_gather(self, out: Tensor, row: Tensor, link: Link, label: str) -> Traffic:
        for i, sent in enumerate(self._exchange(row, link)):
            out[i] = sent[0]
        return self._count(link, row.nbytes)

    def all_to_all(self, out: Tensor, rows: Tensor, link: Link, label: str) -> Traffic:
        own = members(self.cluster, link, self.rank).index(self.rank)
        count = self.places[link][1]
        for part, sent in zip(out.chunk(count), self._exchange(rows, link), strict=True):
            part.view(-1).copy_(sent.chunk(count)[own].reshape(-1))
        return self._count(link, rows.nbytes // count)

    def _exchange(self, tensor: Tensor, link: Link) -> list[Tensor]:
        self.post.slots[self.rank] = tensor.clone()
        self.post.barrier.wait()
        found = [self.post.slots[r] for r in members(self.cluster, link, self.rank)]
        self.post.barrier.wait()
        return found

    def _count(self, link: Link, each: int) -> Traffic:
        return traffic_of(self.cluster, link, each)


def on_ranks(
    cluster: ClusterConfig,
    job: Callable[[Any], Any],
    connect: Callable[[ClusterConfig, int, Post], Any] = ThreadTransport,
) -> list[Any]:
    """`job` on every rank at once, with what `connect` gives it; its results in rank order, or
    the first exception."""
    post, results = Post(cluster.world), [None] * cluster.world
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = job(connect(cluster, rank, post))
        except BaseException as error:
            faults.append(error)
            post.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(cluster.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise next(
            (f for f in faults if not isinstance(f, threading.BrokenBarrierError)), faults[0]
        )
    return results
