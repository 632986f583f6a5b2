"""Passes: what is captured and replayed, side by side too, gives the bits of plain calls."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts

import pytest
import torch

from tests.engines.test_virtual_naive import configured
from zpp_lab.codecs import kernels
from zpp_lab.collectives.plan import PassUse
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config, EngineConfig
from zpp_lab.engines.base import Batch
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.engines.virtual.passes import Passes
from zpp_lab.models import build_model

MODEL = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn=96)
Q4 = {"bits": 4, "block_size": 64}
RECIPES: dict[str, dict] = {
    "zero3": {},
    "zeropp": {"secondary": True, "hops": 2, "weights": {**Q4, "bits": 8}, "grads": Q4},
    "own_backward": {"weights_forward": {"bits": 6}, "weights_backward": Q4},
    "differences": {
        "sharding": {"weights": "node", "update": "differences"},
        "weights_forward": {**Q4, "bits": 8},
        "weights_update": {**Q4, "rounding": "stochastic"},
        "hops": 2,
    },
    "stochastic": {"weights": {**Q4, "rounding": "stochastic"}, "grads": Q4},
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def tokens(step: int, rank: int, micro: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    drawn = torch.randint(0, 61, (2, 33), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def trained(
    config: Config, device: str, steps: int = 3, cfg: ModelConfig = MODEL
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and norms, and the master weights as bits."""
    model = build_model(cfg, 61, device=device, seed=3)
    engine = VirtualEngine(model, build_plan(model, config), config)
    said = []
    for step in range(steps):
        result = engine.step(step, 1e-2, partial(tokens, step), telemetry=step == 1)
        said += [result.loss, result.grad_norm, *map(float, sum(result.bytes.values(), ()))]
        said.append(engine.evaluate(step, [tokens(9, 9, 9)], wire=True))
    return said, [p.detach().view(torch.int32).cpu() for p in engine.cell.master.values()]


def set_up(recipe: str, engine: dict, **train: object) -> Config:
    config = configured(RECIPES[recipe], 2, 3, param_dtype="bf16", **train)
    return replace(config, engine=EngineConfig(**engine))


@on_gpu
@pytest.mark.parametrize("train", [{}, {"micro_steps": 2, "accumulate": "last"}], ids=["1", "2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_and_lanes_change_no_bit(recipe: str, train: dict) -> None:
    kernels.configure("reference")
    torch.use_deterministic_algorithms(True)
    try:
        plain = trained(set_up(recipe, {"graph": False}, **train), "cuda")
        for lanes in (1, 4):
            again = trained(set_up(recipe, {"lanes": lanes}, **train), "cuda")
            assert again[0] == plain[0], f"losses and norms with {lanes} lanes"
            assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
    finally:
        kernels.configure("auto")
        torch.use_deterministic_algorithms(False)


@on_gpu
@pytest.mark.parametrize("recipe", ["zero3", "own_backward"])
def test_blocks_that_compute_themselves_again_are_captured_too(recipe: str) -> None:
    again = replace(MODEL, checkpoint_activations=True)
    torch.use_deterministic_algorithms(True)
    try:
        plain = trained(set_up(recipe, {"graph": False}), "cuda", cfg=again)
        replayed = trained(set_up(recipe, {"lanes": 2}), "cuda", cfg=again)
        kept = trained(set_up(recipe, {"lanes": 2}), "cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    assert replayed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(replayed[1], plain[1], strict=True))
    if recipe == "zero3":  # others compute again from the weights of the other wire
        assert kept[0] == plain[0]


@on_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_serve_the_engine_with_the_reference_bits(recipe: str) -> None:
    config = set_up(recipe, {"lanes": 4})
    try:
        kernels.configure("reference")
        expected = trained(config, "cuda")
        kernels.configure("cuda")
        found = trained(config, "cuda")
    finally:
        kernels.configure("auto")
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@on_gpu
def test_a_model_that_waits_for_the_device_says_what_to_set() -> None:
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))

    def run(x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, PassUse]:
        loss = (weight * float(x.sum())).sum()
        loss.backward()
        return loss.detach(), PassUse({}, {})

    passes = Passes(run, {"weight": weight}, EngineConfig(), lanes=1)
    with pytest.raises(ValueError, match=r"engine\.graph=false"):
        list(passes.each([tokens(0, 0, 0)]))
