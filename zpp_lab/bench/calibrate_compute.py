"""A decoder block's time on the device by its FLOPs, and the memory's rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.bench.measure import call_seconds
from zpp_lab.config import ModelConfig
from zpp_lab.cost.machine import Curve
from zpp_lab.models import build_model
from zpp_lab.models.start import materialize

Shape = tuple[int, int, int, int]  # dim, ffn, heads, tokens
SEQUENCE = 2048  # tokens of one sequence, at most
REPEATS = 5
AHEAD = 60_000_000  # clock ticks that a GPU waits, so that its host is ahead of it


def curve(shapes: Sequence[Shape], mode: str, device: torch.device) -> Curve:
    """Seconds by the FLOPs of one forward."""
    return rising([(flops(shape), block_seconds(shape, mode, device)) for shape in shapes])


def flops(shape: Shape) -> float:
    """Of a forward, as `cost/model.py` counts them."""
    dim, ffn, _, tokens = shape
    weights = 4 * dim * dim + 3 * dim * ffn
    return 2.0 * weights * tokens + 2.0 * min(tokens, SEQUENCE) * dim * tokens


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve whose seconds never fall: a larger amount that was faster is noise."""
    made: list[tuple[float, float]] = []
    for amount, seconds in sorted(points):
        made.append((amount, max(seconds, made[-1][1] if made else 0.0)))
    return Curve(tuple(made))


def block_seconds(shape: Shape, mode: str, device: torch.device) -> float:
    """A third of forward and backward, on the device."""
    block, x = drawn_block(shape, mode, device)
    ran = device_seconds(lambda: passed(block, x), device)
    return ran / 3


def passed(block: nn.Module, x: Tensor) -> None:
    block.zero_grad(set_to_none=True)
    x.grad = None  # nothing is added up
    block(x).backward(x)


def drawn_block(shape: Shape, mode: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A block in bf16 and its input [batch, length, dim]."""
    dim, ffn, heads, tokens = shape
    settings = ModelConfig(dim=dim, ffn=ffn, heads=heads, kv_heads=heads, layers=1, vocab_size=16)
    model = drawn(settings, device).bfloat16()
    if mode == "compiled":
        from zpp_lab.engines.compiled import compile_units  # loads the compiler

        compile_units(model.units(), False)
    length = min(tokens, SEQUENCE)
    x = torch.randn(tokens // length, length, dim, device=device, dtype=torch.bfloat16)
    return model.layers[0], x.requires_grad_()


@torch.no_grad()
def drawn(settings: ModelConfig, device: torch.device) -> Any:
    """The built-in decoder with weights of about the usual size."""
    model = build_model(settings, settings.vocab_size, "meta")
    materialize(model, device)
    for p in model.parameters():
        p.normal_(0, 0.02)
    return model


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of one call; on a GPU its own time, the host being ahead."""
    call()
    call()
    return statistics.median(call_seconds(call, device, AHEAD) for _ in range(REPEATS))


def copy_rate(nbytes: int, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / device_seconds(lambda: target.copy_(source), device)
