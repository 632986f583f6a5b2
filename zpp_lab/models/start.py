"""Where a model's weights come from at the start, a parameter's rows at a time.

A sharded engine fills its own rows only, so nothing here builds a whole model: `Start.rows`
gives any rows of any parameter, and `materialize` makes room for them.

A start takes weights and no optimizer. A run's folder (`model.start`) is one more source of rows
beside a seed and safetensors: each rank reads the parts of files that hold its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from typing import Protocol

import torch
from torch import Tensor, nn

from zpp_lab.config import ModelConfig
from zpp_lab.models.init import initial_rows, initial_value

Rows = Callable[[tuple[int, ...]], tuple[int, int]]  # whole shape → first row, last row + 1


class Start(Protocol):
    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of the parameter `name`: fp32, on the CPU or the model's device."""
        ...

    def buffer(self, name: str) -> Tensor | None:
        """The whole buffer `name`, None where the model's own value stands."""
        ...


class SeededStart:
    """The built-in decoder's start: each parameter a pure function of seed, name and shape."""

    def __init__(self, model: nn.Module, seed: int, cfg: ModelConfig) -> None:
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.seed, self.cfg = seed, cfg

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return initial_value(name, self.shapes[name], self.seed, self.cfg)[first:last]

    def buffer(self, name: str) -> Tensor | None:
        return None


class CounterStart:
    """As `SeededStart`, but every element by itself (model.init=philox), drawn where the model's
    parameters are: rows cost what they are, not what the parameter is."""

    def __init__(self, model: nn.Module, seed: int, cfg: ModelConfig) -> None:
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.seed, self.cfg = seed, cfg
        self.device = next(model.parameters()).device

    def rows(self, name: str, first: int, last: int) -> Tensor:
        shape, rows = self.shapes[name], (first, last)
        return initial_rows(name, shape, rows, self.seed, self.cfg, self.device)

    def buffer(self, name: str) -> Tensor | None:
        return None


def places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs, by its id: several places for a tied one."""
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                found[id(p)].append((module, name))
    return found


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give every parameter on the meta device memory on `device`, and move buffers there.

    Unlike `nn.Module.to_empty` it keeps ties, and what buffers hold.
    """
    for hangs in places(model).values():
        module, name = hangs[0]
        old = module._parameters[name]
        assert old is not None
        if old.is_meta:
            new = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
            for owner, attribute in hangs:
                owner._parameters[attribute] = new
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@torch.no_grad()
def fill(
    model: nn.Module,
    start: Start,
    rows: Rows,
    local: Callable[[Tensor], Tensor],
    skip: Set[str] = frozenset(),
) -> None:
    """Fill each parameter's local tensor with the rows that `rows` picks of its whole shape, but
    for those that `skip` names."""
    for name, p in model.named_parameters():
        if name in skip:
            continue
        shape = tuple(p.shape)
        local(p).copy_(start.rows(name, *rows(shape)).view(local(p).shape))
    for name, buffer in model.named_buffers():
        value = start.buffer(name)
        if value is not None:
            buffer.copy_(value)


def whole(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows of an unsharded parameter."""
    return 0, shape[0] if shape else 1
