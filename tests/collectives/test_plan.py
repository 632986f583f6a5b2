"""The plan's bytes against formulas written out by hand."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest

from tests.engines.test_virtual_naive import configured
from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.ledger import Ledger, LedgerError
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.study.speed.speeds import recipe_settings

Q8 = {"bits": 8, "block_size": 16}


def up(n: int) -> int:
    return -(-n // 16) * 16


def raw_row(world: int, skip: tuple[str, ...] = ()) -> int:
    """fp32 payload of one rank for the whole model."""
    total = 0
    for name, p in build_uneven().named_parameters():
        if name not in skip:
            rest = p.numel() // p.shape[0]
            total += up(-(-p.shape[0] // world) * rest * 4)
    return total


def root_row(world: int) -> int:
    return sum(
        up(-(-p.shape[0] // world) * (p.numel() // p.shape[0]) * 4)
        for n, p in build_uneven().named_parameters()
        if not n.startswith("layers.")
    )


def test_zero3_by_hand() -> None:
    config = configured({}, 2, 2)
    plan = build_plan(build_uneven(), config)
    row, root = raw_row(4), root_row(4)
    moved = plan.step_bytes(plan.all_used(frozenset({"unused"})))
    # hierarchical gather: each of 4 ranks sends 1 row across, then 2 rows inside
    assert moved["weights_forward"] == Traffic(4 * 2 * row, 4 * row)
    assert moved["weights_backward"] == Traffic(4 * 2 * (row - root), 4 * (row - root))
    grads = raw_row(4, skip=("unused", "frozen"))
    assert moved["grads_intra"] == Traffic(4 * grads, 0)
    assert moved["grads_inter"] == Traffic(0, 4 * 2 * grads)


@pytest.mark.parametrize(
    ("short", "parts"),
    [
        ({"stage": 3}, ("world", "world", "world")),
        ({"stage": 2}, ("none", "world", "world")),
        ({"stage": 1}, ("none", "none", "world")),
        ({"shard": "node"}, ("node", "node", "node")),
    ],
)
def test_short_hands_are_points_of_the_grid(short: dict, parts: tuple[str, ...]) -> None:
    sharding = dict(zip(("weights", "grads", "optimizer"), parts, strict=True))
    one, other = (
        build_plan(build_uneven(), configured(recipe, 2, 2, micro_steps=2))
        for recipe in (short, {"sharding": sharding})
    )
    assert one.recipe.config.parts == other.recipe.config.parts == parts
    assert one.step_bytes() == other.step_bytes()
    assert one.reductions == other.reductions
    assert recipe_settings(asdict(one.recipe.config)) == recipe_settings(
        asdict(other.recipe.config)
    )


def test_a_sham_sends_what_no_codec_sends() -> None:
    sham = build_plan(build_uneven(), configured({"weights": Q8 | {"codec": "sham"}}, 2, 2))
    plain = build_plan(build_uneven(), configured({}, 2, 2))
    assert sham.step_bytes() == plain.step_bytes()
    assert not any(sham.quantized_share().values())


def test_secondary_partition_sends_nothing_between_nodes() -> None:
    config = configured({"secondary": True, "weights": Q8}, 2, 4)
    moved = build_plan(build_uneven(), config).step_bytes()
    assert moved["weights_backward"].inter == 0 < moved["weights_backward"].intra
    assert moved["weights_forward"].inter > 0


@pytest.mark.parametrize(("stage", "times"), [(3, 3), (2, 1), (1, 1)])
def test_stages_and_micro_steps(stage: int, times: int) -> None:
    one = build_plan(build_uneven(), configured({"stage": stage}, 2, 2)).step_bytes()
    three = build_plan(
        build_uneven(), configured({"stage": stage}, 2, 2, micro_steps=3)
    ).step_bytes()
    assert three["weights_forward"] == one["weights_forward"] * times
    assert three["grads_intra"] == one["grads_intra"] * (1 if stage == 1 else 3)
    assert (one["weights_backward"] == Traffic(0, 0)) == (stage != 3)


def test_the_engine_counts_what_was_planned() -> None:
    config = configured({"hops": 2, "secondary": True, "weights": Q8, "grads": Q8}, 3, 2)
    model = build_uneven()
    engine = VirtualEngine(model, build_plan(model, config), config)
    result = engine.step(0, 1e-3, partial(batch, 0), telemetry=False)
    absent = frozenset({"unused"})
    trainable = frozenset(n for n, p in engine.cell.master.items() if p.requires_grad)
    assert engine.reduced == [trainable - absent]
    assert result.bytes == engine.plan.step_bytes(engine.plan.all_used(absent))
    assert result.bytes != engine.plan.step_bytes()


def test_the_ledger_fails_closed() -> None:
    ledger = Ledger()
    ledger.add("grads_intra", Traffic(5, 0))
    with pytest.raises(LedgerError, match="grads_intra"):
        ledger.check({w: Traffic(0, 0) for w in ledger.step})
