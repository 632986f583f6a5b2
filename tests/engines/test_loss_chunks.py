"""model.loss_chunk, z-loss and norms of queries and keys under both engines: the same bits, in
training and on held-out tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.engines.fsdp_jobs import asked, real, virtual
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.models import build_model

VOCAB = 37
SMALL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab_size=VOCAB, loss_chunk=5)
CASES = {
    "weights8": SMALL,
    "zero3_bf16": replace(SMALL, checkpoint_activations=True),
    "weights6": replace(SMALL, tied_head=True),  # bf16, as the one before
    "stage2": SMALL,
    "zeropp_last": replace(SMALL, qk_norm=True, z_loss=1e-2, loss_chunk=0),
    "zero3": replace(SMALL, qk_norm=True, z_loss=1e-2, checkpoint_activations=True),
}


def outcome(make: Any, config: Config, model: ModelConfig) -> Any:
    engine = make(config, build_model(model, VOCAB, seed=3))
    done = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(2)]
    results = [(r.loss, r.grad_norm, dict(r.bytes)) for r in done]
    held = engine.token_losses(2, [batch(9, i, 0) for i in range(3)], wire=True).tolist()
    return results, held, kept(engine)


def compared() -> dict[str, str]:
    torch.use_deterministic_algorithms(True)
    found = {}
    for case, model in CASES.items():
        config = configured(case, 1, 2)
        mine = outcome(real, config, model)
        found[case] = differs(mine, outcome(virtual, config, model)) if asked() else ""
    return found


def test_engines_agree_to_the_bit() -> None:
    assert run_world(2, compared) == dict.fromkeys(CASES, "")


def test_chunks_change_no_more_than_rounding() -> None:
    config = configured("weights8", 1, 2)
    cut, held, _ = outcome(virtual, config, SMALL)
    whole, wanted, _ = outcome(virtual, config, replace(SMALL, loss_chunk=0))
    assert max(abs(a[0] - b[0]) for a, b in zip(cut, whole, strict=True)) < 1e-5
    assert torch.allclose(torch.tensor(held), torch.tensor(wanted), atol=1e-4)


def test_a_z_loss_trains_and_is_in_no_loss_that_is_told() -> None:
    """The first loss, before any update, is that without it; the gradient is not."""
    config = configured("weights8", 1, 2)
    (plain, *_), *_ = outcome(virtual, config, SMALL)
    (with_z, second), held, _ = outcome(virtual, config, replace(SMALL, z_loss=0.5))
    assert with_z[0] == plain[0]
    assert with_z[1] > 1.5 * plain[1]
    assert max(second[0], *held) < 2 * plain[0]
