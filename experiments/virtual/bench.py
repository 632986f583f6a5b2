"""What a virtual cluster costs over plain gradient accumulation.

Both train the same model on the same micro-batches: forward, backward, and one AdamW step once
all have come. `plain` is one rank that adds its micro-batches' gradients in fp32; the virtual
cluster takes each micro-batch for a rank's and runs the recipe's gathers and reductions for all
of them. Both run their passes as `engine.graph` and `engine.lanes` say. A step's time runs until
its loss is known to the host. Takes Hydra overrides:

    python experiments/virtual/bench.py --recipes zero3,zeropp model=350m cluster=8x8

`--variants` repeats each recipe with other settings: `--variants engine.lanes=1 engine.lanes=4`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zpp_lab.codecs import kernels
from zpp_lab.codecs.numerics import clip_factor
from zpp_lab.collectives.plan import PassUse
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch
from zpp_lab.engines.build import build_plan, pick_device
from zpp_lab.engines.optim.build import adamw
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.engines.virtual.passes import Passes
from zpp_lab.models import build_model
from zpp_lab.runs.provenance import commit, machine_facts, versions

BYTES = 259  # vocabulary of the byte tokenizer, for presets that take the tokenizer's
NO_UNITS = PassUse({}, {})  # plain accumulation gathers none
Step = Callable[[int], float]  # step number → loss


@dataclass(frozen=True)
class Row:
    """Median seconds of a step, and that over plain accumulation's."""

    what: str
    seconds: float
    times: list[float]
    ratio: float
    tokens_per_second: float
    peak_gib: float  # of device memory; 0 on a CPU


class Plain:
    """Gradient accumulation on one device: bf16 or fp32 weights, fp32 sums and master weights."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.train = model, config.train
        self.world = config.cluster.world
        self.weights = dict(model.named_parameters())
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in self.weights.items()}
        for p in self.weights.values():
            p.data = p.data.to(DTYPES[config.train.param_dtype])
        self.sums = {n: torch.zeros_like(p) for n, p in self.master.items()}
        self.optimizer = adamw(self.master, config.train)
        self.passes = Passes(self._backward, self.weights, config.engine, config.engine.lanes)

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, PassUse]:
        loss: Tensor = self.model(inputs, targets)
        loss.backward()
        return loss.detach(), NO_UNITS

    def step(self, batches: Sequence[Batch]) -> float:
        masters, sums = list(self.master.values()), list(self.sums.values())
        torch._foreach_copy_([p.data for p in self.weights.values()], [m.data for m in masters])
        torch._foreach_zero_(sums)
        losses = []
        for loss, grads, _ in self.passes.each(batches):
            losses.append(loss.clone())
            torch._foreach_add_([self.sums[n] for n in grads], list(grads.values()))
        torch._foreach_div_(sums, float(self.world))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums)))
        torch._foreach_mul_(sums, clip_factor(norm, self.train.clip))
        for p, grad in zip(masters, sums, strict=True):
            p.grad = grad
        self.optimizer.step()
        return float(torch.stack(losses).mean())


class Bench:
    """One model on one cluster; `plain` and each recipe in turn, on the same micro-batches."""

    def __init__(self, config: Config, warm_up: int, steps: int) -> None:
        self.config, self.warm_up, self.steps = config, warm_up, steps
        self.device = pick_device(config.engine)
        self.vocab = config.model.vocab_size or BYTES
        self.model = build_model(config.model, self.vocab, device=str(self.device))
        self.rows: list[Row] = []

    def plain(self) -> None:
        made = Plain(copy.deepcopy(self.model), self.config)
        ranks = range(self.config.cluster.world)
        self._keep("plain", lambda step: made.step([self._batch(step, r, 0) for r in ranks]))

    def recipe(self, name: str, config: Config) -> None:
        model = copy.deepcopy(self.model)
        engine = VirtualEngine(model, build_plan(model, config), config)

        def step(number: int) -> float:
            batches = lambda rank, micro: self._batch(number, rank, micro)  # noqa: E731
            return engine.step(number, config.train.lr, batches, False).loss

        self._keep(name, step)

    def _batch(self, step: int, rank: int, micro: int) -> Batch:
        shape = (self.config.train.batch_size, self.config.data.seq_len + 1)
        generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + micro)
        tokens = torch.randint(0, self.vocab, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _keep(self, what: str, step: Step) -> None:
        gc.collect()  # engines hold themselves through their passes
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for number in range(self.warm_up + self.steps):
            began = time.perf_counter()
            step(number)
            times.append(time.perf_counter() - began)
        row = self._row(what, times[self.warm_up :])
        self.rows.append(row)
        print(
            f"{what:32s} {row.seconds:9.4f} s/step  {row.ratio:6.3f} × plain  "
            f"{row.tokens_per_second:12,.0f} tokens/s  peak {row.peak_gib:5.1f} GiB",
            flush=True,
        )

    def _row(self, what: str, times: list[float]) -> Row:
        seconds = statistics.median(times)
        plain = self.rows[0].seconds if self.rows else seconds
        tokens = tokens_per_step(self.config)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Row(what, seconds, times, seconds / plain, tokens / seconds, peak / 2**30)


def tokens_per_step(config: Config) -> int:
    return config.train.batch_size * config.data.seq_len * config.cluster.world


def _configs(args: argparse.Namespace) -> dict[str, Config]:
    """Every recipe with every variant, by what a row is called."""
    found = {}
    for recipe in args.recipes.split(","):
        for variant in args.variants:
            overrides = [f"recipe={recipe}", *args.overrides, *variant.split()]
            found[f"{recipe} {variant}".strip()] = compose(overrides)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("bench.py", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--recipes", default="zero3,zeropp,qsdp,g8_4_hadamard")
    made.add_argument("--steps", type=int, default=3, help="timed steps; the median counts")
    made.add_argument("--warm-up", type=int, default=1)
    made.add_argument("--variants", nargs="+", default=[""], help="overrides; see above")
    made.add_argument("--out", type=Path, help="a JSON file for the results")
    made.add_argument("overrides", nargs="*", help="Hydra overrides of the configuration")
    return made


def main(argv: list[str]) -> int:
    """Measure, print a table; returns the exit code. ValueError for settings that do not fit."""
    args = parser().parse_args(argv)
    configs = _configs(args)
    config = next(iter(configs.values()))
    if config.train.micro_steps != 1:
        raise ValueError("each rank has one micro-batch; leave train.micro_steps=1")
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.engine.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    kernels.configure(config.ops.backend)
    bench = Bench(config, args.warm_up, args.steps)
    print(
        f"model {config.model.preset}, {config.cluster.nodes} × {config.cluster.gpus_per_node} "
        f"ranks, {config.train.batch_size} × {config.data.seq_len} tokens a rank, "
        f"{config.train.param_dtype} weights, gradients reduced in {config.train.reduce_dtype}"
    )
    bench.plain()
    for name, each in configs.items():
        bench.recipe(name, each)
    if args.out:
        facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
        settings = {"config": asdict(config), "tokens_per_step": tokens_per_step(config)}
        results = {**facts, **settings, "results": [asdict(row) for row in bench.rows]}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
