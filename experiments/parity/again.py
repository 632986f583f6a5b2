"""Is the virtual engine its own twin on a GPU, and where does it leave its own path?

    python experiments/parity/again.py --cases hadamard_kept,hadamard_left --size 125m --steps 3

Every setting trains the same case on one device; after each step every weight is compared with
those of the first setting, bit for bit. Prints which parameters differ, in how many elements, by
how much at most and where first. Settings: plain, plain again, one lane, no CUDA graph, and that
again.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from lab import SHAPES, Shape, configured, free
from torch import Tensor

from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model

Kept = list[tuple[float, float, dict[str, Tensor]]]  # loss, norm and weights after each step


def settings() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"plain": {}, "plain again": {}, "one lane": {"lanes": 1}}
    return found | {"no graph": {"graph": False}, "no graph again": {"graph": False}}


def batch(shape: Shape, step: int, rank: int, micro: int) -> Any:
    _, vocab, sequences, length = shape
    generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + micro)
    tokens = torch.randint(0, vocab, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(shape: Shape, config: Config, steps: int) -> Kept:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(shape[0], shape[1], device=device, seed=config.seed)
    engine, kept = VirtualEngine(model, build_plan(model, config), config), []
    for step in range(steps):
        done = engine.step(step, 1e-3, lambda r, m, s=step: batch(shape, s, r, m), False)
        weights = {n: p.detach().cpu().clone() for n, p in engine.cell.master.items()}
        kept.append((done.loss, done.grad_norm, weights))
    return kept


def compare(first: Kept, other: Kept) -> list[str]:
    lines = []
    for step, ((loss, norm, weights), (loss2, norm2, weights2)) in enumerate(
        zip(first, other, strict=True)
    ):
        if (loss, norm) != (loss2, norm2):
            lines.append(f"step {step}: loss {loss} | {loss2}, norm {norm} | {norm2}")
        for name, weight in weights.items():
            wrong = (weight.view(torch.int32) != weights2[name].view(torch.int32)).flatten()
            if wrong.any():
                gap = (weight - weights2[name]).abs().max()
                at = int(wrong.nonzero()[0])
                lines.append(
                    f"step {step}: {name} {tuple(weight.shape)}: {int(wrong.sum())} elements, "
                    f"by {gap:.3g} at most, first at {at}"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="hadamard_kept,hadamard_left,zeropp")
    parser.add_argument("--size", default="125m")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    shape = SHAPES[args.size]
    for case in args.cases.split(","):
        config = configured(case, ClusterConfig(nodes=1, gpus_per_node=4))
        config, first = replace(config, model=shape[0]), None
        for name, changes in settings().items():
            engine = replace(config.engine, name="virtual", **changes)
            kept = trained(shape, replace(config, engine=engine), args.steps)
            free()
            if first is None:
                first = kept
            lines = compare(first, kept)
            print(f"{case}, {name}: {'equal' if not lines else ''}", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
