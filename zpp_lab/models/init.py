"""Initial weights, each a pure function of its seed, its name and its shape.

No parameter's numbers depend on another's: building order, sharding and
engine cannot change a model's start.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zpp_lab.models.params import param_class

_RESIDUAL = ("wo", "w_down")  # what these give is added to the residual stream


def initial_value(name: str, shape: tuple[int, ...], seed: int, layers: int) -> Tensor:
    """The full parameter `name` at the start: fp32 on the CPU, of `shape`.

    Vectors are ones. Matrices are normal with deviation 1 / sqrt(columns), the
    projections into the residual stream divided by sqrt(2 * layers) more so
    that depth does not raise its variance. Embedding and head use 0.02, which starts
    the loss near ln(vocab).
    """
    if len(shape) < 2:
        return torch.ones(shape)
    return torch.randn(shape, generator=_generator(seed, name)) * _deviation(name, shape, layers)


def _deviation(name: str, shape: tuple[int, ...], layers: int) -> float:
    if param_class(name) in ("embedding", "head"):
        return 0.02
    scale = shape[-1] ** -0.5
    return scale * (2 * layers) ** -0.5 if name.split(".")[-2] in _RESIDUAL else scale


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
