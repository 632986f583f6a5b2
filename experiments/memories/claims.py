"""What recipes that remember send, and how far one step's gradient and weights are off: a CPU does.

    python experiments/memories/claims.py

A tiny model is trained for 60 steps without a codec. From there each recipe makes the gradients of
16 steps at the same weights, each of its own text, and then trains for 8 steps. Errors are against
plain ZeRO-3 in fp32 on the same cluster, over all parameters: squared, as a share of what it has.

    one step   of the first mean gradient, when nothing is remembered yet
    16 steps   of the sum of all of them: what a memory brings later counts
    weights    as the wires bring them after 8 steps of training

Bytes are what the ledger counted in one step, all ranks together, over the model's elements.
Prints a table; more words are settings of all runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.data import TokenData, open_data
from zpp_lab.engines.base import Batches
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.engines.watch import Watch
from zpp_lab.models import build_model

WARM, SUMMED, TRAINED, RATE = 60, 16, 8, 1e-3
COMMON = [
    *("model=tiny", "data=stdlib", "data.seq_len=64", "data.max_bytes=2000000"),
    *("train.batch_size=4", "train.param_dtype=bf16", "train.reduce_dtype=bf16"),
    *("engine.device=cpu", "seed=1"),
]
FORGETS = "recipe.grads.memory.kind=none"
ARMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # name, cluster, settings
    ("plain ZeRO-3, bf16", "2x2", ("recipe=zero3",)),
    ("4-bit weights", "2x2", ("recipe=w4",)),
    ("ZeRO++", "2x2", ("recipe=zeropp",)),
    ("4-bit weight differences", "2x2", ("recipe=w4_diff",)),
    ("SDP4Bit", "2x2", ("recipe=sdp4bit",)),
    ("4-bit gradients", "2x2", ("recipe=g2_ef", "recipe.grads.bits=4", FORGETS)),
    ("4-bit gradients, remembered", "2x2", ("recipe=g2_ef", "recipe.grads.bits=4")),
    ("LoCo", "2x2", ("recipe=loco",)),
    ("2-bit gradients", "2x2", ("recipe=g2_ef", FORGETS)),
    ("2-bit gradients, remembered", "2x2", ("recipe=g2_ef",)),
    ("top 32 of 1024, remembered", "2x2", ("recipe=topk_ef",)),
    ("the same of blocks' matrices", "2x2", ("recipe=tagc_topk",)),
)


@dataclass(frozen=True)
class Row:
    bytes: tuple[float, ...]  # an element: weights and gradients inside nodes, and between them
    errors: tuple[float, ...]  # one step, the sum, the weights


def main() -> None:
    torch.manual_seed(0)
    print("| recipe | ranks | weights, bytes an element: inside, between | gradients | one step |"
          " 16 steps | weights |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name, cluster, settings in ARMS:
        row = measured(cluster, (*settings, *sys.argv[1:]))
        weights, grads = (" + ".join(f"{b:.2f}" for b in row.bytes[i : i + 2]) for i in (0, 2))
        errors = " | ".join(f"{e:.2g}" for e in row.errors)
        print(f"| {name} | {cluster} | {weights} | {grads} | {errors} |", flush=True)


def measured(cluster: str, settings: Sequence[str]) -> Row:
    config = configured(cluster, settings)
    exact, first_exact = gradients(cluster)
    engine = started(config, trained())
    total, first = summed(engine, config)
    errors = [error(first, first_exact), error(total, exact)]
    engine = started(config, trained())
    for step in range(TRAINED):
        sent = engine.step(step, RATE, batches(config, step), False).bytes
    engine.cell.gather(TRAINED, "weights_forward", engine.cell.weights)
    wired = {n: p.detach().float() for n, p in engine.cell.weights.items()}
    errors.append(error(wired, {n: p.detach() for n, p in engine.cell.master.items()}))
    numel = sum(p.numel() for p in engine.cell.master.values())
    kinds = [[t for wire, t in sent.items() if wire.startswith(kind)] for kind in ("weig", "grad")]
    moved = [sum(t[side] for t in kind) / numel for kind in kinds for side in (0, 1)]
    return Row(tuple(moved), tuple(errors))


def configured(cluster: str, settings: Sequence[str]) -> Config:
    return compose([*COMMON, f"cluster={cluster}", *settings])


@cache
def text() -> TokenData:
    data = open_data(configured("2x2", ()).data)
    assert isinstance(data, TokenData)
    return data


def batches(config: Config, step: int) -> Batches:
    shape = (config.cluster.world, 1, config.train.batch_size, config.data.seq_len)
    return text().step(config.seed, WARM + step, *shape)


def started(config: Config, weights: dict[str, Tensor]) -> VirtualEngine:
    model = build_model(config.model, text().vocab_size, device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.get(name, p))
    return VirtualEngine(model, build_plan(model, config), config)


@cache
def trained() -> dict[str, Tensor]:
    """Weights after some steps of plain training."""
    config = configured("2x2", ("recipe=zero3", "train.param_dtype=fp32"))
    engine = started(config, {})
    for step in range(WARM):
        engine.step(step, RATE, batches(config, step - WARM), False)
    return {n: p.detach().clone() for n, p in engine.cell.master.items()}


@cache
def gradients(cluster: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact ones: of all steps, and of the first."""
    plain = ("recipe=zero3", "train.param_dtype=fp32", "train.reduce_dtype=fp32")
    config = configured(cluster, plain)
    return summed(started(config, trained()), config)


def summed(engine: VirtualEngine, config: Config) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean gradients of several steps at the same weights, added up; and the first step's."""
    total: dict[str, Tensor] = {}
    for step, grads in enumerate(steps_of(engine, config, SUMMED)):
        if not step:
            first = {n: g.double() for n, g in grads.items()}
        total = {n: total.get(n, 0.0) + g.double() for n, g in grads.items()}
    return total, first


def steps_of(engine: VirtualEngine, config: Config, steps: int) -> Iterator[dict[str, Tensor]]:
    for step in range(steps):
        engine.cell.ledger.start_step()
        engine.cell.start(step)
        _, (grads,) = engine._gradients(step, batches(config, step), [Watch()])
        # what was sent is what was planned
        engine.cell.check_bytes(engine._passes(), engine.reduced)
        engine.cell.memories.commit()
        yield grads


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    lost = sum(float((found[n].double() - x.double()).square().sum()) for n, x in exact.items())
    return lost / sum(float(x.double().square().sum()) for x in exact.values())


if __name__ == "__main__":
    main()
