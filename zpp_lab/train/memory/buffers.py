"""The moments of a step at which a rank's memory is counted, and the buffers of its collectives.

A step's memory rises and falls, so every item is counted at seven moments, and at two of an
evaluation, whose batches have a size of their own:

    loss        all activations are there, the loss goes back
    early       one of the first two units to go back computes, of which the second finds the
                first's reduction under way: most activations are still there
    early sent  its gradients are reduced: its weights and activations are gone
    late        the last unit to go back computes: its blocks' activations, nearly all gradients
    late sent   its gradients are reduced
    root        the root unit is reduced: activations are gone, all gradients are there
    update      norm, clipping and optimizer
    eval        a block computes held-out tokens, perhaps with the master weights
    eval loss   their losses

`Buffers` are one rank's for gathers and reductions, in bytes, as `collectives/` allocates them.
What travels through peers' memory lies in slots until it is copied out of them. Process groups need
a buffer for what goes out as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from zpp_lab.codecs import RawCodec
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.peer.choose import LEAST
from zpp_lab.collectives.peer.slots import SLOTS
from zpp_lab.collectives.plan import Plan, UnitPlan
from zpp_lab.collectives.reduce import ways
from zpp_lab.collectives.transport import LINKS, Kind, Link, peers
from zpp_lab.config.schema import Config
from zpp_lab.engines.units import is_untouched

Moment = Literal[
    "loss", "early", "early sent", "late", "late sent", "root", "update", "eval", "eval loss"
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

GIB = 2**30
NOT_EVALUATED: dict[Moment, int] = {"eval": 0, "eval loss": 0}
ALIGN = 256  # bytes; of a slot


@dataclass(frozen=True)
class Item:
    """One kind of memory of one rank, in bytes by moment. `outside`: torch's
    allocator does not count it as allocated."""

    name: str
    nbytes: dict[Moment, int]
    place: Literal["gpu", "host"] = "gpu"
    assumed: bool = False
    outside: bool = False

    @property
    def most(self) -> int:
        return max(self.nbytes.values())


@dataclass(frozen=True)
class Estimate:
    """All items of one rank."""

    items: tuple[Item, ...]

    def at(self, moment: Moment) -> int:
        """Return the bytes on the GPU, assumed constants included."""
        return sum(i.nbytes[moment] for i in self.items if i.place == "gpu")

    @property
    def peak_moment(self) -> Moment:
        return max(MOMENTS, key=self.at)

    @property
    def peak(self) -> int:
        """Bytes that the device must have."""
        return self.at(self.peak_moment)

    @property
    def tensors(self) -> int:
        """What torch.cuda.max_memory_allocated would say: the peak without assumed constants, and
        without what torch's allocator does not see."""
        seen = [i for i in self.items if i.place == "gpu" and not (i.assumed or i.outside)]
        return max(sum(i.nbytes[m] for i in seen) for m in MOMENTS)

    @property
    def host(self) -> int:
        return sum(i.most for i in self.items if i.place == "host")

    def item(self, name: str) -> Item:
        return next(i for i in self.items if i.name == name)


def always(nbytes: int) -> dict[Moment, int]:
    return dict.fromkeys(MOMENTS, nbytes)


def moments(
    loss: int = 0, early: int = 0, late: int = 0, root: int = 0, update: int = 0
) -> dict[Moment, int]:
    """Return bytes by moment; a unit holds the same while it computes and while it is sent."""
    return {
        "loss": loss,
        "early": early,
        "early sent": early,
        "late": late,
        "late sent": late,
        "root": root,
        "update": update,
        **NOT_EVALUATED,
    }


def kernels_serve(config: Config) -> bool:
    """Return whether our kernels run where `config` runs, assuming that a GPU has them."""
    return config.ops.backend != "reference" and not config.engine.device.startswith("cpu")


def payload_bytes(plan: Plan, unit: UnitPlan, backward: bool = False) -> int:
    """Return the buffer that one gather of `unit` fills, and what it holds of the node."""
    layout = unit.backward if backward else unit.forward
    return plan.recipe.shards * layout.nbytes + _held(plan, unit, backward)


def _held(plan: Plan, unit: UnitPlan, backward: bool) -> int:
    kept = plan.recipe.kept  # which goes straight into its output buffer
    if not unit.hierarchical or kept or (backward and unit.keeps_secondary):
        return 0
    layout = unit.backward if backward else unit.forward
    return plan.recipe.cluster.nodes * layout.nbytes


class _Leg(NamedTuple):
    """Bytes of one hop: until the next one's sums are there, of rows turned round, and of rows in
    the order of their receivers, while process groups send."""

    stays: int
    turned: int
    sent: int


class Buffers:
    """Buffers of a plan's units, where each rank has a GPU. Assumes a host for each node, unless
    engine.transport=peer says that all of them are one."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self.plan, self.cluster = plan, plan.recipe.cluster
        self.untouched = is_untouched(plan, config.engine.ordered)
        self.least = 0 if config.engine.transport == "peer" else LEAST
        on_cpu = config.engine.device.startswith("cpu")
        self.links = () if on_cpu else self._links(config.engine.transport)

    def _links(self, transport: str) -> tuple[Link, ...]:
        """Where ranks read each other's memory."""
        if self.untouched or transport == "groups":
            return ()
        one_host = transport == "peer" or self.cluster.nodes == 1
        shared: tuple[Link, ...] = tuple(LINKS) if one_host else ("local",)
        return tuple(link for link in shared if any(peers(self.cluster, link)))

    def _in_slots(self, link: Link, nbytes: int) -> bool:
        return link in self.links and nbytes >= self.least

    # ------------------------------------------------------------------ gathers

    def gathers(self, unit: UnitPlan, count: int) -> int:
        """Return the bytes of `count` gathers of `unit` for backward, not decoded yet."""
        if self.untouched:  # FSDP2's own is flat whatever the cluster's shape
            return count * self.plan.recipe.shards * unit.backward.nbytes
        return count * payload_bytes(self.plan, unit, backward=True)

    def heldout(self, unit: UnitPlan, count: int) -> int:
        """Return the bytes of `count` gathers of `unit` in evaluation, master weights too."""
        shards, nodes = self.plan.recipe.shards, self.cluster.nodes
        if self.untouched:
            return count * shards * unit.forward.nbytes
        row = max(_raw_row(unit), unit.forward.nbytes)
        held = nodes * row if unit.hierarchical else 0
        return count * (held + shards * row) if shards > 1 or self.cluster.world == 1 else 0

    # ------------------------------------------------------------------ reductions

    def reduction(self, unit: UnitPlan) -> int:
        """Return the most bytes of sent and received rows while `unit` is reduced."""
        turned = self.plan.recipe.config.order == "reversed"
        legs = [self._leg(*leg) for leg in self._legs(unit)]
        most = legs[0].stays + max(turned * legs[0].turned if len(legs) == 1 else 0, legs[0].sent)
        for one, other in pairwise(legs):  # sums are encoded straight into the next one's
            flipped = turned * max(one.turned, other.turned)
            most = max(most, one.stays + other.stays + flipped)
        return most

    def travelling(self, unit: UnitPlan) -> int:
        """Return the bytes of the last hop, which stay while the next unit's is encoded."""
        return 0 if self.untouched else [self._leg(*leg) for leg in self._legs(unit)][-1].stays

    def _leg(self, kind: Kind, link: Link, rows: int, members: int, row: int) -> _Leg:
        """Return the bytes of `rows` rows to each member; a gather has its row in the output."""
        nbytes = rows * members * row
        if kind == "gather" or self._in_slots(link, nbytes):
            return _Leg(nbytes, nbytes, 0)
        return _Leg(2 * nbytes, nbytes, nbytes if rows > 1 else 0)

    def _legs(self, unit: UnitPlan) -> Iterator[tuple[Kind, Link, int, int, int]]:
        """Yield each hop's way (`collectives.reduce.ways`) and the bytes of a row."""
        found = ways(self.cluster, len(unit.hops), self.plan.recipe.cut)
        return ((*way, hop.nbytes) for way, hop in zip(found, unit.hops, strict=True))

    # ------------------------------------------------------------------ new weights

    def update(self, unit: UnitPlan) -> int:
        """Return the nodes' payloads while a unit's new weights travel between nodes."""
        return unit.recipe.cluster.nodes * unit.update.nbytes

    # ------------------------------------------------------------------ slots

    def slots(self) -> int:
        """Return the bytes of a ring for each link and kind, as large as its largest transfer."""
        wanted: dict[tuple[Kind, Link], int] = defaultdict(int)
        used = set()
        for unit in self.plan.units if self.links else ():
            for kind, link, own, arrives in self._transfers(unit):
                if link not in self.links:
                    continue
                wanted[kind, link] = max(wanted[kind, link], own)
                if self._in_slots(link, arrives):
                    used.add((kind, link))
        return sum(SLOTS[ring[0]] * -(-wanted[ring] // ALIGN) * ALIGN for ring in used)

    def _transfers(self, unit: UnitPlan) -> Iterator[tuple[Kind, Link, int, int]]:
        """Yield kind, link, bytes of this rank's rows and of what arrives."""
        nodes, world = self.cluster.nodes, self.cluster.world
        shards = self.plan.recipe.shards
        for nbytes in (_raw_row(unit), unit.forward.nbytes, unit.backward.nbytes):
            if shards < world:
                if shards > 1:
                    yield "gather", "local", nbytes, shards * nbytes
            elif unit.hierarchical:
                yield "gather", "across", nbytes, nodes * nbytes
                yield "gather", "local", nodes * nbytes, world * nbytes
            else:
                yield "gather", "world", nbytes, world * nbytes
            if self.plan.recipe.kept:
                yield "gather", "local", nodes * nbytes, world * nbytes
        if self.plan.recipe.kept:
            row = max(_raw_row(unit), unit.update.nbytes)
            yield "gather", "across", row, nodes * row
        if unit.keeps_secondary:
            yield "gather", "local", nodes * unit.forward.nbytes, world * unit.forward.nbytes
        for kind, link, rows, members, row in self._legs(unit):
            room = rows * row * (members if kind == "exchange" else 1)
            yield kind, link, room, rows * members * row


def _raw_row(unit: UnitPlan) -> int:
    """Return the bytes of a gather of the master weights, a frozen base encoded."""
    raw = RawCodec(unit.recipe.weights_dtype)
    segments = unit.forward.segments
    codecs = [s.codec if s.name in unit.unit.stored else raw for s in segments]
    return Layout.build([s.name for s in segments], [s.numel for s in segments], codecs).nbytes
