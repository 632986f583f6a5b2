"""What one rank of `test_symmetric.py` does: gathers and reductions over process groups, and by
copies from peers' memory."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.codecs import BlockCodec, Codec, RawCodec
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.gather import Gather, GatherSpec
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.reduce import Reduce, ReduceSpec
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.config.wires import Wire

SIZES = [(3, 1000), (40_000, 70_000, 33), (9_000_000, 20_000_000), (77,)]


def outcome(transport: Transport, device: torch.device, codec: Codec) -> list[Tensor]:
    """Three rounds over units of all sizes, nothing waited for in between."""
    cluster, found = transport.cluster, []
    several = min(cluster.nodes, cluster.gpus_per_node) > 1
    hops: tuple[Wire, ...] = ("grads_intra", "grads_inter") if several else ("grads_intra",)
    for number in range(3 * len(SIZES)):
        numels = SIZES[number % len(SIZES)]
        names = [f"p{i}" for i in range(len(numels))]
        layout = Layout.build(names, numels, [codec] * len(numels))
        rng = torch.Generator(device).manual_seed(100 * number + transport.rank)
        shards = [torch.randn(n, device=device, generator=rng) for n in numels]
        grads = [torch.randn(cluster.world * n, device=device, generator=rng) for n in numels]
        spec = GatherSpec("u", layout, layout, torch.float32, hierarchical=several)
        gather = Gather(spec, transport, Ledger(), Clock(1))
        packet = gather.pack(shards, backward=False)
        gather.send(packet)
        outs = [torch.empty(cluster.world * n, device=device) for n in numels]
        gather.unpack(packet, outs)
        out = torch.empty(layout.numel, device=device)
        if not several:  # hpZ: rows kept by the first gather, held by the second
            spec = GatherSpec("u", layout, layout, torch.float32, secondary=True)
            gather = Gather(spec, transport, Ledger(), Clock(1))
            for backward in (False, True):
                packet = gather.pack(shards, backward)
                gather.send(packet)
                whole = [torch.empty(cluster.world * n, device=device) for n in numels]
                gather.unpack(packet, whole)
                found += whole
        reduction = ReduceSpec("u", hops, (layout,) * len(hops))
        Reduce(reduction, transport, Ledger(), Clock(1)).run(tuple(names), grads, out)
        found += [*outs, out]
    return found


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    shapes = [ClusterConfig(nodes=1, gpus_per_node=world)]
    if world % 2 == 0 and world > 2:
        shapes.append(ClusterConfig(nodes=2, gpus_per_node=world // 2))
    for cluster in shapes:
        groups = connect(cluster, Watchdog(60.0), "groups", device)
        peer = connect(cluster, Watchdog(60.0), "peer", device)
        for codec in (RawCodec(torch.float32), BlockCodec(4, 64), BlockCodec(6, 32, hadamard=16)):
            wanted, found = (outcome(way, device, codec) for way in (groups, peer))
            same = (torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
            assert all(same), (cluster, codec)
    torch.cuda.synchronize()
    print("the same bits", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
