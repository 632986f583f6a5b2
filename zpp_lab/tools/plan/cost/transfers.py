"""Seconds of one unit's collectives: kernels on the GPU, and transfers on the links.

Bytes are the plan's. A transfer takes one kind of link for itself; one that uses both at the same
time takes the link between nodes for as long as the slower of the two needs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zpp_lab.codecs import BlockCodec, Codec, RawCodec
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.plan import UnitPlan
from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.config.wires import BACKWARD, FORWARD, UPDATE, Wire
from zpp_lab.tools.plan.cost.machine import Machine

LinkName = Literal["intra", "inter"]
SEGMENTS = 18  # of one launch of a codec kernel: MAX_SEGMENTS of cuda/
BF16 = 2  # bytes


@dataclass(frozen=True)
class Transfer:
    link: LinkName
    seconds: float


@dataclass(frozen=True)
class Collective:
    """Kernels and the transfers between them, in turn: there is one kernel more."""

    kernels: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        assert len(self.kernels) == len(self.transfers) + 1


@dataclass(frozen=True)
class Transfers:
    """Of a unit on a machine. `plain`: FSDP2's own collectives, rings over all ranks.
    link_gbps: of a node; None where nodes are joined by what joins the GPUs inside one. cells: of
    a node, which send at the same time over its link."""

    machine: Machine
    link_gbps: float | None
    plain: bool
    cells: int = 1

    def gather(self, unit: UnitPlan, wire: Wire) -> Collective:
        """For backward only of a unit that it gathers again. Between nodes hpZ's rows are there,
        encoded."""
        layout = unit.forward if wire == FORWARD else unit.backward
        kept = wire == BACKWARD and unit.keeps_secondary
        rows = unit.recipe.cluster.nodes if unit.recipe.kept else 1
        encode = 0.0 if kept else self.kernel("encode", unit.live(wire), rows)
        decode = self.kernel("decode", layout, unit.recipe.shards)
        sent = self._gathered(unit, wire, layout)
        return Collective((encode, *(0.0 for _ in sent[1:]), decode), sent)

    def _gathered(self, unit: UnitPlan, wire: Wire, layout: Layout) -> tuple[Transfer, ...]:
        cluster = unit.recipe.cluster
        if unit.recipe.shards == 1:
            return (Transfer("intra", 0.0),)
        kept = wire == BACKWARD and unit.keeps_secondary
        if self.plain and not kept and not unit.recipe.config.copied:
            return self._ring(unit, (cluster.world - 1) * layout.nbytes, "gather")
        traffic = unit.leg(wire).traffic
        if unit.hierarchical and traffic.inter:
            across = self._transfer(unit, Traffic(0, traffic.inter), "gather", cluster.nodes - 1)
            return across, self._transfer(unit, Traffic(traffic.intra, 0), "gather")
        return (self._transfer(unit, traffic, "gather", cluster.nodes - 1),)

    def update(self, unit: UnitPlan) -> Collective:
        """Of a unit's new weights between nodes, where they are kept."""
        nodes, (_, layout, traffic, _) = unit.recipe.cluster.nodes, unit.leg(UPDATE)
        kernels = self.kernel("encode", layout, 1), self.kernel("decode", layout, nodes)
        return Collective(kernels, (self._transfer(unit, traffic, "gather", nodes - 1),))

    def reduction(self, unit: UnitPlan, last: bool = True) -> Collective:
        """`last`: of the step; sums may stay in the node until then."""
        recipe, cluster, layouts = unit.recipe, unit.recipe.cluster, unit.hops
        if not layouts:  # a cluster of one rank
            return Collective((0.0, 0.0), (Transfer("intra", 0.0),))
        first = layouts[0]
        encode = self.kernel("encode", first, recipe.cut)
        if self.plain and not recipe.config.copied:
            ring = self._ring(unit, (cluster.world - 1) * first.nbytes, "reduce")
            return Collective((encode, 0.0), ring)
        hops = [leg.traffic for leg in unit.reduce_legs(unit.unit.trainable)]
        if len(layouts) == 1:
            end = self.kernel("reduce", first, cluster.world)
            return Collective((encode, end), (self._transfer(unit, sum(hops, NOTHING), "reduce"),))
        if recipe.node_sums and not last:
            end = self.kernel("reduce", first, recipe.cut)
            return Collective((encode, end), (self._transfer(unit, hops[0], "reduce"),))
        both_ways = (self.kernel("decode_sum_encode", one, recipe.cut) for one in layouts[:2])
        middle = [max(both_ways)]  # measured with one codec for both: the slower one counts
        sent = tuple(self._transfer(unit, traffic, "reduce") for traffic in hops)
        if len(layouts) == 2:
            end = self.kernel("reduce", layouts[1], cluster.nodes)
        else:
            middle.append(self.kernel("decode_sum_encode", layouts[1], cluster.nodes))
            end = self.kernel("decode", layouts[2], cluster.gpus_per_node)
        return Collective((encode, *middle, end), sent)

    # ------------------------------------------------------------------ transfers

    def _transfer(self, unit: UnitPlan, traffic: Traffic, kind: str, messages: int = 1) -> Transfer:
        """`traffic` of all ranks together. `messages` follow one another between nodes."""
        cluster = unit.recipe.cluster
        if self.link_gbps is None or not traffic.inter:
            return Transfer("intra", self.inside(kind, sum(traffic) / cluster.world))
        across = self.machine.inter.seconds(
            self.cells * traffic.inter / cluster.nodes, self.link_gbps, max(1, messages)
        )
        return Transfer("inter", max(across, self.inside(kind, traffic.intra / cluster.world)))

    def _ring(self, unit: UnitPlan, nbytes: int, kind: str) -> tuple[Transfer, ...]:
        """A ring over all ranks: each sends `nbytes` to the next one, and one rank a node has
        its next one on another node."""
        nodes = unit.recipe.cluster.nodes
        inside = self.inside(kind, nbytes)
        if self.link_gbps is None or nodes == 1:
            return (Transfer("intra", inside),)
        across = self.machine.inter.seconds(self.cells * nbytes, self.link_gbps, nodes - 1)
        return (Transfer("inter", max(across, inside)),)

    def inside(self, kind: str, nbytes: float) -> float:
        """Return the seconds in which a rank receives so many bytes from its node."""
        links = self.machine.inside
        return (links.gather if kind == "gather" else links.reduce).seconds(nbytes)

    # ------------------------------------------------------------------ kernels

    def kernel(self, op: str, layout: Layout, rows: int) -> float:
        """Return the seconds of an operator on `rows` rows of a layout."""
        elements: Counter[tuple[str, float]] = Counter()
        for segment in layout.segments:
            elements[codec_key(segment.codec, op)] += rows * segment.coded_numel
        codec = self.machine.codec
        seconds = sum(n * scale * codec.each(op, key) for (key, scale), n in elements.items() if n)
        return seconds + codec.launch_s * -(-len(layout.segments) // SEGMENTS)


def codec_key(codec: Codec, op: str) -> tuple[str, float]:
    """Return a codec's name in a machine's file, and how many times such an element's work it is.
    Decoding does not depend on how codes were rounded. `normal`, not timed yet, is taken to cost
    what even levels of as many bits do."""
    if isinstance(codec, RawCodec):
        return "raw", codec.dtype.itemsize / BF16
    if isinstance(codec, BlockCodec):
        drawn = codec.stochastic and op in ("encode", "decode_sum_encode")
        return f"{codec.bits}{'r' if drawn else ''}{'h' if codec.hadamard else ''}", 1.0
    return type(codec).__name__, 1.0
