"""Plain ZeRO-3 (FSDP2, recipe zero3) step by step from the slowest settings to the fastest.

Started by run.sh under torchrun, one process for a model. Settings build on those before them:

    eager          no compiler, attention by plain matrix products, foreach AdamW, whole logits,
                   every block's activations computed again in backward
    fused_adamw    AdamW in one kernel, held back on the device
    flash          flash attention
    compile        torch.compile block by block
    chunked_loss   logits of 2048 tokens at a time
    keep           all activations kept
    deterministic  kernels that repeat to the bit, as studies use them

With --no-update weights stay as they are, so a model of twice the size fits: no moments. halves.sh
makes a step on twice as many GPUs of such parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from steps import as_dict, keep, measure, start
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.attention import SDPBackend, sdpa_kernel

from zpp_lab.config.compose import compose

SETTINGS: dict[str, list[str]] = {
    "eager": ["model.loss_chunk=0", "model.checkpoint_activations=true"],
    "fused_adamw": [],
    "flash": [],
    "compile": ["engine.compile=true"],
    "chunked_loss": ["model.loss_chunk=2048"],
    "keep": ["model.checkpoint_activations=false"],
    "deterministic": ["engine.deterministic=true"],
}
TARGETS = {"13b": 1.01 / 1.15, "32_5b": 1.39 / 1.15}  # seconds a step on four H200s
BATCH = {"32_5b": 1}  # sequences of a rank; others 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="those to time")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-update", action="store_true", help="AdamW and its moments left out")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="gradients where FSDP2 by itself puts them: in memory of the reductions' stream",
    )
    parser.add_argument("--label", default="", help="added to the settings' names in the results")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every setting")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    started = False
    for name, overrides in cumulative(args.model):
        if name not in args.settings.split(","):
            continue
        config = compose([*overrides, *args.overrides])
        if not started:
            start(config)
            started = True
        with attention(name):
            prepare = changes(name, args.no_update, args.apart)
            found = measure(config, args.steps, prepare=prepare)
        report(args, f"{name} {args.label}".strip(), found)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def cumulative(model: str) -> Iterator[tuple[str, list[str]]]:
    """Each setting with the overrides of all before it; Hydra takes the last of a name."""
    overrides = [f"model={model}", "engine=fsdp", "cluster=1x4", "recipe=zero3"]
    overrides += ["engine.deterministic=false", "data.seq_len=2048", "tracking.wandb=off"]
    overrides += ["train.param_dtype=bf16", "train.reduce_dtype=bf16", "train.clip=1.0"]
    overrides += [f"train.batch_size={BATCH.get(model, 2)}"]
    for name, more in SETTINGS.items():
        overrides = [o for o in overrides if o.split("=")[0] not in {m.split("=")[0] for m in more}]
        overrides += more
        yield name, list(overrides)


@contextmanager
def attention(name: str) -> Iterator[None]:
    """Plain products before the setting `flash`; after it torch chooses, flash where it can."""
    names = list(SETTINGS)
    if names.index(name) >= names.index("flash"):
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH):
            yield


def changes(name: str, no_update: bool = False, apart: bool = False) -> Callable[[Any], None]:
    """What a setting changes of the engine beyond its config."""
    made = [foreach] if name == "eager" else []
    made += [without_update] if no_update else []
    made += [gradients_apart] if apart else []

    def prepare(engine: Any) -> None:
        for change in made:
            change(engine)

    return prepare


def without_update(engine: Any) -> None:
    """Gradients are summed, their norm is taken and they are clipped; then they are let go."""
    engine.optimizer.step = lambda *_, **__: None


def gradients_apart(engine: Any) -> None:
    for module in engine.wrapped.by_name.values():
        module.set_custom_reduce_scatter(DefaultReduceScatter())


def foreach(engine: Any) -> None:
    """The optimizer as it was before the fused one."""
    groups = [
        {k: v for k, v in group.items() if k in ("params", "lr", "betas", "eps", "weight_decay")}
        for group in engine.optimizer.param_groups
    ]
    engine.optimizer = torch.optim.AdamW(groups, foreach=True)


def report(args: argparse.Namespace, name: str, found: Any) -> None:
    if dist.get_rank() == 0:
        peak = max(found.peak_gib) if found.peak_gib else float("nan")
        target = TARGETS.get(args.model)
        against = f", target {target:.3f}" if target else ""
        print(
            f"{args.model} {name}: {found.seconds:.4f} s a step{against}, "
            f"{found.tokens_per_second:,.0f} tokens/s, peak {peak:.2f} GiB, "
            f"host waited {1000 * median(found.waiting):.1f} ms, "
            f"{max(found.retries or [0])} retries of the allocator, "
            f"built {found.build_seconds:.1f} s, first step {found.first_seconds:.1f} s",
            flush=True,
        )
    keep(args.out / f"{args.model}.json", name, as_dict(found))


if __name__ == "__main__":
    main()
