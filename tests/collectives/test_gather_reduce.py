"""Gathers and reductions over threads: what arrives, and how many bytes it took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.collectives.shared import Boards, peers
from tests.collectives.threads import ThreadTransport, on_ranks
from zpp_lab.codecs import BlockCodec, Codec, RawCodec, SegmentNoise, encode, kernels, parameter_id
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.gather import Gather, GatherSpec
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.reduce import Reduce, ReduceSpec
from zpp_lab.collectives.traffic import Traffic, gather_traffic, hop_traffic, secondary_traffic
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.config.wires import Wire

CODECS: list[Codec] = [
    RawCodec(torch.float32),
    BlockCodec(8, 16),
    BlockCodec(4, 16, False),
    BlockCodec(4, 16, rounding="stochastic"),
    BlockCodec(6, 32, hadamard=16),
]
kinds = st.sampled_from(["groups", "peers"])
clusters = st.sampled_from([(1, 2), (2, 2), (3, 1), (2, 3), (3, 2)])
lengths = st.lists(st.integers(1, 70), min_size=1, max_size=3)


def transport_of(kind: str) -> Any:
    return ThreadTransport if kind == "groups" else peers(Boards(), at_once=True)


def layout_of(codec: Codec, numels: list[int]) -> Layout:
    return Layout.build([f"p{i}" for i in range(len(numels))], numels, [codec] * len(numels))


def values(numels: list[int], seed: int, rows: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(rows * n, generator=rng) for n in numels]


@given(clusters, lengths, st.sampled_from(CODECS), st.booleans(), st.booleans(), kinds)
@settings(max_examples=40, deadline=None)
def test_gather(
    shape: tuple[int, int],
    numels: list[int],
    codec: Codec,
    hierarchical: bool,
    secondary: bool,
    kind: str,
) -> None:
    """Every rank decodes what each rank's codec makes of its shards, in both kinds of gather, and
    again from what hpZ kept."""
    cluster = ClusterConfig(nodes=shape[0], gpus_per_node=shape[1])
    hierarchical = hierarchical and min(shape) > 1
    layout = layout_of(codec, numels)
    spec = GatherSpec("u", layout, layout, torch.float32, secondary, hierarchical)

    def job(transport: ThreadTransport) -> tuple[list[Tensor], Ledger]:
        ledger, decoded = Ledger(), []
        gather = Gather(spec, transport, ledger, Clock(3))
        for backward in (False, True) if secondary else (False,):
            packet = gather.pack(values(numels, transport.rank), backward)
            gather.send(packet)
            outs = [torch.empty(cluster.world, n) for n in numels]
            gather.unpack(packet, outs)
            decoded.append(torch.cat(outs, dim=1))
        return decoded, ledger

    results = on_ranks(cluster, job, transport_of(kind))
    wanted = torch.stack([coded(codec, numels, rank) for rank in range(cluster.world)])
    assert all(torch.equal(t, wanted) for decoded, _ in results for t in decoded)
    total = Traffic(0, 0)
    for _, ledger in results:
        total += ledger.step["weights_forward"]
    assert total == gather_traffic(cluster, layout.nbytes, hierarchical)
    if secondary:
        back = [ledger.step["weights_backward"] for _, ledger in results]
        assert back == [back[0]] * cluster.world
        assert back[0] * cluster.world == secondary_traffic(cluster, layout.nbytes)


def coded(codec: Codec, numels: list[int], rank: int) -> Tensor:
    """What arrives of a rank: its shards one by one through the codec, without layout or ops."""
    noise, parts = Clock(3).weights_noise("weights_forward", rank), []
    for i, x in enumerate(values(numels, rank)):
        row = encode(codec, x[None], SegmentNoise(noise, parameter_id(f"p{i}")))
        parts.append(codec.decode(row, len(x))[0])
    return torch.cat(parts)


@given(
    clusters,
    st.sampled_from(["world", "node", "none"]),
    lengths,
    st.sampled_from(CODECS),
    st.sampled_from(CODECS),
    st.booleans(),
    kinds,
)
@settings(max_examples=60, deadline=None)
def test_reduce(
    shape: tuple[int, int],
    optimizer: str,
    numels: list[int],
    codec: Codec,
    second: Codec,
    reversed_order: bool,
    kind: str,
) -> None:
    """Sums in rank order, as a plain loop over encoded rows gives them: each rank those of its
    part, or of its copy's part, or all of them."""
    cluster = ClusterConfig(nodes=shape[0], gpus_per_node=shape[1])
    hops: tuple[Wire, ...] = ("grads_intra", "grads_inter") if min(shape) > 1 else ("grads_intra",)
    hops += ("grads_intra",) if optimizer == "none" and len(hops) == 2 else ()
    layouts = tuple(layout_of(c, numels) for c in (codec, second, codec)[: len(hops)])
    cut = cluster.world if optimizer == "world" or len(hops) == 1 else cluster.gpus_per_node
    spec = ReduceSpec("u", hops, layouts, reversed_order, cut)
    names = tuple(s.name for s in layouts[0].segments)

    def job(transport: ThreadTransport) -> tuple[Tensor, Ledger]:
        ledger, out = Ledger(), torch.empty(sum(numels) * (cut if len(hops) == 3 else 1))
        reduce = Reduce(spec, transport, ledger, Clock(3))
        reduce.run(names, values(numels, transport.rank, cut), out)
        return out, ledger

    results = on_ranks(cluster, job, transport_of(kind))
    sums = [by_hand(cluster, spec, numels, part) for part in range(cut)]
    if len(hops) == 3:
        wanted = [returned(spec, sums)] * cut
    else:
        wanted = [kernels.finish_sums(layouts[-1], s)[0] for s in sums]
    for rank, (out, _) in enumerate(results):
        assert torch.equal(out, wanted[rank % cut])
    total: dict[Wire, Traffic] = {"grads_intra": Traffic(0, 0), "grads_inter": Traffic(0, 0)}
    for _, ledger in results:
        for wire in total:
            total[wire] += ledger.step[wire]
    for wire, traffic in hop_traffic(cluster, hops, [x.nbytes for x in layouts], cut):
        total[wire] += traffic * -1
    assert not any(map(any, total.values()))


def returned(spec: ReduceSpec, sums: list[Tensor]) -> Tensor:
    """What every rank decodes of all parts' sums."""
    _, second, third = spec.layouts
    payload = torch.empty(spec.cut, third.nbytes, dtype=torch.uint8)
    for part, own in enumerate(sums):
        noise = Clock(3).rows_noise(spec.hops[2], part, [spec.cut + part])
        kernels.encode_sums(second, third, own, noise, payload[part : part + 1])
    outs = [torch.empty(spec.cut, s.numel) for s in third.segments]
    kernels.decode(third, payload, outs)
    return torch.cat([out.flatten() for out in outs])


def by_hand(cluster: ClusterConfig, spec: ReduceSpec, numels: list[int], part: int) -> Tensor:
    """One part's sums, encoding row by row; of two hops in the domain of the second."""
    world, local = cluster.world, cluster.gpus_per_node
    order = range(world)[::-1] if spec.reversed_order else range(world)
    first = spec.layouts[0]

    def row(source: int) -> Tensor:
        payload = torch.empty(spec.cut, first.nbytes, dtype=torch.uint8)
        noise = Clock(3).rows_noise(spec.hops[0], source, range(spec.cut))
        kernels.encode(first, values(numels, source, spec.cut), noise, payload)
        return payload[part]

    if len(spec.hops) == 1:
        sums = torch.zeros(1, first.coded_numel)
        kernels.decode_sum(first, torch.stack([row(s) for s in order])[:, None], sums)
        return sums
    second, arrived = spec.layouts[1], []
    for node in sorted({s // local for s in order}, reverse=spec.reversed_order):
        sums = torch.zeros(1, first.coded_numel)
        rows = torch.stack([row(s) for s in order if s // local == node])
        kernels.decode_sum(first, rows[:, None], sums)
        sender = node * local + part % local
        payload = torch.empty(1, second.nbytes, dtype=torch.uint8)
        noise = Clock(3).rows_noise(spec.hops[1], sender, [part])
        kernels.encode_sums(first, second, sums, noise, payload)
        arrived.append(payload)
    sums = torch.zeros(1, second.coded_numel)
    kernels.decode_sum(second, torch.stack(arrived), sums)
    return sums


def test_backward_without_forward_says_so() -> None:
    layout = layout_of(BlockCodec(8, 16), [20])
    spec = GatherSpec("layers.0", layout, layout, torch.float32, secondary=True)

    def job(transport: ThreadTransport) -> None:
        Gather(spec, transport, Ledger(), Clock(1)).pack(values([20], 0), backward=True)

    with pytest.raises(RuntimeError, match=r"layers\.0"):
        on_ranks(ClusterConfig(nodes=2, gpus_per_node=1), job)


def test_in_one_node_nothing_is_kept_and_backward_has_the_forwards_bits() -> None:
    """The one row that hpZ would keep is the rank's own: stochastic rounding draws it again."""
    layout = layout_of(BlockCodec(4, 16, rounding="stochastic"), [100])
    spec = GatherSpec("u", layout, layout, torch.float32, secondary=True)

    def job(transport: ThreadTransport) -> list[Tensor]:
        gather = Gather(spec, transport, Ledger(), Clock(1))
        found = []
        for backward in (False, True):
            packet = gather.pack(values([100], transport.rank), backward)
            gather.send(packet)
            assert gather.secondary is None
            found.append(torch.empty(2, 100))
            gather.unpack(packet, found[-1:])
        return found

    for forward, backward in on_ranks(ClusterConfig(nodes=1, gpus_per_node=2), job):
        assert torch.equal(forward, backward)


def test_fewer_bytes_than_planned_are_an_error() -> None:
    layout = layout_of(BlockCodec(8, 16), [20])
    spec = GatherSpec("layers.1", layout, layout, torch.float32)

    def job(transport: ThreadTransport) -> None:
        transport._count = lambda link, each: Traffic(0, 0)  # type: ignore[method-assign]
        gather = Gather(spec, transport, Ledger(), Clock(1))
        gather.send(gather.pack(values([20], 0), backward=False))

    with pytest.raises(LedgerError, match=r"layers\.1, weights_forward"):
        on_ranks(ClusterConfig(nodes=1, gpus_per_node=2), job)
