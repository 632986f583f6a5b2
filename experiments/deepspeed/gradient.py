"""A gradient after one reduction: DeepSpeed's qgZ and our 4-bit hops against the exact mean.

    torchrun --standalone --nproc-per-node 4 experiments/deepspeed/gradient.py --out FILE.json
    ... --whole-host      every rank sees all GPUs of the machine, as usual on one host

Each rank makes the gradient of its own batch; the exact mean is taken in fp32 of those very
tensors, so that only the reduction differs. Columns: norm over the exact norm, and the cosine, over
all matrices of the model. Without GPUs DeepSpeed's quantizer is left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab import api
from zpp_lab.compose import compose
from zpp_lab.config import ClusterConfig, Config
from zpp_lab.data import open_data
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.deepspeed import load_deepspeed
from zpp_lab.launcher import connect
from zpp_lab.models import build_model
from zpp_lab.place import die_with_parent

G4 = ["recipe=base", "recipe.name=g4", "recipe.hops=2", "recipe.grads.bits=4"]
SCALE = 2.0**16  # of the loss in fp16: DeepSpeed's first
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Grads = dict[str, Tensor]


def settings(model: str, whole_host: bool, dtype: str, device: str) -> Config:
    return compose(
        [
            "engine=deepspeed", *G4, f"model={model}", "cluster=2x2", "data.seq_len=256",
            "train.clip=0", f"train.param_dtype={dtype}", f"train.reduce_dtype={dtype}",
            f"engine.device={device}", f"engine.emulate_nodes={not whole_host}",
            f"engine.allow_fallback={whole_host}", "data.max_bytes=2000000",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="10m")
    parser.add_argument("--whole-host", action="store_true")
    asked = parser.parse_args()
    device = "cuda" if Path("/dev/nvidia0").exists() else "cpu"  # CUDA must not start yet
    config = settings(asked.model, asked.whole_host, "bf16", device)
    die_with_parent()
    rank = connect(config)
    rows = [] if asked.whole_host else table(config)
    rows.append(engine_row(config))
    if rank == 0:
        show(rows)
        if asked.out:
            asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # groups may abort when they are torn down


# ---------------------------------------------------------------------- gradients


def here(config: Config) -> torch.device:
    on_gpu = config.engine.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def first_batch(config: Config, rank: int) -> tuple[int, tuple[Tensor, Tensor]]:
    """The tokenizer's size, and what this rank trains on first."""
    data = open_data(config.data)
    size, length = config.train.batch_size, config.data.seq_len
    return data.vocab_size, data.batch(config.seed, 0, rank, 0, size, length)


def local_grads(model: nn.Module, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> Grads:
    """This rank's gradients in `dtype`, of a loss that fp16 scales."""
    copied = copy.deepcopy(model).to(dtype)
    loss = copied(*batch) * (SCALE if dtype == torch.float16 else 1.0)
    loss.backward()
    return {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}


def exact_mean(grads: Mapping[str, Tensor]) -> Grads:
    found = {n: g.float() for n, g in grads.items()}
    for g in found.values():
        dist.all_reduce(g)
        g /= dist.get_world_size()
    return found


# ---------------------------------------------------------------------- comparisons


def compared(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Shards (got, exact) of this rank → ratio of norms and cosine over all ranks."""
    device = pairs[0][0].device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for got, exact in pairs:
        a, b = got.flatten().double(), exact.flatten().double()
        sums += torch.stack((a @ a, b @ b, a @ b))
    dist.all_reduce(sums)
    own, other, product = sums.tolist()
    return {"norm_ratio": (own / other) ** 0.5, "cosine": product / (own * other) ** 0.5}


def chunk(whole: Tensor) -> Tensor:
    """This rank's part of a flattened tensor that the world divides."""
    return whole.flatten().chunk(dist.get_world_size())[dist.get_rank()]


def table(config: Config) -> list[dict[str, Any]]:
    rank, device = dist.get_rank(), here(config)
    vocab, batch = first_batch(config, rank)
    batch = (batch[0].to(device), batch[1].to(device))
    model = build_model(config.model, vocab, device=device, seed=config.seed)
    rows = []
    for name, dtype in DTYPES.items():
        grads = local_grads(model, dtype, batch)
        exact = exact_mean(grads)
        for label, reduce in reductions(device).items():
            rows.append(row(label, name, grads, exact, reduce))
        if name == "bf16" and device.type == "cuda":  # the same gradients as fp16 numbers
            halves = {n: g.half() for n, g in grads.items()}
            label = "DeepSpeed qgZ, gradients cast to fp16"
            rows.append(row(label, name, halves, exact, reductions(device)["DeepSpeed qgZ"]))
    rows.append(ours(model, batch, exact_mean(local_grads(model, DTYPES["bf16"], batch)), config))
    if device.type == "cuda":
        rows.append(uneven(reductions(device)["DeepSpeed qgZ"], device))
    return rows


def reductions(device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """DeepSpeed's two, each from a rank's whole gradient to its shard of the mean."""
    deepspeed = load_deepspeed(device)
    deepspeed.init_distributed(dist_init_required=False)
    from deepspeed.runtime.comm import coalesced_collectives as collectives
    from deepspeed.utils import groups

    found = {"DeepSpeed, plain": lambda g: collectives.reduce_scatter_coalesced([g])[0]}
    if device.type == "cuda":
        links = groups._get_local_all_to_all_group()
        found["DeepSpeed qgZ"] = lambda g: collectives.all_to_all_quant_reduce([g], links)[0]
    return found


def row(
    label: str, dtype: str, grads: Grads, exact: Grads, reduce: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    matrices = [n for n, g in grads.items() if g.ndim == 2]
    pairs = [(reduce(grads[n].clone()), chunk(exact[n])) for n in matrices]
    return {"reduction": label, "gradients": dtype, **compared(pairs)}


def ours(
    model: nn.Module, batch: tuple[Tensor, Tensor], exact: Grads, config: Config
) -> dict[str, Any]:
    """The recipe g4 through FSDP2 with our collectives; shards are rows there."""
    copied = copy.deepcopy(model)
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)
    api.shard(
        copied,
        config.recipe,
        cluster,
        param_dtype="bf16",
        reduce_dtype="bf16",
        transport="groups",
    )
    copied(*batch).backward()
    world, rank, pairs = cluster.world, dist.get_rank(), []
    for name, p in copied.named_parameters():
        if p.ndim == 2:
            got, rows = p.grad.to_local(), -(-p.shape[0] // world)  # type: ignore[union-attr]
            pairs.append((got, exact[name][rank * rows : (rank + 1) * rows]))
    return {"reduction": "zpp_lab, 4 bits in two hops", "gradients": "bf16", **compared(pairs)}


def uneven(reduce: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, Any]:
    """386 rows on four ranks: elements divide evenly, blocks do not."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    grad = torch.randn(386, 384, device=device, dtype=torch.float16, generator=generator)
    exact = exact_mean({"x": grad})["x"]
    found = compared([(reduce(grad), chunk(exact))])
    return {"reduction": "DeepSpeed qgZ, 386 × 384 noise", "gradients": "fp16", **found}


def engine_row(config: Config) -> dict[str, Any]:
    """One step of the engine: how often it quantized, and its norm over the exact one.

    The exact norm is of the plain model's mean gradient, vectors too.
    """
    rank, device = dist.get_rank(), here(config)
    if device.type == "cpu":
        config = compose(["engine=deepspeed", "recipe=zero3", "cluster=2x2", "engine.device=cpu",
                          "train.clip=0", "model=tiny", "data.max_bytes=2000000"])  # fmt: skip
    vocab, batch = first_batch(config, rank)
    model = build_model(config.model, vocab, device=device, seed=config.seed)
    dtype = DTYPES[config.train.param_dtype]
    moved = (batch[0].to(device), batch[1].to(device))
    exact = exact_mean(local_grads(model, dtype, moved))
    norm = sum(float(g.double().square().sum()) for g in exact.values()) ** 0.5
    engine, calls = build_engine(config, vocab, device), []
    from deepspeed.runtime.zero import stage3

    own = stage3.all_to_all_quant_reduce
    stage3.all_to_all_quant_reduce = lambda *a: calls.append(1) or own(*a)
    result = engine.step(0, 0.0, lambda *_: batch, False)
    visible = torch.cuda.device_count() if device.type == "cuda" else 0
    label = f"DeepSpeed's engine, {visible} GPUs seen by a rank"
    found = {"norm_ratio": result.grad_norm / norm, "quantized_reductions": len(calls)}
    return {"reduction": label, "gradients": config.train.param_dtype, **found}


def show(rows: list[dict[str, Any]]) -> None:
    print("| reduction | gradients | norm / exact | cosine | quantized reductions |")
    print("|---|---|---|---|---|")
    for r in rows:
        cosine = f"{r['cosine']:.4f}" if "cosine" in r else ""
        cells = (r["reduction"], r["gradients"], f"{r['norm_ratio']:.4f}", cosine)
        print("| " + " | ".join((*cells, str(r.get("quantized_reductions", "")))) + " |")


if __name__ == "__main__":
    main()
