"""Planned buffers against what the collectives' own code allocates: one rank, whose peers' memory
is its own and whose process groups send nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.test_memory import Live
from zpp_lab.codecs import kernels as ops
from zpp_lab.collectives.context import Clock
from zpp_lab.collectives.exchange import Exchange
from zpp_lab.collectives.gather import Gather
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.plan import UnitPlan
from zpp_lab.collectives.reduce import Reduce
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import Collectives, Link, members, traffic_of
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines import norm
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.comm import gather_spec, reduce_spec
from zpp_lab.engines.norm import square_bytes, square_sums, squares
from zpp_lab.models import build_model
from zpp_lab.train.memory import buffers
from zpp_lab.train.memory.buffers import Buffers

SMALL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=23, vocab_size=37)
Q8, Q4 = ({"bits": b, "block_size": 16} for b in (8, 4))
RECIPES: dict[str, dict[str, Any]] = {
    "one hop": {"weights": Q8, "grads": Q4},
    "two hops": {"weights": Q8, "grads": Q4, "hops": 2},
    "hpZ": {"weights": Q8, "secondary": True},
    "reversed": {"order": "reversed", "hops": 2, "grads": Q8},
    "one hop, reversed": {"order": "reversed", "grads": Q8},
    "kept": {"sharding": {"weights": "node"}, "weights": Q8},
    "differences": {
        "sharding": {"weights": "node", "update": "differences"},
        "weights_update": Q4,
        "hops": 2,
    },
}
SEVERAL = ("two hops", "reversed", "kept", "differences")  # which need several nodes
WAYS = {
    "groups": {"transport": "groups"},
    "peer": {"transport": "peer"},
    "peer, flat": {"transport": "peer", "gather": "flat"},
    "auto": {"transport": "auto"},
}
LEAST = 1500  # for `auto`, so that some of a small model's shipments reach it


class Still(Collectives):
    """Process groups that send nothing."""

    def all_gather(self, out: Tensor, row: Tensor, link: Link, label: str) -> Traffic:
        return traffic_of(self.cluster, link, row.nbytes)

    def all_to_all(self, out: Tensor, rows: Tensor, link: Link, label: str) -> Traffic:
        return traffic_of(self.cluster, link, rows.nbytes // self.places[link][1])

    def watched(self, label: str, device: torch.device) -> Any:
        return nullcontext()


class Alone:
    """A link's memory that is all this process's, outside of what torch's operators make."""

    def __init__(self, count: int) -> None:
        self.count, self.streams = count, self

    def allocate(self, nbytes: int) -> list[Tensor]:
        return [torch.from_numpy(np.zeros(nbytes, np.uint8)) for _ in range(self.count)]

    def express(self) -> None:
        return None

    def barrier(self) -> None: ...

    def pull(self, outs: Any, sources: Any, own: int) -> None: ...

    def mark(self, old: Any = None) -> str:
        return "mark"

    def wait(self, mark: Any) -> None: ...


class Rank:
    """Rank 0 of a small model's run, with its collectives."""

    def __init__(self, recipe: str, way: str, nodes: int, local: int) -> None:
        values = {
            "recipe": RECIPES[recipe],
            "cluster": {"nodes": nodes, "gpus_per_node": local},
            "train": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
            "engine": {"name": "fsdp", **WAYS[way]},
        }
        config = load(Config, values)
        self.plan = build_plan(build_model(SMALL, 37, "meta"), config)
        self.planned = Buffers(self.plan, config)
        self.clock, cluster = Clock(1), config.cluster
        self.transport: Any = Still(cluster, 0)
        if self.planned.links:
            shared = {k: self._memory(k) for k in self.planned.links}
            least = LEAST if way == "auto" else 0
            self.transport = PeerTransport(self.transport, shared, least)  # type: ignore[arg-type]

    def _memory(self, link: Link) -> Any:
        count = len(members(self.plan.recipe.cluster, link, 0))
        return lambda: Alone(count)

    def gather(self, unit: UnitPlan) -> Gather:
        made = Gather(gather_spec(unit), self.transport, Ledger(), self.clock)
        if unit.recipe.kept:
            update = self.started(unit)
            made.rows = update.rows
        return made

    def started(self, unit: UnitPlan) -> Exchange:
        update = self.update(unit)
        update.start([torch.zeros(s.numel) for s in unit.raw.segments], 0)
        return update

    def update(self, unit: UnitPlan) -> Exchange:
        cpu = torch.device("cpu")
        return Exchange("weights_update", "across", unit, self.transport, Ledger(), self.clock, cpu)

    def gathered(self, gather: Gather, unit: UnitPlan, backward: bool) -> Any:
        packet = gather.pack([torch.zeros(s.numel) for s in unit.forward.segments], backward)
        gather.send(packet)
        return packet

    def reduce(self, unit: UnitPlan) -> None:
        names = tuple(s.name for s in unit.hops[0].segments)
        grads = [torch.empty(0) for _ in names]
        made = Reduce(reduce_spec(unit), self.transport, Ledger(), self.clock)
        made.run(names, grads, torch.empty(0))


CLUSTERS = [(1, 4), (2, 2), (3, 2)]


@pytest.fixture(autouse=True)
def no_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need nothing beyond their arguments."""
    for name in ("encode", "encode_update", "decode", "reduce", "decode_sum_encode"):
        monkeypatch.setattr(ops, name, lambda *_: None)
    monkeypatch.setattr(buffers, "LEAST", LEAST)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_buffers_are_those_that_the_collectives_make(
    recipe: str, way: str, cluster: tuple[int, int]
) -> None:
    if recipe in SEVERAL and cluster[0] == 1:
        return
    rank = Rank(recipe, way, *cluster)
    for unit in rank.plan.units[-2:]:
        if unit.gathers_backward:
            for count in (1, 2, 5):
                gathers = [rank.gather(unit) for _ in range(count)]
                if gathers[0].spec.secondary:
                    for gather in gathers:
                        rank.gathered(gather, unit, backward=False)
                shards = [torch.zeros(s.numel) for s in unit.forward.segments]
                with Live() as live:
                    held = []
                    for gather in gathers:
                        held.append(gather.pack(shards, True))
                        gather.send(held[-1])
                assert live.now == rank.planned.gathers(unit, count), (unit.unit.name, count)
        with Live() as live:
            rank.reduce(unit)
        assert live.most == rank.planned.reduction(unit)
        if unit.recipe.kept:
            masters = [torch.zeros(s.numel) for s in unit.update.segments]
            update, ok = rank.update(unit), torch.tensor(True)
            with Live() as live:
                for part in update.begin(masters, 1, ok):
                    part()
            assert live.most == rank.planned.update(unit)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["one hop", "hpZ", "two hops", "kept", "differences"])
def test_slots_are_those_of_the_rings(recipe: str, way: str, cluster: tuple[int, int]) -> None:
    if recipe in SEVERAL and cluster[0] == 1:
        return
    rank = Rank(recipe, way, *cluster)
    gathers = [rank.gather(unit) for unit in rank.plan.units]
    for unit, gather in zip(rank.plan.units, gathers, strict=True):
        for backward in (False, True)[: 1 + unit.gathers_backward]:
            rank.gathered(gather, unit, backward)
    for unit in rank.plan.units:
        rank.reduce(unit)
        if unit.recipe.kept:
            rank.started(unit)
    rank.clock.master = True
    for unit, gather in zip(rank.plan.units, gathers, strict=True):
        rank.gathered(gather, unit, backward=False)
    rings = getattr(rank.transport, "rings", {}).values()
    assert rank.planned.slots() == sum(ring.slots * ring.size for ring in rings)


# ---------------------------------------------------------------------- norm


@pytest.mark.parametrize(
    "numels",
    [(70_000,), (300_000, 300_000, 9), (5_000,) * 40 + (40_000, 3), (600_000,) * 7 + (2, 2)],
)
def test_the_norm_in_plain_torch(numels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for scalars."""
    monkeypatch.setattr(norm, "FOLD_NUMEL", 1_500_000)
    parameters = [SimpleNamespace(name=f"p{i}", shard_numel=n) for i, n in enumerate(numels)]
    unit = SimpleNamespace(unit=SimpleNamespace(parameters=parameters))
    plan: Any = SimpleNamespace(units=[unit])
    grads = {f"p{i}": torch.ones(n) for i, n in enumerate(numels)}
    with Live() as live:
        squares(grads, plan, torch.device("cpu"))
    assert square_bytes(numels, by_kernels=False) == pytest.approx(live.most, rel=0.02, abs=2048)


@pytest.mark.parametrize("numels", [(9,), (70_000, 3), (5_000,) * 200 + (100_000,) * 170])
def test_the_norm_by_kernels(numels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "operator", lambda name: lambda *_: None)
    grads = [torch.empty(n) for n in numels]
    with Live() as live:
        square_sums(grads, numels, 1)
    assert square_bytes(numels, by_kernels=True) == live.most
