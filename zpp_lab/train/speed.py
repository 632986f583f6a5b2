"""A run's speed and memory: the figures of a step's record that no repeat shares.

**MFU**, model FLOPs utilisation, is the FLOPs that the model needs for a step, over its seconds,
its GPUs and their peak. FLOPs count the matrix products of the built-in decoder: 2 for each weight
and token, embedding look-ups left out, and causal attention as flash attention computes it, half of
the square. Backward is twice that, less for frozen weights. Recomputation does not count (as in
PaLM, Chowdhery et al. 2022). The peak is the GPU's own of dense bf16 products.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zpp_lab.collectives.plan import Plan, UnitPlan
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch, Batches
from zpp_lab.runs.metrics import Record

GIB = 2**30
# TFLOP/s of dense bf16 products, by the makers' data sheets; the first pattern that fits counts.
PEAKS = (
    (r"B200", 2250.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"H[128]00( 80GB HBM3)?|GH200 \d+GB", 989.0),
    (r"H20", 148.0),
    (r"A[18]00[- ].*", 312.0),
    (r"L40S", 362.0),
    (r"A30", 165.0),
    (r"L4", 121.0),
)


def peak_flops(gpu: str) -> float | None:
    """Return the FLOP/s of dense bf16 products by torch's name of a GPU; None if unknown."""
    name = gpu.removeprefix("NVIDIA ")
    if "MIG" in name:
        return None
    return next((1e12 * tera for form, tera in PEAKS if re.fullmatch(form, name)), None)


@dataclass(frozen=True)
class Work:
    """FLOPs of a unit's blocks, or of the head, on one rank and micro-step."""

    forward: float
    backward: float
    recompute: float


def block_work(unit: UnitPlan, config: Config) -> Work:
    """Count the FLOPs of a unit of decoder blocks. Frozen weights have no gradients."""
    tokens = config.train.batch_size * config.data.seq_len
    matrices = [p for p in unit.unit.parameters if len(p.shape) > 1]
    every = sum(p.parts * p.numel for p in matrices)
    trained = sum(p.parts * p.numel for p in matrices if p.name in unit.unit.trainable)
    attention = 2 * config.data.seq_len * config.model.dim * tokens * unit.unit.blocks
    forward = 2.0 * every * tokens + attention
    backward = 2.0 * (every + trained) * tokens + 2 * attention
    return Work(forward, backward, forward if config.model.checkpoint_activations else 0.0)


def head_work(root: UnitPlan, config: Config, vocab: int) -> Work:
    """Count the FLOPs of the last product. In chunks backward computes its logits again."""
    tokens, model = config.train.batch_size * config.data.seq_len, config.model
    forward = 2.0 * (1 if model.scalar_head else vocab) * model.dim * tokens
    if model.scalar_head:
        return Work(forward, 2 * forward, 0.0)
    head = "embed.weight" if model.tied_head else "head.weight"
    trained, again = head in root.unit.trainable, model.loss_chunk or model.z_loss
    return Work(forward, forward * (1 + trained), forward if again else 0.0)


def step_flops(plan: Plan, config: Config, vocab: int) -> float | None:
    """Count the FLOPs of all ranks for one step without recomputation; None: no formula."""
    if config.model.name != "llama":
        return None
    blocks, root = [u for u in plan.units if u.unit.blocks], plan.units[-1]  # stages have two roots
    parts = [*(block_work(unit, config) for unit in blocks), head_work(root, config, vocab)]
    passes = config.train.micro_steps * config.cluster.readers
    return passes * sum(part.forward + part.backward for part in parts)


class Meter:
    """Measures the steps of one process; the records hold what rank 0 has measured."""

    def __init__(self, plan: Plan, config: Config, device: torch.device, vocab: int) -> None:
        self.tokens, self.device, self.data = config.tokens_per_step, device, 0.0
        self.flops = step_flops(plan, config, max(vocab, config.model.vocab_size))
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        shared = config.engine.share_gpus is not None or config.train.param_dtype == "fp32"
        self.peak = None if shared else peak_flops(gpu)
        self.gpus = config.cluster.world if config.engine.ranked else 1

    def facts(self) -> Record | None:
        """Return the parts of `mfu`; None where it is left out."""
        if self.flops is None or self.peak is None:
            return None
        return {
            "flops_per_step": self.flops,
            "peak_flops_per_second": self.peak,  # of one GPU: dense bf16 products
            "gpus": self.gpus,
        }

    def timed(self, batches: Batches, begun: Callable[[int], None]) -> Batches:
        """Return the same batches, adding up their seconds. `begun` gets how many have come."""
        self.data, count = 0.0, 0

        def batch(rank: int, micro: int) -> Batch:
            nonlocal count
            began, count = time.perf_counter(), count + 1
            made = batches(rank, micro)
            self.data += time.perf_counter() - began
            begun(count)
            return made

        return batch

    def step(self, seconds: float, parts: dict[str, float]) -> Record:
        """Return the figures of a step of `seconds`; `parts`: the engine's times."""
        found: Record = {"tokens_per_second": self.tokens / seconds}
        if self.flops is not None and self.peak is not None:
            found["mfu"] = self.flops / (seconds * self.gpus * self.peak)
        found["wait"] = {"data": self.data}
        found["memory"] = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if self.device.type == "cuda":
            if "waiting" in parts:
                found["wait"]["device"] = parts["waiting"]
            found["memory"] |= {
                "gpu_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
            }
        return found
