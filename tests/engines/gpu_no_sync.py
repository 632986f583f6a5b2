"""One step of the real engine in which no call may wait for the device.

    torchrun --standalone --nproc-per-node 4 -m tests.engines.gpu_no_sync

torch raises an error at any call that makes the host wait; the engine's one reading of loss and
norm, at the end of a step, is let through. Prints one line a recipe.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.fsdp_parity import configured
from tests.engines.uneven import batch
from zpp_lab.api import init
from zpp_lab.config.model import ModelConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.models import build_model

MODEL = ModelConfig(dim=96, layers=3, heads=4, kv_heads=2, ffn=150, vocab_size=37)
CASES = ("zero3", "zeropp", "stochastic", "hadamard_kept", "stage2", "zeropp_every")
CASES += ("kept", "differences")


def main() -> None:
    device = init()
    torch.use_deterministic_algorithms(False)
    world, failed = dist.get_world_size(), False
    for case in CASES:
        text = "no wait"
        try:
            one_step(case, world, device)
        except RuntimeError as error:
            text, failed = str(error), True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if dist.get_rank() == 0:
            print(f"{case}: {text}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(failed))


def one_step(case: str, world: int, device: torch.device) -> None:
    config = configured(case, 2, world // 2, device="cuda")
    model = build_model(MODEL, 37, device="meta")
    engine = FsdpEngine(model, build_plan(model, config), config, device)
    real = engine._read

    def read(*scalars: torch.Tensor) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return real(*scalars)

    engine._read = read  # type: ignore[method-assign]
    for step in range(4):
        if step == 3:  # buffers, tables and kernels are made by now
            torch.cuda.set_sync_debug_mode("error")
        engine.step(step, 1e-3, partial(batch, step), telemetry=False)


if __name__ == "__main__":
    main()
