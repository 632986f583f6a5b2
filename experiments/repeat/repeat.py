"""Does the same step give the same loss and the same gradient's norm, to the bit? See README.md.

A few steps of training come first, each with a batch of its own. Then one batch again and again at
a learning rate of 0: weights stay, while all else that a step does is done, moments included.
`--slack` fills each GPU beforehand, until so much is left beyond the tensors of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import VOCAB, batches, keep, start

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine
from zpp_lab.train.footprint import GIB

WARM = 3
PIECE = 2**28  # bytes of the device that are taken at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--slack", type=float, metavar="GIB", help="default: nothing is filled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the case in the results")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: the run")
    args = parser.parse_args()
    config = compose(["engine=fsdp", "tracking.wandb=off", *args.overrides])
    device = start(config)
    torch.use_deterministic_algorithms(config.engine.deterministic)
    engine = build_engine(config, config.model.vocab_size or VOCAB, device)
    for step in range(WARM):
        taken(engine, config, step, 1e-6)
    held = [] if args.slack is None else filled(device, args.slack)
    found = [taken(engine, config, WARM, 0.0) for _ in range(args.times)]
    result = {
        "overrides": args.overrides,
        "slack_gib": args.slack,
        "held_gib": sum(t.nbytes for t in held) / GIB,
        "steps": len(found),
        "loss": found[0][0],
        "norm": found[0][1],
        "differing": differing(found),
        **allocator(device),
    }
    keep(args.out / "repeat.json", args.name, result)
    if dist.get_rank() == 0:
        print(line(args.name, result), flush=True)
    dist.barrier()
    engine.graph.drop()  # NCCL ends a group only after the CUDA graphs that hold its transfers
    dist.destroy_process_group()


def taken(engine: Any, config: Config, step: int, lr: float) -> tuple[float, float]:
    """Loss and norm of one step, alike on all ranks."""
    vocab = config.model.vocab_size or VOCAB
    result = engine.step(step, lr, batches(config, step, vocab), False)
    return result.loss, result.grad_norm


def filled(device: torch.device, slack: float) -> list[torch.Tensor]:
    """What takes the device's memory until a step has its tensors and `slack` GiB; ValueError
    without a GPU, or where it has less."""
    if device.type != "cuda":
        raise ValueError("--slack: only a GPU is filled; leave it out")
    torch.cuda.empty_cache()
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    spare = torch.cuda.mem_get_info(device)[0] - step - int(slack * GIB)
    if spare < 0:
        raise ValueError(f"--slack {slack}: the run itself leaves {slack + spare / GIB:.1f} GiB")
    return [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(spare // PIECE)]


def differing(found: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Steps that are not the first one's repetition, with what they gave."""
    return [
        {"repetition": i, "loss": loss, "norm": norm}
        for i, (loss, norm) in enumerate(found)
        if (loss, norm) != found[0]
    ]


def allocator(device: torch.device) -> dict[str, float]:
    """Of this rank: how often memory was given back and asked for again, and what is reserved."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "retries": stats["num_alloc_retries"],
        "peak_gib": stats["allocated_bytes.all.peak"] / GIB,
        "reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
    }


def line(name: str, result: dict[str, Any]) -> str:
    tight = f", {result['retries']} retries of the allocator" if "retries" in result else ""
    what = f"{len(result['differing'])} of {result['steps']} steps differ from the first{tight}"
    first = f": {result['differing'][0]}, first {result['norm']}" if result["differing"] else ""
    return f"{name}: {what}{first}"


if __name__ == "__main__":
    main()
