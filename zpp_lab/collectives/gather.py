"""The all-gather of a unit's weights: encode the own shard, move payload rows, decode.

Three calls, so that the owner can run each on a stream of its own:

    packet = gather.pack(shards, backward)    this rank's row is encoded
    gather.send(packet)                       rows travel
    gather.unpack(packet, outs)               whole parameters are decoded

A hierarchical gather sends each row to one rank of every other node first; the N rows that a
rank then holds go to its neighbours in the node. These N rows are what hpZ keeps for backward,
as encoded bytes. In one node they are the rank's own row, which is encoded again in place of kept.

Where nodes keep weights (`exchange.py`) each rank has these N rows anyway: it encodes all of them,
with the noise of their owners, and gathers never leave the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs import Noise, RawCodec, kernels
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.context import Clock, Observer
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import (
    NOTHING,
    Traffic,
    gather_traffic,
    node_gather_traffic,
    secondary_traffic,
)
from zpp_lab.collectives.transport import LINKS, Link, Shipment, Transport
from zpp_lab.config.wires import BACKWARD, FORWARD, GATHERS, ROLLOUT, Wire


@dataclass(frozen=True)
class GatherSpec:
    """What a recipe asks of one unit's gathers. `secondary`: backward uses the forward's rows.
    `stored`: the layouts' last segments so many are a frozen base, encoded once. `kept`: each node
    keeps the weights. `shards`: 0 is one a rank; of fewer the ranks of a node have all, and nodes
    have copies, drawn alike."""

    unit: str
    forward: Layout
    backward: Layout
    dtype: torch.dtype  # of raw weights
    secondary: bool = False
    hierarchical: bool = False
    stored: int = 0
    kept: bool = False
    shards: int = 0
    rollout: Layout | None = None  # of gathers for generation, where there are any


@dataclass(slots=True)
class Packet:
    """A gather under way: `payload` uint8 [W, nbytes], a row a shard; `held` uint8 [N, nbytes] of
    the node."""

    wire: Wire
    layout: Layout
    payload: Tensor
    first: Shipment | None = None  # none where the node has `held` already
    held: Tensor | None = None

    @property
    def kept(self) -> bool:
        """Nothing is left to encode or to send across."""
        return self.first is None


class Gather:
    """Gathers of one unit by one rank."""

    def __init__(
        self, spec: GatherSpec, transport: Transport, ledger: Ledger, clock: Clock
    ) -> None:
        self.spec, self.transport, self.ledger, self.clock = spec, transport, ledger, clock
        self.cluster, self.rank = transport.cluster, transport.rank
        self.node, self.local = divmod(self.rank, self.cluster.gpus_per_node)
        self.shards = spec.shards or self.cluster.world
        self.copied = self.shards < self.cluster.world
        self.keeps = spec.secondary and self.cluster.nodes > 1
        self.secondary: Tensor | None = None  # hpZ's rows, from a forward to its backward
        # of weights that the node keeps, [N, n] of each segment; the current stream waits for them
        self.rows: Callable[[], Sequence[Tensor]] | None = None
        self.base: Tensor | None = None  # this rank's row of a frozen base, uint8 [1, n]
        segments = spec.forward.segments
        self.encoded = len(segments) - spec.stored  # segments that each gather encodes
        plain, stored = segments[: self.encoded], segments[self.encoded :]
        raw = [s.codec if isinstance(s.codec, RawCodec) else RawCodec(spec.dtype) for s in plain]
        raw += [s.codec for s in stored]  # type: ignore[misc]
        self.raw = Layout.build([s.name for s in segments], [s.numel for s in segments], raw)
        self.live: dict[int, Layout] = {}  # of a layout, what is encoded
        self.planned: dict[tuple[int, bool], Traffic] = {}  # by layout, and whether kept
        wires = (*GATHERS, ROLLOUT)
        self.labels = {(w, k): self._label(w, k) for w in wires for k in LINKS}
        self._reserve()

    def release(self) -> None:
        """Forget what hpZ kept: the weights have changed, or no backward will come."""
        self.secondary = None

    def wire(self, backward: bool) -> Wire:
        """Return the wire of a gather that begins now."""
        return BACKWARD if backward else ROLLOUT if self.clock.rolling else FORWARD

    def reads(self, backward: bool) -> bool:
        """Return whether a gather that begins now reads this rank's shards."""
        if self.clock.master or self.shards == 1:
            return True
        return self.rows is None and not (backward and self.keeps)

    def pack(self, shards: Sequence[Tensor], backward: bool) -> Packet:
        """Encode this rank's padded shards, flat, one per segment."""
        wire = self.wire(backward)
        if self.rows is not None and not self.clock.master:
            return self._pack_rows(wire, self.rows())
        again = backward and self.spec.secondary and not self.clock.master
        if again and self.keeps:
            return self._from_secondary()
        layout = self._layout(wire)
        device = shards[0].device
        packet = self._empty(wire, layout, device)
        packet.first = self._first_leg(packet, device)
        row = packet.first.room
        if self.spec.stored:
            layout, row = self._put_base(layout, row)
            shards = shards[: self.encoded]
        noise = None
        if layout.stochastic:
            noise = self.clock.weights_noise(FORWARD if again else wire, self.rank % self.shards)
        if shards:  # forward's bits were looked at in the forward
            observer = None if again else self.clock.observer
            self._encode(wire, layout, shards, noise, row, observer)
        return packet

    def send(self, packet: Packet) -> None:
        """Move the rows; `packet.payload` is whole after it."""
        keep = self._keep(packet)
        sent = packet.first.send(keep) if packet.first is not None else NOTHING
        if packet.held is not None:
            sent += self._leg(packet, "local", packet.held).send()
        self.ledger.add(packet.wire, sent)
        if not self.clock.master:
            self._check(packet, sent)

    def unpack(self, packet: Packet, outs: Sequence[Tensor]) -> None:
        """Decode into whole parameters, padded or not, one per segment."""
        kernels.decode(packet.layout, packet.payload, outs)

    # ------------------------------------------------------------------ parts

    def _encode(
        self,
        wire: Wire,
        layout: Layout,
        shards: Sequence[Tensor],
        noise: Noise | None,
        row: Tensor,
        observer: Observer | None,
    ) -> None:
        errors = observer.room(wire, layout, row) if observer is not None else None
        kernels.encode(layout, shards, noise, row, errors)
        if observer is not None:
            observer.encoded(wire, layout, errors)
            if observer.looks:
                observer.weights(wire, layout, shards, row)

    def _pack_rows(self, wire: Wire, rows: Sequence[Tensor]) -> Packet:
        """Encode what this rank keeps, as its owners would."""
        layout, device, cluster = self._layout(wire), rows[0].device, self.cluster
        packet = self._empty(wire, layout, device)
        packet.first = self._leg(packet, "local")
        room = packet.first.room
        owners = range(self.local, cluster.world, cluster.gpus_per_node)
        noise = self.clock.weights_noise(wire, *owners) if layout.stochastic else None
        observer = self.clock.observer
        errors = observer.room(wire, layout, room) if observer is not None else None
        kernels.encode(layout, rows, noise, room, errors)
        if observer is not None:  # other nodes tell of other owners' rows
            own = None if errors is None else errors[self.node : self.node + 1]
            observer.encoded(wire, layout, own)
            if observer.looks:
                observer.weights(wire, layout, rows, room)
        return packet

    def _layout(self, wire: Wire) -> Layout:
        if self.clock.master:
            return self.raw
        if wire == ROLLOUT:
            assert self.spec.rollout is not None, "no rollouts were planned"
            return self.spec.rollout
        return self.spec.forward if wire == FORWARD else self.spec.backward

    def _put_base(self, layout: Layout, row: Tensor) -> tuple[Layout, Tensor]:
        """Copy the frozen base into its end of the row; what is left to encode, and where."""
        live = self.live.get(id(layout))
        if live is None:
            names = {s.name for s in layout.segments[: self.encoded]}
            live = self.live[id(layout)] = layout.select(names)
        assert self.base is not None, f"unit {self.spec.unit}: its frozen base was not loaded"
        row[:, live.nbytes :].copy_(self.base)
        return live, row[:, : live.nbytes]

    def _reserve(self) -> None:
        if self.shards == 1 < self.cluster.world:
            return  # every rank has all weights
        spec = self.spec
        every = (self.raw, spec.forward, spec.backward, spec.rollout or self.raw)
        row = max(layout.nbytes for layout in every)
        if self.spec.hierarchical:
            self.transport.reserve("gather", "across", row)
            self.transport.reserve("gather", "local", row * self.cluster.nodes)
        else:
            self.transport.reserve("gather", "local" if self.copied else "world", row)
        if self.keeps:
            nbytes = self.spec.forward.nbytes * self.cluster.nodes
            self.transport.reserve("gather", "local", nbytes)
        if self.spec.kept:
            self.transport.reserve("gather", "local", row * self.cluster.nodes)

    def _empty(self, wire: Wire, layout: Layout, device: torch.device) -> Packet:
        shape = (self.shards, layout.nbytes)
        return Packet(wire, layout, torch.empty(shape, dtype=torch.uint8, device=device))

    def _leg(self, packet: Packet, link: Link, held: Tensor | None = None) -> Shipment:
        """The shipment that brings the whole payload."""
        label = self.labels[packet.wire, link]
        return self.transport.gathering(packet.payload, link, label, held)

    def _first_leg(self, packet: Packet, device: torch.device) -> Shipment:
        if not self.spec.hierarchical:
            return self._leg(packet, "local" if self.copied else "world")
        shape = (self.cluster.nodes, packet.layout.nbytes)
        packet.held = torch.empty(shape, dtype=torch.uint8, device=device)
        label = self.labels[packet.wire, "across"]
        return self.transport.gathering(packet.held, "across", label)

    def _from_secondary(self) -> Packet:
        if self.secondary is None:
            raise RuntimeError(
                f"unit {self.spec.unit}: no secondary shard for backward; run forward with "
                "gradients enabled before each backward"
            )
        packet = self._empty(BACKWARD, self.spec.forward, self.secondary.device)
        packet.held = self.secondary
        return packet

    def _keep(self, packet: Packet) -> Tensor | None:
        """hpZ: of a forward that a backward will follow, this local rank's N rows stay. Where no
        leg brings just them, room for them."""
        wanted = self.keeps and self.clock.grad and not self.clock.master
        if packet.kept or not wanted:
            return None
        if packet.held is not None:
            self.secondary = packet.held
            return None
        self.secondary = packet.payload.new_empty(self.cluster.nodes, packet.layout.nbytes)
        return self.secondary

    def _check(self, packet: Packet, sent: Traffic) -> None:
        key = (id(packet.layout), packet.kept)
        planned = self.planned.get(key)
        if planned is None:
            planned = self.planned[key] = self._plan(packet)
        if sent != planned:
            raise LedgerError(
                f"unit {self.spec.unit}, {packet.wire}: rank {self.rank} sent {tuple(sent)} bytes, "
                f"planned {tuple(planned)}"
            )

    def _plan(self, packet: Packet) -> Traffic:
        """What one rank sends; all send the same."""
        if self.copied:
            every = node_gather_traffic(self.cluster, packet.layout.nbytes)
        elif packet.kept or self.spec.kept:
            every = secondary_traffic(self.cluster, packet.layout.nbytes)
        else:
            every = gather_traffic(self.cluster, packet.layout.nbytes, self.spec.hierarchical)
        return Traffic(every.intra // self.cluster.world, every.inter // self.cluster.world)

    def _label(self, wire: Wire, link: Link) -> str:
        return f"{wire} of unit {self.spec.unit} ({link})"
