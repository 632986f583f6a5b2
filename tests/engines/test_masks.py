"""Masked targets under both engines: the same bits, and a mean over all counted tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.engines.fsdp_jobs import asked
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from tests.models.hf_cases import CASES as FAMILIES
from tests.models.hf_cases import settings
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.data.packed import IGNORED
from zpp_lab.engines.build import build_engine
from zpp_lab.models import build_model
from zpp_lab.models.loss import counted

VOCAB, WORLD = 37, 2
SMALL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab_size=VOCAB)
CASES: dict[str, ModelConfig] = {
    "zeropp_last": SMALL,  # bf16, three micro-steps
    "weights4": replace(SMALL, loss_chunk=5),
    "stage2": replace(SMALL, tied_head=True, checkpoint_activations=True),
    "zero3_bf16_reduce": SMALL,
}


def masked(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """A prompt of another length in every sequence, and padding behind it."""
    x, y = batch(step, rank, micro)
    for row, targets in enumerate(y):
        targets[: 1 + (step + 2 * rank + 3 * micro + row) % 6] = IGNORED
    y[0, -1] = IGNORED
    return x, y


def batches(step: int, micros: int, rank: int, micro: int) -> tuple[Tensor, ...]:
    turns = [(r, m) for r in range(WORLD) for m in range(micros)]
    total = sum(counted(masked(step, *turn)[1]) for turn in turns)
    return *masked(step, rank, micro), torch.tensor([WORLD * micros, total])


def outcome(config: Config, engine: Any) -> Any:
    named = replace(config, engine=replace(config.engine, name=engine))
    made = build_engine(named, VOCAB, torch.device("cpu"))
    micros = config.train.micro_steps
    done = [made.step(s, 1e-2, partial(batches, s, micros), telemetry=False) for s in range(2)]
    results = [(r.loss, r.grad_norm, dict(r.bytes)) for r in done]
    held = made.token_losses(3, [masked(9, i, 0) for i in range(5)], wire=True).tolist()
    held.append(made.evaluate(3, [masked(9, i, 0) for i in range(5)], wire=False))
    return results, held, kept(made)


def compared(folder: str, names: list[str]) -> dict[str, str]:
    """Ours by case, and families of transformers from a folder."""
    torch.use_deterministic_algorithms(True)
    found = {}
    for name in names:
        if name in CASES:
            case, model = name, CASES[name]
        else:
            case = "weights8"
            model = settings(name, path=f"{folder}/{name}", weights="pretrained")
        config = replace(configured(case, 1, WORLD, gather="hierarchical"), model=model)
        mine = outcome(config, "fsdp")
        found[name] = differs(mine, outcome(config, "virtual")) if asked() else ""
    return found


QUICK = [*CASES, "llama", "opt"]
OTHERS = [kind for kind in FAMILIES if kind not in QUICK]


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["ours", "others"]
)
def test_engines_agree_to_the_bit(tmp_path: Path, names: list[str]) -> None:
    for kind in set(names) & set(FAMILIES):
        config = build_model(settings(kind), VOCAB, "meta").config
        plain = transformers.AutoModelForCausalLM.from_config(config)
        plain.save_pretrained(tmp_path / kind, max_shard_size="4KB")
    assert run_world(WORLD, compared, str(tmp_path), names) == dict.fromkeys(names, "")


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@on_gpu
@pytest.mark.parametrize("chunk", [0, 5])
def test_a_replayed_pass_sees_each_batchs_mask(chunk: int) -> None:
    """Three steps of masks from a graph and lanes, against plain calls; a CPU has only those."""
    said = []
    for how in ({"graph": False}, {"graph": True, "lanes": 2}):
        config = configured("zeropp_last", 1, WORLD, **{"device": "cuda", **how, "name": "virtual"})
        config = replace(config, model=replace(SMALL, loss_chunk=chunk))
        engine = build_engine(config, VOCAB, torch.device("cuda"))
        done = [engine.step(s, 1e-2, partial(batches, s, 3), telemetry=False) for s in range(3)]
        held = engine.token_losses(3, [masked(9, i, 0) for i in range(5)], wire=True).tolist()
        said.append(([(r.loss, r.grad_norm) for r in done], held))
    assert said[0] == said[1]


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_step_is_the_mean_over_its_counted_tokens(chunk: int) -> None:
    """Not a mean of means: one plain pass over all counted tokens has this loss and gradient."""
    model = replace(SMALL, loss_chunk=chunk)
    config = configured("zero3", 1, WORLD)
    config = replace(config, model=model, train=replace(config.train, micro_steps=2, clip=0.0))
    engine = build_engine(
        replace(config, engine=replace(config.engine, name="virtual")), VOCAB, torch.device("cpu")
    )
    result = engine.step(0, 1e-2, partial(batches, 0, 2), telemetry=False)

    plain = build_model(replace(model, loss_chunk=0), VOCAB, seed=config.seed)
    turns = [masked(0, rank, micro) for rank in range(WORLD) for micro in range(2)]
    x, y = (torch.cat(side) for side in zip(*turns, strict=True))
    loss = torch.nn.functional.cross_entropy(
        plain(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
