"""Initial weights, each a pure function of its seed, its name and its shape.

No parameter's numbers depend on another's: building order, sharding and
engine cannot change a model's start.

Two generators. torch's draws a whole parameter from its first element on. Philox gives every
element by itself, on the device where it is kept: a rank draws its own rows and nothing else, so
13 billion parameters start in about a second where one thread of torch's needs minutes. Both are
equal on all devices: the second uses integers, a table, and one fp32 product and sum an element,
each rounded on its own.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from zpp_lab.codecs.noise import LOW, philox
from zpp_lab.config.model import ModelConfig
from zpp_lab.models.params import feeds_residual, param_class

_BINS = 1 << 16  # of the normal distribution, each as likely as the others
_TAIL = 2.0**-19  # what lies beyond is drawn from the outermost bins, up to 4.6 deviations
_WORDS = 4  # elements served by one Philox block, 32 bits each
_AT_ONCE = {"cpu": 1 << 14}  # blocks drawn at once: in the cache, or enough to fill a GPU
_LARGE = 1 << 22


def initial_value(name: str, shape: tuple[int, ...], seed: int, cfg: ModelConfig) -> Tensor:
    """Return the full parameter `name` at the start: fp32 on the CPU, of `shape`.

    Vectors are ones. Matrices are normal with deviation 1 / sqrt(columns), projections into the
    residual stream divided by sqrt(2 * layers) more so that depth does not raise its variance.
    Embedding and head have deviations of their own (`model.embedding_std`, `model.head_std`).
    Logits of hidden values around 1 vary by head_std · sqrt(dim), and the loss starts at about
    ln(vocab) + head_std² · dim / 2: with 0.02 1 nat too many at 5120 columns. Norms divide by the
    stream's length, so gradients of the first blocks grow with 1 / embedding_std; PaLM (Chowdhery
    et al. 2022, section 2) takes 1.
    """
    if len(shape) < 2:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(name_key(seed, name) >> 1)
    return torch.randn(shape, generator=generator) * _deviation(name, shape, cfg)


def initial_rows(
    name: str,
    shape: tuple[int, ...],
    rows: tuple[int, int],
    seed: int,
    cfg: ModelConfig,
    device: torch.device,
) -> Tensor:
    """Return rows [first, last) of the parameter `name` under model.init=philox: fp32 on `device`.
    Deviations as in `initial_value`; other numbers."""
    first, last = rows
    if len(shape) < 2:
        return torch.ones(last - first, device=device)
    columns = math.prod(shape[1:])
    values = _normals(name_key(seed, name), first * columns, last * columns, device)
    return values.mul_(_deviation(name, shape, cfg)).view(last - first, *shape[1:])


def _normals(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """Return elements [first, last) of the key's endless normal stream, fp32."""
    out = torch.empty(last - first, device=device)
    most = _AT_ONCE.get(device.type, _LARGE)
    for block in range(first // _WORDS, -(-last // _WORDS), most):
        stop = min(block + most, -(-last // _WORDS))
        drawn = _blocks(key, block, stop, device)
        begin, end = max(first, block * _WORDS), min(last, stop * _WORDS)
        out[begin - first : end - first] = drawn[begin - block * _WORDS : end - block * _WORDS]
    return out


def _blocks(key: int, first: int, last: int, device: torch.device) -> Tensor:
    """Return the normals of Philox blocks [first, last): fp32 [4 · (last - first)]. Of a word's 32
    bits the high half picks a bin and the low half a place in it: the distribution is normal but
    for being even within each of 65,536 bins."""
    counter = torch.arange(first, last, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = torch.stack(philox((counter & LOW, counter >> 32, zero, zero), key), -1).view(-1)
    edges, widths = _table(device)
    bins = words >> 16
    return edges[bins] + widths[bins] * ((words & 0xFFFF).float() * 2.0**-16)


@cache
def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each bin's lower edge in deviations, and its width: fp32 [65536]."""
    inverse = NormalDist().inv_cdf
    half = [inverse(max(_TAIL, i / _BINS)) for i in range(_BINS // 2)]
    edges = torch.tensor([*half, 0.0, *(-x for x in reversed(half))], dtype=torch.float64)
    return edges[:-1].float().to(device), edges.diff().float().to(device)


def _deviation(name: str, shape: tuple[int, ...], cfg: ModelConfig) -> float:
    own = {"embedding": cfg.embedding_std, "head": cfg.head_std}.get(param_class(name))
    if own is not None:
        return own
    scale = shape[-1] ** -0.5
    return scale * (2 * cfg.layers) ** -0.5 if feeds_residual(name) else scale


def name_key(seed: int, name: str) -> int:
    """Return 64 bits that follow from seed and name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
