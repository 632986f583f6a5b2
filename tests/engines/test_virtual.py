"""The virtual engine's own promises: memory, non-finite values, telemetry, state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.engines.test_virtual_naive import CASES, configured
from tests.engines.uneven import batch, build_uneven
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import wires_among
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine


def engine(config: Config) -> VirtualEngine:
    model = build_uneven()
    return VirtualEngine(model, build_plan(model, config), config)


def assert_same_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """NaN and signs of zeros too."""
    for name, p in found.items():
        assert torch.equal(p.detach().view(torch.int32), wanted[name].detach().view(torch.int32))


def test_a_bad_weight_is_named_with_its_wire_and_step() -> None:
    made = engine(configured(CASES["zeropp"], 2, 2))
    with torch.no_grad():
        made.cell.master["layers.1.up.weight"][3, 3] = torch.nan
    before = {n: p.detach().clone() for n, p in made.cell.master.items()}
    with pytest.raises(NonFiniteError, match=r"step 7: weights_forward .*layers\.1\.up"):
        made.step(7, 1e-3, partial(batch, 7), telemetry=False)
    assert_same_bits(made.cell.master, before)


def test_a_bad_gradient_is_named_with_its_rank() -> None:
    made = engine(configured(CASES["zeropp"], 2, 2))
    weight = made.cell.weights["layers.0.down_proj.weight"]
    calls = iter(range(100))
    weight.register_hook(lambda g: g * (torch.inf if next(calls) in (2, 6) else 1.0))
    with pytest.raises(NonFiniteError, match=r"layers\.0\.down_proj\.weight on rank 2"):
        made.step(0, 1e-3, partial(batch, 0), telemetry=False)


def test_telemetry_is_of_codecs_alone_and_grows_as_bits_fall() -> None:
    errors = {}
    for bits in (8, 4, 2):
        config = configured({"hops": 2, "weights": {"bits": bits}, "grads": {"bits": bits}}, 2, 2)
        result = engine(config).step(0, 1e-3, partial(batch, 0), telemetry=True)
        assert result.telemetry is not None
        assert "norm" not in result.telemetry["weights_forward"]  # exempt
        errors[bits] = {w: t["other"]["nmse"] for w, t in result.telemetry.items()}
    for wire in wires_among():
        assert 0 < errors[8][wire] < errors[4][wire] < errors[2][wire]


def test_evaluation_with_wire_and_master_weights() -> None:
    config = configured({"weights": {"bits": 2, "block_size": 8192}}, 2, 2)
    made = engine(config)
    data = [batch(0, r, 0) for r in range(3)]
    wire, master = (made.evaluate(0, data, wire=w) for w in (True, False))
    plain = torch.stack([build_uneven()(x, y).detach().double() for x, y in data]).mean()
    assert master == pytest.approx(float(plain), rel=1e-6)
    assert wire != master


def test_telemetry_does_not_change_training() -> None:
    config = configured(CASES["hadamard_kept"], 2, 2)
    one, two = engine(config), engine(config)
    one.step(0, 1e-2, partial(batch, 0), telemetry=True)
    two.step(0, 1e-2, partial(batch, 0), telemetry=False)
    assert_same_bits(one.cell.master, two.cell.master)
