"""Adapters on a stored base on real GPUs: both engines' bits, and memory against its plan.

    torchrun --standalone --nproc-per-node 2 -m tests.models.lora.gpu_check [--memory 1_3b] [--cpu]

Prints one line a case, then for --memory what a rank held at most and what was planned. With --cpu
gloo serves and only bits are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.fsdp_jobs import steps
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.uneven import batch
from tests.models.lora.models import VOCAB, lora, save_base
from tests.models.test_presets import preset
from zpp_lab.api import init
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_engine, build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.models import build_model
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.estimate import estimate

# name → (row of the parity table, base, transport)
CASES = {
    "raw": ("zero3_bf16", "raw", "groups"),
    "q4": ("zero3_bf16_reduce", "q4", "groups"),
    "q4_peer": ("zero3_bf16", "q4", "peer"),
    "q2_zeropp": ("zeropp_bf16", "q2", "groups"),
    "q4_stochastic": ("stochastic", "q4", "groups"),
    "q4_stage2": ("stage2", "q4", "groups"),
}
SHAPE = {"dim": 96, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 150}
HELD = [batch(9, i, 0) for i in range(3)]


def parity(case: str, base: ModelConfig, device: torch.device) -> str:
    row, bits, transport = CASES[case]
    how: dict[str, Any] = {"device": device.type, "gather": "hierarchical", "transport": transport}
    config = configured(row, 1, dist.get_world_size(), **how)
    config = replace(config, model=replace(base, lora=lora(bits)))
    outcomes = []
    for name in ("fsdp", "virtual"):
        own = replace(config, engine=replace(config.engine, name=name))  # type: ignore[arg-type]
        engine = build_engine(own, VOCAB, device)
        done, _ = steps(engine)
        held = [engine.evaluate(3, HELD, wire) for wire in (True, False)]
        weights = {n: t.detach().cpu() for n, t in kept(engine).items()}
        outcomes.append((done, held, weights))
    return differs(*outcomes)


class Made:
    """A base of small random numbers: memory does not ask which."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return torch.rand(last - first, *self.shapes[name][1:]).mul_(0.02)

    def buffer(self, name: str) -> Tensor | None:
        return None


def memory(name: str, device: torch.device) -> str:
    shape = {"weights": "pretrained", "path": "unread", "lora": vars(lora("q4", rank=16))}
    train = {"param_dtype": "bf16", "batch_size": 1}
    values = {
        "model": {**vars(preset(name)), **shape},
        "cluster": {"nodes": 1, "gpus_per_node": dist.get_world_size()},
        "data": {"seq_len": 2048},
        "train": train,
        "engine": {"name": "fsdp", "transport": "groups"},
    }
    config = load(Config, values)
    model = build_model(config.model, 256, "meta")
    made = Made({n: tuple(p.shape) for n, p in model.named_parameters()})
    model.start = lambda seed: made
    engine = FsdpEngine(model, build_plan(model, config), config, device)
    tokens = torch.randint(0, 256, (1, 2049))
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        engine.step(step, 1e-4, lambda *_: (tokens[:, :-1], tokens[:, 1:]), telemetry=False)
    held = torch.cuda.max_memory_allocated()
    planned = estimate(engine.plan, config, model.vocab_size).tensors
    return f"held {held / GIB:.3f} GiB, planned {planned / GIB:.3f} ({held / planned - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", metavar="PRESET")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    device = init("gloo" if args.cpu else None)
    torch.use_deterministic_algorithms(True)
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder, failed = Path(shared[0]), False
    if dist.get_rank() == 0:
        save_base(folder, **SHAPE)
    dist.barrier()
    base = ModelConfig(**SHAPE, vocab_size=VOCAB, weights="pretrained", path=str(folder))
    for case in CASES:
        if args.cpu and case == "q4_peer":
            continue
        found = parity(case, base, device)
        failed |= bool(found)
        if dist.get_rank() == 0:
            print(f"{case}: {found or 'equal to the bit'}", flush=True)
    if args.memory and not args.cpu:
        text = memory(args.memory, device)
        if dist.get_rank() == 0:
            print(f"{args.memory}: {text}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(failed))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
