"""What a block asks of the host, by how its activations are kept: no GPU, weights of 32 columns.

    python experiments/speed/block.py --out experiments/speed/block.json [--turns 40]

Microseconds of a block's forward and backward, of 24 blocks, medians of passes that take turns:
with everything kept, with torch's checkpointing, and with zpp_lab/models/llama.py. Kernels of
this size take next to nothing, so what is left is Python and autograd.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model, llama
from zpp_lab.models.llama import can_recompute
from zpp_lab.models.start import materialize
from zpp_lab.runs.provenance import commit, machine_facts, versions

LAYERS = 24
WAYS = {"kept": (False, False), "torch": (True, False), "one node": (True, True)}


def model(checkpoint: bool) -> nn.Module:
    cfg = ModelConfig(
        dim=32, layers=LAYERS, heads=2, kv_heads=2, ffn=64, checkpoint_activations=checkpoint
    )
    made = build_model(cfg, 64, device="meta")
    materialize(made, "cpu")
    for p in made.parameters():
        nn.init.normal_(p, 0, 0.02)
    return made


def timed(made: nn.Module, tokens: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    began = time.perf_counter()
    loss = made(tokens, tokens)
    between = time.perf_counter()
    loss.backward()
    return between - began, time.perf_counter() - between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(0, 64, (1, 16))
    models = {name: model(checkpoint) for name, (checkpoint, _) in WAYS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in range(args.turns + 3):
        for name, (_, ours) in WAYS.items():
            llama.can_recompute = can_recompute if ours else lambda *_: False
            taken = timed(models[name], tokens)
            if turn >= 3:
                times[name].append(taken)
    found = {
        name: {
            part: round(statistics.median(t[i] for t in own) / LAYERS * 1e6, 1)
            for i, part in enumerate(("forward", "backward"))
        }
        for name, own in times.items()
    }
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    args.out.write_text(json.dumps({**facts, "us": found}, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
