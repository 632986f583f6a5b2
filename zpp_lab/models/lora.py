"""Low-rank adapters on the linear layers of a frozen model (LoRA, Hu et al. 2021).

A linear layer is changed in place: it keeps its class's forward, its parameters and their names,
and gets two more, `lora_A` [rank, in] and `lora_B` [out, rank]. So a block is still one unit, and
a start or an export finds the base's weights where they were.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zpp_lab.config.model import LoraConfig
from zpp_lab.models.init import name_key
from zpp_lab.models.start import Start

A, B = "lora_A", "lora_B"
_KINDS: dict[type, type] = {}  # class of a linear layer → the same with adapters


def add_adapters(model: Any, cfg: LoraConfig, twin: Callable[[], Any]) -> None:
    """Freeze `model` and give every linear layer that `cfg` names its adapters, in place. `twin()`
    is the same model without adapters on the meta device: it has the base's start. ValueError when
    a name matches nothing, and for a rank above a layer's full rank."""
    model.frozen_base = frozenset(n for n, _ in model.named_parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    for name, module in _targets(model, cfg).items():
        _adapt(name, module, cfg)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if is_adapter(n)}
    model.start = lambda seed: AdapterStart(twin().start(seed), shapes, seed)


def frozen_base(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that have adapters; none for a model without any."""
    names: frozenset[str] = getattr(model, "frozen_base", frozenset())
    return names


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (A, B)


def adapters_of(name: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `name`."""
    module = name.rpartition(".")[0]
    return f"{module}.{A}", f"{module}.{B}"


def adapter_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter at the start, fp32 on the CPU, a pure function of the arguments: B is zero,
    A uniform in ± 1 / sqrt(in), which is Kaiming's rule with a = sqrt(5)."""
    if name.endswith(B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(name_key(seed, name) >> 1)
    return (2 * torch.rand(shape, generator=generator) - 1) * shape[1] ** -0.5


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, inputs_first: bool) -> Tensor:
    """Return weight + scale · B A, fp32; `inputs_first`: the weight is [in, out]."""
    delta = (b @ a) * scale
    return weight + (delta.t() if inputs_first else delta)


def inputs_first(model: nn.Module, name: str) -> bool:
    """Return whether the weight `name` of `model` is held as [in, out]."""
    return _is_conv1d(model.get_submodule(name.rpartition(".")[0]))


class AdapterStart(Start):
    """The base's own start, and `adapter_value` for its adapters."""

    def __init__(self, base: Start, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self.base, self.shapes, self.seed = base, shapes, seed

    def rows(self, name: str, first: int, last: int) -> Tensor:
        if name in self.shapes:
            return adapter_value(name, self.shapes[name], self.seed)[first:last]
        return self.base.rows(name, first, last)

    def buffer(self, name: str) -> Tensor | None:
        return self.base.buffer(name)


# ---------------------------------------------------------------------- which layers


def _targets(model: Any, cfg: LoraConfig) -> dict[str, nn.Module]:
    """Return the linear layers that get adapters, by name: those of the units, where every one is
    called as a module. Outside, the built-in decoder reads its head's weight itself."""
    known = {
        f"{unit}.{name}": module
        for unit, block in model.units()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) or _is_conv1d(module)
    }
    patterns = cfg.targets or ["*"]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in known):
            raise ValueError(
                f"model.lora.targets: {pattern!r} matches no linear layer of a block; valid "
                f"names: {', '.join(sorted({n.rpartition('.')[2] for n in known})) or 'none'}"
            )
    return {n: m for n, m in known.items() if any(_matches(n, p) for p in patterns)}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D (GPT-2), which holds its weight as [in, out]."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def _adapt(name: str, module: Any, cfg: LoraConfig) -> None:
    shape = tuple(module.weight.shape)
    outs, ins = shape[::-1] if _is_conv1d(module) else shape
    if cfg.rank > min(ins, outs):
        raise ValueError(
            f"model.lora.rank={cfg.rank} is above the full rank of {name} ({ins} to {outs}): use "
            f"at most {min(ins, outs)}, or leave it out with model.lora.targets"
        )
    device = module.weight.device
    module.register_parameter(A, nn.Parameter(torch.empty(cfg.rank, ins, device=device)))
    module.register_parameter(B, nn.Parameter(torch.empty(outs, cfg.rank, device=device)))
    module.lora_scale = cfg.scale
    module.__class__ = _adapted(type(module))


def _adapted(kind: Any) -> Any:
    """Return `kind` with adapters in its forward; one class for all its layers."""
    if kind in _KINDS:
        return _KINDS[kind]

    class Adapted(kind):
        def forward(self, x: Tensor) -> Tensor:
            low = F.linear(x, self.lora_A) * self.lora_scale
            out: Tensor = kind.forward(self, x) + F.linear(low, self.lora_B)
            return out

    Adapted.__name__ = Adapted.__qualname__ = f"Lora{kind.__name__}"
    _KINDS[kind] = Adapted
    return Adapted
