"""Why a wide and deep model starts badly, on models that a CPU holds: start.py [OUT.json] [PART...]

Adam's first step moves every weight by the learning rate, whatever its gradient. `width` and
`depth` take one such step of many lengths from the first weights and look at the loss of held-out
tokens: how long may a first step be in a model of so many columns and blocks? `remedies` trains a
few steps in settings that stand in for 13B and compares ways to begin; `longer` looks at 64 steps
of the three ways that were used, each twice. Nothing here knows a codec.

Numbers in units of the first schedule: 1 is 7.5e-6 at 5120 columns, more in proportion to fewer,
which moves what a matrix gives equally far. Head rows keep the length they have at 5120 columns.
Everything is a function of the seed and of this installation's standard library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.config.data import DataConfig
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import TrainConfig
from zpp_lab.data.tokens import TokenData, open_data
from zpp_lab.engines.optim.build import adamw, learning_rate, set_rate
from zpp_lab.models.llama import Llama
from zpp_lab.models.start import fill, whole

UNIT = 7.5e-6 * 5120  # learning rate × columns of the first step of the first schedule
HEAD = 0.02 * 5120**0.5  # length of a head's row there
LENGTHS = [2.0**i for i in range(-2, 7)]
SEED = 1


@dataclass(frozen=True)
class Remedy:
    """A way to begin, in 150 steps: defaults are the first schedule."""

    name: str
    warmup: int = 20
    peak: float = 1.0  # of the first schedule's
    embedding: float = 0.02  # deviation
    head: float = HEAD  # length of a row
    beta2: float = 0.95
    noise: float = 0.0  # relative deviation added to every first weight


def shaken(remedy: Remedy) -> Remedy:
    return replace(remedy, name=f"{remedy.name}, shaken", noise=1e-3)


REMEDIES = [
    Remedy("first schedule"),
    Remedy("warm-up 60", warmup=60),
    Remedy("warm-up 100", warmup=100),
    Remedy("warm-up 100, half the peak", warmup=100, peak=0.5),
    Remedy("embedding 1", embedding=1.0),
    Remedy("head 1/dim", head=512**-0.5),
    Remedy("beta2 0.99", beta2=0.99),
    Remedy("embedding 1, warm-up 100", embedding=1.0, warmup=100),
    Remedy("head 1/dim, warm-up 100", head=512**-0.5, warmup=100),
    Remedy("first schedule, shaken", noise=1e-3),
    Remedy("warm-up 100, half the peak, shaken", warmup=100, peak=0.5, noise=1e-3),
    Remedy("three times as long: first schedule", peak=3.0),
    Remedy("three times as long: warm-up 100", peak=3.0, warmup=100),
    Remedy("three times as long: warm-up 100, half the peak", peak=1.5, warmup=100),
]

SECOND = Remedy("second schedule", warmup=100, peak=0.5)
# Its rate × columns is that of 13B, not its rate × columns²: `hot` has the latter.
THIRD = Remedy("third", warmup=25, peak=1 / 30, embedding=1.0, head=512**-0.5)
HOT = replace(THIRD, name="third, hot", peak=1 / 3)
LONGER = [r for one in (REMEDIES[0], SECOND, THIRD, HOT) for r in (one, shaken(one))]


def data(length: int) -> TokenData:
    found = open_data(
        DataConfig(
            tokenizer="bpe", vocab_size=2048, bpe_every=8, max_bytes=8_000_000, seq_len=length
        )
    )
    assert isinstance(found, TokenData)
    return found


def model(dim: int, layers: int, vocab: int, embedding: float = 0.02, head: float = HEAD) -> Llama:
    heads = max(2, dim // 64)
    cfg = ModelConfig(
        dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn=dim * 27 // 80 * 8, init="philox"
    )
    made = Llama(cfg, vocab)
    fill(made, made.start(SEED), whole, lambda p: p.data)
    assert made.head is not None
    with torch.no_grad():
        made.embed.weight.mul_(embedding / 0.02)
        made.head.weight.mul_(head * dim**-0.5 / 0.02)
    return made


@torch.no_grad()
def loss_of(made: Llama, tokens: tuple[Tensor, Tensor]) -> float:
    return made(*tokens).item()


def first_steps(dim: int, layers: int) -> dict[str, float]:
    """How the loss of 512 held-out tokens changes by one Adam step of each length, by its unit."""
    source = data(512)
    made = model(dim, layers, source.vocab_size)
    made(*source.batch(SEED, 0, 0, 0, 2, 512)).backward()
    held = next(source.heldout(512, 1, 512))
    signs = [p.grad.sign() for p in made.parameters() if p.grad is not None]
    for p in made.parameters():
        p.grad = None
    before, at, changes = loss_of(made, held), 0.0, {}
    for length in LENGTHS:
        rate = length * UNIT / dim
        with torch.no_grad():
            for p, sign in zip(made.parameters(), signs, strict=True):
                p.sub_(sign, alpha=rate - at)
        at = rate
        changes[f"{length:g}"] = round(loss_of(made, held) - before, 3)
    return changes


@torch.no_grad()
def shake(made: Llama, noise: float) -> None:
    """Other roundings, as it were: how far apart do two runs end that differ in nothing else?"""
    generator = torch.Generator().manual_seed(SEED)
    for p in made.parameters() if noise else ():
        p.mul_(1 + noise * torch.randn(p.shape, generator=generator))


def begin(remedy: Remedy, steps: int = 16) -> dict[str, list[float]]:
    """Held-out loss before and after each of the first steps: 512 columns, 4 blocks, and rates
    with the 13B schedule's rate × columns², which `width` finds to set the best first step. Three
    times as long stands for what else is larger there, blocks and batch among it."""
    dim, layers, source = 512, 4, data(64)
    made = model(dim, layers, source.vocab_size, remedy.embedding, remedy.head)
    peak = remedy.peak * 1.5e-4 * (5120 / dim) ** 2
    train = TrainConfig(steps=150, lr=peak, warmup_steps=remedy.warmup, beta2=remedy.beta2)
    shake(made, remedy.noise)
    optimizer = adamw(dict(made.named_parameters()), train)
    held = next(source.heldout(1024, 16, 64))
    losses, norms = [loss_of(made, held)], []
    for step in range(steps):
        set_rate(optimizer, learning_rate(step, train))
        optimizer.zero_grad()
        made(*source.batch(SEED, step, 0, 0, 8, 64)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(made.parameters(), train.clip).item())
        optimizer.step()
        losses.append(loss_of(made, held))
    return {"heldout": [round(v, 3) for v in losses], "norm": [round(v, 2) for v in norms]}


PARTS: dict[str, dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "width": {f"{d} columns, 8 blocks": (first_steps, (d, 8)) for d in (256, 512, 1024)},
    "depth": {"512 columns, 2 blocks": (first_steps, (512, 2))},
    "remedies": {r.name: (begin, (r,)) for r in REMEDIES},
    "longer": {r.name: (begin, (r, 64)) for r in LONGER},
}


def main(out: Path, parts: list[str]) -> None:
    torch.set_num_threads(1)
    results = json.loads(out.read_text()) if out.exists() else {}
    for part in parts:
        for name, (work, given) in PARTS[part].items():
            begun = time.monotonic()
            results.setdefault(part, {})[name] = work(*given)
            print(f"{part}: {name}: {results[part][name]} {time.monotonic() - begun:.0f} s")
            out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["start.json"])[0]), sys.argv[2:] or [*PARTS])
