"""Which sequence makes a step's gradient jump, and where in the model: `look.py RUN --out FILE`

RUN has a checkpoint of the step before. For each sequence of the next step: loss and the norm of
its own gradient, with the weights that the wire brings and with the fp32 masters, computed in bf16
and in fp32; and by layer the norm of the gradient of its output and that output's root mean square.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.schema import Config
from zpp_lab.data import open_data
from zpp_lab.models import build_model
from zpp_lab.runs.checkpoint.read import open_saved
from zpp_lab.tools.export.model import run_config
from zpp_lab.tools.export.wire import WireWeights
from zpp_lab.train.resume import check_same_data

Read = Callable[[str], Tensor]
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config, saved = run_config(args.run), open_saved(args.run)
    data = open_data(config.data)
    check_same_data(args.run, data, resumed=True)
    reads: dict[str, Read] = {"master": saved.read}
    wire = WireWeights(config, saved)
    if wire.quantized:
        reads["wire"] = lambda name: wire.decoded(name, device=CPU)
    found = []
    for weights, read in reads.items():
        for dtype in (torch.bfloat16, torch.float32):
            model = made(config, data.vocab_size, read, dtype)
            for place, batch in sequences(config, data, saved.step):
                named = str(dtype).removeprefix("torch.")
                found.append({"weights": weights, "dtype": named, **place, **looked(model, batch)})
                print(line(found[-1]), flush=True)
    result = {"run": args.run.name, "step": saved.step + 1, "sequences": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def made(config: Config, vocab_size: int, read: Read, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = build_model(config.model, vocab_size, "cpu", config.seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(read(name))
    return model.to(dtype)


def sequences(
    config: Config, data: Any, step: int
) -> Iterator[tuple[dict[str, int], tuple[Tensor, Tensor]]]:
    """Each sequence of a step (from 0 on) as a batch of one, and where it stands."""
    train = config.train
    world, micros = config.cluster.world, train.micro_steps
    batches = data.step(config.seed, step, world, micros, train.batch_size, config.data.seq_len)
    for rank in range(world):
        for micro in range(micros):
            inputs, targets = batches(rank, micro)[:2]
            for row in range(len(inputs)):
                place = {"rank": rank, "micro": micro, "row": row}
                yield place, (inputs[row : row + 1], targets[row : row + 1])


def looked(model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One forward and backward."""
    outputs: list[Tensor] = []

    def seen(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    hooks = [layer.register_forward_hook(seen) for _, layer in model.units()]
    model.zero_grad(set_to_none=True)
    loss = model(*batch)
    loss.backward()
    for hook in hooks:
        hook.remove()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    return {
        "loss": float(loss.detach()),
        "norm": squares**0.5,
        "gradients": [float(norm(o.grad)) for o in outputs if o.grad is not None],
        "rms": [float(norm(o.detach())) / o.numel() ** 0.5 for o in outputs],
    }


def norm(x: Tensor) -> Tensor:
    return x.double().square().sum().sqrt()


def line(found: dict[str, Any]) -> str:
    first, last = found["gradients"][0], found["gradients"][-1]
    return (
        f"{found['weights']} {found['dtype']} rank {found['rank']} row {found['row']}: loss "
        f"{found['loss']:.4f}, norm {found['norm']:.3f}, gradient {last:.4f} behind the last layer "
        f"and {first:.4f} behind the first, rms {found['rms'][-1]:.2f} and {found['rms'][0]:.2f}"
    )


if __name__ == "__main__":
    main()
