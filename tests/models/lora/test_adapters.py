"""Which layers get adapters, what they start from, and mistakes that are answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engines.uneven import batch, build_uneven
from tests.models.lora.models import VOCAB, build, lora, on_base, save_base, with_lora
from zpp_lab.codecs.kernels import padded_rows
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine, build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model
from zpp_lab.models.lora import adapters_of, frozen_base, merged

ON = ["lora=q4", "model.weights=pretrained", "model.path=x"]


def test_a_layer_gives_w_x_plus_scaled_b_a_x() -> None:
    model = build(lora())
    layer, x = model.layers[0].up, torch.randn(5, 24)
    wanted = F.linear(x, layer.weight, layer.bias) + 2.0 * (x @ layer.lora_A.t()) @ layer.lora_B.t()
    assert torch.allclose(layer(x), wanted, atol=1e-6)
    whole = merged(layer.weight, layer.lora_A, layer.lora_B, 2.0, inputs_first=False)
    assert torch.allclose(F.linear(x, whole, layer.bias), wanted, atol=1e-5)


def test_only_adapters_are_trained_and_units_stay() -> None:
    model = build(lora())
    before = {n for n, _ in build_uneven().named_parameters()}
    assert frozen_base(model) == before
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    linears = [f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down_proj")]
    assert trained == {a for n in linears for a in adapters_of(n)}
    config = with_lora("zero3", 1, 2, lora())
    units = build_plan(model, config).units
    assert [u.unit.name for u in units] == ["layers.0", "layers.1", "root"]
    assert units[-1].unit.trainable == frozenset()


def test_before_the_first_step_it_is_the_decoded_base(tmp_path: Path) -> None:
    """B is zero: the model is its base, encoded with the rows that each rank has."""
    base = save_base(tmp_path)
    config = on_base(load(Config, {"cluster": {"nodes": 1, "gpus_per_node": 2}}), base, lora("q4"))
    engine = build_engine(config, VOCAB, torch.device("cpu"))
    assert isinstance(engine, VirtualEngine)
    original = build_model(replace(base), VOCAB)
    weights = dict(original.named_parameters())
    with torch.no_grad():
        for unit in engine.plan.units:
            for segment in unit.stored.segments:
                w = weights[segment.name]
                rows = padded_rows(w, 2, segment.numel)
                out = torch.empty(2, segment.nbytes, dtype=torch.uint8)
                segment.codec.encode(rows, None, out)
                decoded = segment.codec.decode(out, segment.numel).flatten()[: w.numel()]
                w.copy_(decoded.view(w.shape))
        tokens, targets = batch(0, 0, 0)
        wanted = original(tokens, targets)
    assert engine.evaluate(0, [(tokens, targets)], wire=True) == pytest.approx(float(wanted))
    fresh = dict(build_model(base, VOCAB).named_parameters())
    assert not torch.equal(weights["layers.0.mlp.w_up.weight"], fresh["layers.0.mlp.w_up.weight"])
    assert torch.equal(weights["embed.weight"], fresh["embed.weight"])


def test_frozen_parameters_send_no_gradient_and_gathers_send_the_payload() -> None:
    config = with_lora("grads8", 1, 2, lora("q4"))
    plan = build_plan(build(lora("q4")), config)
    bytes_ = plan.step_bytes()
    stored = sum(u.stored.nbytes for u in plan.units)
    live = sum(u.live("weights_forward").nbytes for u in plan.units)
    assert sum(bytes_["weights_forward"]) == 2 * (stored + live)
    hops = sum(u.hops[0].nbytes for u in plan.units)
    assert sum(bytes_["grads_intra"]) == 2 * hops
    names = {s.name for u in plan.units for s in u.hops[0].segments}
    assert all(n.endswith(("lora_A", "lora_B")) for n in names)


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["lora=q4"], "adapts a trained model: set model.weights=pretrained"),
        (["model.lora.dropout=0.1"], "model.lora.dropout"),
        (["model.lora.rank=-1"], "use 0"),
        (["model.lora.base_codec.rounding=stochastic"], "use nearest"),
        (["model.lora.base_codec.codec=block"], "needs bits"),
        (["model.lora.targets=[wq]"], "set model.lora.rank"),
        ([*ON, "engine=fsdp", "engine.offload=true"], "set engine.offload=false"),
        ([*ON, "engine.offloda=true"], "Did you mean offload"),
    ],
)
def test_settings_that_contradict(overrides: list[str], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        compose(overrides)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        (
            {"targets": ["q_proj"]},
            "'q_proj' matches no linear layer of a block; .*down_proj, up",
        ),
        ({"targets": ["head"]}, "matches no linear layer of a block"),
        ({"rank": 25}, r"rank=25 is above the full rank of layers.0.up \(24 to 53\)"),
    ],
)
def test_targets_that_cannot_be(changes: dict[str, Any], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        build(lora(**changes))


def test_recipes_that_do_not_fit() -> None:
    config = with_lora("zero3", 2, 2, lora())
    sharded = replace(config.recipe, shard="node")
    with pytest.raises(ValueError):
        Recipe(sharded, config.cluster, lora=lora())


def test_a_base_that_is_not_finite_is_named() -> None:
    model = build(lora())
    with torch.no_grad():
        model.layers[1].up.weight[3, 3] = torch.inf
    config = with_lora("zero3", 1, 2, lora())
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight"):
        VirtualEngine(model, build_plan(model, config), config)
