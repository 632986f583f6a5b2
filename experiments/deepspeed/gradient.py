"""A gradient after one reduction: DeepSpeed's qgZ and our 4-bit hops against the exact mean.

    torchrun --standalone --nproc-per-node 4 experiments/deepspeed/gradient.py --out FILE.json
    ... --whole-host      every rank sees all GPUs of the machine, as usual on one host

Each rank makes the gradient of its own batch; the exact mean is taken in fp32 of those very
tensors, so that only the reduction differs. Columns: norm over the exact norm, and the cosine, over
all matrices of the model; where a result is not finite, how many of its elements are not. In fp16
the loss has the largest scale at which no sum over the ranks overflows (`loss_scale`). Beside
DeepSpeed's quantizer, which needs GPUs, stands what its arithmetic gives in torch, with every
element in its place.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab import api
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.data import open_data
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.deepspeed.engine import load_deepspeed
from zpp_lab.models import build_model
from zpp_lab.train.launch.launcher import connect
from zpp_lab.train.launch.place import die_with_parent

G4 = ["recipe=base", "recipe.name=g4", "recipe.hops=2", "recipe.grads.bits=4"]
FIRST_SCALE = 16  # of the loss in fp16, as a power of two: where DeepSpeed begins
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN, QGZ, EMULATED = "DeepSpeed, plain", "DeepSpeed qgZ", "qgZ emulated"
Grads = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]


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
            asked.out.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
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


def local_grads(
    model: nn.Module, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> tuple[Grads, float]:
    """This rank's gradients in `dtype`, and what their loss was multiplied by: 1, in fp16 the
    largest power of two up to DeepSpeed's first at which no sum over the ranks overflows, as its
    own scale comes down where one does. ValueError without such a power."""
    for power in range(FIRST_SCALE if dtype == torch.float16 else 0, -1, -1):
        grads = scaled_grads(model, dtype, batch, 2.0**power)
        if summable(grads):
            return grads, 2.0**power
    raise ValueError(f"a sum over the ranks' gradients is not finite in {dtype}: another model")


def scaled_grads(
    model: nn.Module, dtype: torch.dtype, batch: tuple[Tensor, Tensor], scale: float
) -> Grads:
    copied = copy.deepcopy(model).to(dtype)
    (copied(*batch) * scale).backward()
    return {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}


def first_scale(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """How many fp16 elements of all ranks are not finite where DeepSpeed's scale begins."""
    grads = scaled_grads(model, torch.float16, batch, 2.0**FIRST_SCALE)
    bad = torch.stack([(~g.isfinite()).sum() for g in grads.values()]).sum()
    dist.all_reduce(bad)
    found = {"norm_ratio": None, "cosine": None, "not_finite": int(bad)}
    return {"reduction": "none", "gradients": "fp16", **found, "loss_scale": 2.0**FIRST_SCALE}


def summable(grads: Mapping[str, Tensor]) -> bool:
    """Whether all ranks together may add up their gradients: each times the ranks is a number."""
    worst = torch.stack([g.abs().max().float() for g in grads.values()]).max()
    limit = min(torch.finfo(g.dtype).max for g in grads.values())
    fits = (worst * dist.get_world_size() <= limit).int()  # NaN does not
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def exact_mean(grads: Mapping[str, Tensor]) -> Grads:
    found = {n: g.float() for n, g in grads.items()}
    for g in found.values():
        dist.all_reduce(g)
        g /= dist.get_world_size()
    return found


# ---------------------------------------------------------------------- comparisons


def compared(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Shards (got, exact) of this rank → ratio of norms and cosine over all ranks.

    Both are None where an element of `got` is not finite; `not_finite` then says how many."""
    device = pairs[0][0].device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for got, exact in pairs:
        a, b = got.flatten().double(), exact.flatten().double()
        sums += torch.stack((a @ a, b @ b, a @ b, (~a.isfinite()).sum()))
    dist.all_reduce(sums)
    own, other, product, bad = sums.tolist()
    if bad:
        return {"norm_ratio": None, "cosine": None, "not_finite": int(bad)}
    cosine = product / (own * other) ** 0.5 if own else None
    return {"norm_ratio": (own / other) ** 0.5, "cosine": cosine}


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
        grads, scale = local_grads(model, dtype, batch)
        exact, found = exact_mean(grads), reductions(device)
        rows += [row(label, name, grads, exact, reduce) for label, reduce in found.items()]
        if name == "fp16":
            rows = [{**r, "loss_scale": scale} for r in rows]
            rows.insert(0, first_scale(model, batch))
        if name == "bf16":
            rows += read_otherwise(grads, exact, found)
    grads, _ = local_grads(model, DTYPES["bf16"], batch)
    rows.append(ours(model, batch, exact_mean(grads), config))
    quantizers = {k: f for k, f in reductions(device).items() if k != PLAIN}
    for size in (386, 384):
        rows += [noise(k, f, size, device) for k, f in quantizers.items()]
    return rows


def read_otherwise(
    grads: Grads, exact: Grads, found: Mapping[str, Reduce]
) -> Iterator[dict[str, Any]]:
    """bf16 gradients whose bits are taken for fp16 numbers, and the same ones as fp16 numbers."""
    bits = {n: g.view(torch.float16) for n, g in grads.items()}
    mean: Reduce = lambda g: chunk(exact_mean({"x": g})["x"])  # noqa: E731
    yield row("exact mean, bits read as fp16", "bf16", bits, exact, mean)
    yield row(f"{EMULATED}, bits read as fp16", "bf16", bits, exact, found[EMULATED])
    halves = {n: g.half() for n, g in grads.items()}
    for label, reduce in found.items():
        if label != PLAIN:
            yield row(f"{label}, gradients cast to fp16", "bf16", halves, exact, reduce)


def reductions(device: torch.device) -> dict[str, Reduce]:
    """DeepSpeed's two and an emulation: a rank's whole gradient → its shard of the mean."""
    deepspeed = load_deepspeed(device)
    deepspeed.init_distributed(dist_init_required=False)
    from deepspeed.runtime.comm import coalesced_collectives as collectives
    from deepspeed.utils import groups

    found = {PLAIN: lambda g: collectives.reduce_scatter_coalesced([g])[0], EMULATED: emulated}
    if device.type == "cuda":
        links = groups._get_local_all_to_all_group()
        found[QGZ] = lambda g: collectives.all_to_all_quant_reduce([g], links)[0]
    return found


def emulated(grad: Tensor) -> Tensor:
    """qgZ's arithmetic in fp32, for ranks two a node: 4 bits, a node's sum, which is not divided,
    4 bits again, the nodes' mean."""
    block = grad.numel() // max(*grad.shape, dist.get_world_size())
    every = [torch.empty_like(grad, dtype=torch.float32) for _ in range(dist.get_world_size())]
    dist.all_gather(every, grad.float())
    coded = [four_bits(g, block) for g in every]
    sums = [four_bits(a + b, block) for a, b in zip(coded[::2], coded[1::2], strict=True)]
    return chunk(torch.stack(sums).mean(0))


def four_bits(x: Tensor, block: int) -> Tensor:
    """Blocks in steps of an eighth of their largest magnitude, from 8 below 0 to 7 above."""
    blocks = x.reshape(-1, block)
    step = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 8
    return ((blocks / step).round().clamp(-8, 7) * step).view_as(x)


def row(label: str, dtype: str, grads: Grads, exact: Grads, reduce: Reduce) -> dict[str, Any]:
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


def noise(label: str, reduce: Reduce, rows: int, device: torch.device) -> dict[str, Any]:
    """A matrix of so many rows. With 386 on four ranks elements divide evenly and rows do not."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    grad = torch.randn(rows, 384, device=device, dtype=torch.float16, generator=generator)
    exact = exact_mean({"x": grad})["x"]
    found = compared([(reduce(grad), chunk(exact))])
    return {"reduction": f"{label}, {rows} × 384 noise", "gradients": "fp16", **found}


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
    exact = exact_mean(local_grads(model, dtype, moved)[0])
    norm = sum(float(g.double().square().sum()) for g in exact.values()) ** 0.5
    engine, calls = build_engine(config, vocab, device), []
    from deepspeed.runtime.zero import stage3

    own = stage3.all_to_all_quant_reduce
    stage3.all_to_all_quant_reduce = lambda *a: calls.append(1) or own(*a)
    result = engine.step(0, 0.0, lambda *_: batch, False)
    visible = torch.cuda.device_count() if device.type == "cuda" else 0
    label = f"DeepSpeed's engine, {visible} GPUs seen by a rank"
    ratio = result.grad_norm / norm if math.isfinite(result.grad_norm) else None
    found = {"norm_ratio": ratio, "quantized_reductions": len(calls)}
    return {"reduction": label, "gradients": config.train.param_dtype, **found}


def show(rows: list[dict[str, Any]]) -> None:
    print("| reduction | gradients | loss scale | norm / exact | cosine | quantized reductions |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        bad = f"not finite: {r['not_finite']}" if "not_finite" in r else "not finite"
        ratio = bad if r["norm_ratio"] is None else f"{r['norm_ratio']:.4f}"
        cosine = f"{r['cosine']:.4f}" if r.get("cosine") is not None else ""
        scale = f"{r['loss_scale']:.0f}" if "loss_scale" in r else ""
        cells = (r["reduction"], r["gradients"], scale, ratio, cosine)
        print("| " + " | ".join((*cells, str(r.get("quantized_reductions", "")))) + " |")


if __name__ == "__main__":
    main()
