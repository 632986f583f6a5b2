"""The all-gather of a unit's weights: encode the own shard, move payload rows, decode.

Three calls, so that the owner can run each on a stream of its own:

    packet = gather.pack(shards, backward)    this rank's row is encoded
    gather.send(packet)                       rows travel
    gather.unpack(packet, outs)               whole parameters are decoded

A hierarchical gather sends each row to one rank of every other node first; the N rows that a
rank then holds go to its neighbours in the node. These N rows are what hpZ keeps for backward,
as encoded bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab import ops
from zpp_lab.codecs import RawCodec
from zpp_lab.collectives.clock import Clock
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import Traffic, gather_traffic, secondary_traffic
from zpp_lab.collectives.transport import Link, Transport
from zpp_lab.config import Wire
from zpp_lab.layout import Layout


@dataclass(frozen=True)
class GatherSpec:
    """What a recipe asks of one unit's gathers. `secondary`: backward uses what hpZ kept."""

    unit: str
    forward: Layout
    backward: Layout
    dtype: torch.dtype  # of raw weights
    secondary: bool = False
    hierarchical: bool = False


@dataclass
class Packet:
    """A gather under way. `payload` uint8 [W, nbytes]; `held` uint8 [N, nbytes] of the node."""

    wire: Wire
    layout: Layout
    payload: Tensor
    held: Tensor | None = None
    kept: bool = False  # `held` was kept since forward: nothing to encode or to send across


class Gather:
    """Gathers of one unit by one rank."""

    def __init__(
        self, spec: GatherSpec, transport: Transport, ledger: Ledger, clock: Clock
    ) -> None:
        self.spec, self.transport, self.ledger, self.clock = spec, transport, ledger, clock
        self.cluster, self.rank = transport.cluster, transport.rank
        self.node, self.local = divmod(self.rank, self.cluster.gpus_per_node)
        self.secondary: Tensor | None = None  # hpZ's rows, from a forward to its backward
        segments = spec.forward.segments
        raw = [RawCodec(spec.dtype)] * len(segments)
        self.raw = Layout.build([s.name for s in segments], [s.numel for s in segments], raw)

    def release(self) -> None:
        """Forget what hpZ kept: the weights have changed, or no backward will come."""
        self.secondary = None

    def pack(self, shards: Sequence[Tensor], backward: bool) -> Packet:
        """Encode this rank's padded shards, flat, one per segment."""
        if backward and self.spec.secondary and not self.clock.master:
            return self._from_secondary(shards[0].device)
        wire: Wire = "weights_backward" if backward else "weights_forward"
        packet = self._empty(wire, self._layout(wire), shards[0].device)
        row = self._own_row(packet)
        noise = self.clock.weights_noise(wire, self.rank) if packet.layout.stochastic else None
        ops.encode(packet.layout, shards, noise, row)
        if self.clock.observer is not None:
            self.clock.observer.weights(wire, packet.layout, shards, row)
        return packet

    def send(self, packet: Packet) -> None:
        """Move the rows; `packet.payload` is whole after it."""
        sent = self._send_held(packet) if packet.held is not None else self._send_flat(packet)
        self.ledger.add(packet.wire, sent)
        if not self.clock.master:
            self._check(packet, sent)
            self._keep(packet)

    def unpack(self, packet: Packet, outs: Sequence[Tensor]) -> None:
        """Decode into whole parameters, padded or not, one per segment."""
        ops.decode(packet.layout, packet.payload, outs)

    # ------------------------------------------------------------------ parts

    def _layout(self, wire: Wire) -> Layout:
        if self.clock.master:
            return self.raw
        return self.spec.forward if wire == "weights_forward" else self.spec.backward

    def _empty(self, wire: Wire, layout: Layout, device: torch.device) -> Packet:
        payload = torch.empty(self.cluster.world, layout.nbytes, dtype=torch.uint8, device=device)
        held = None
        if self.spec.hierarchical:
            shape = (self.cluster.nodes, layout.nbytes)
            held = torch.empty(shape, dtype=torch.uint8, device=device)
        return Packet(wire, layout, payload, held)

    def _own_row(self, packet: Packet) -> Tensor:
        rows, at = (packet.payload, self.rank) if packet.held is None else (packet.held, self.node)
        return rows[at : at + 1]

    def _from_secondary(self, device: torch.device) -> Packet:
        if self.secondary is None:
            raise RuntimeError(
                f"unit {self.spec.unit}: backward found no secondary shard; run its forward "
                "with gradients enabled before each backward"
            )
        packet = self._empty("weights_backward", self.spec.forward, device)
        packet.held, packet.kept = self.secondary, True
        return packet

    def _send_flat(self, packet: Packet) -> Traffic:
        row = packet.payload[self.rank]
        return self.transport.all_gather(packet.payload, row, "world", self._label(packet, "world"))

    def _send_held(self, packet: Packet) -> Traffic:
        """Across nodes, then inside the node: one call for each node's rows, which lie together."""
        held, each, sent = packet.held, self.cluster.gpus_per_node, Traffic(0, 0)
        assert held is not None
        if not packet.kept:
            label = self._label(packet, "across")
            sent += self.transport.all_gather(held, held[self.node], "across", label)
        label = self._label(packet, "local")
        for node in range(self.cluster.nodes):
            rows = packet.payload[node * each : (node + 1) * each]
            sent += self.transport.all_gather(rows, held[node], "local", label)
        return sent

    def _keep(self, packet: Packet) -> None:
        """hpZ: after a forward that a backward will follow, keep this local rank's N rows."""
        if packet.kept or not self.spec.secondary or not self.clock.grad:
            return
        if packet.held is None:
            packet.held = packet.payload[self.local :: self.cluster.gpus_per_node].clone()
        self.secondary = packet.held

    def _check(self, packet: Packet, sent: Traffic) -> None:
        row, world = packet.layout.nbytes, self.cluster.world
        if packet.kept:
            planned = secondary_traffic(self.cluster, row)
        else:
            planned = gather_traffic(self.cluster, row, self.spec.hierarchical)
        if sent * world != planned:
            raise LedgerError(
                f"unit {self.spec.unit}, {packet.wire}: rank {self.rank} sent {tuple(sent)} bytes, "
                f"planned {(planned.intra // world, planned.inter // world)}"
            )

    def _label(self, packet: Packet, link: Link) -> str:
        return f"{packet.wire} of unit {self.spec.unit} ({link})"
