"""Coded weights in the format of compressed-tensors, number for number where that is possible.

The wire's blocks run over a rank's flat shard; the format's groups run along a row. FSDP2 shards
between rows, so g = gcd(block size, row length) elements of a row never belong to two blocks:
groups of g, each with its block's scale, hold exactly the wire's numbers. The format computes q · s
in the scale's dtype, as our decode does.

Packed weights are those of untied `nn.Linear`, all that transformers 5.23 with compressed-tensors
0.20 runs as loaded. Other quantized weights are stored as they decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.codecs import BlockCodec, Codec, NormalCodec
from zpp_lab.models.start import places


@dataclass(frozen=True)
class Grid:
    """A kind of group: one entry of the config's `config_groups`."""

    bits: int
    symmetric: bool
    group: int  # elements of a row that share a scale

    @property
    def format(self) -> str:
        """Packed zero points load with dequantize=True alone, so those codes take a byte each."""
        return "pack-quantized" if self.symmetric else "naive-quantized"

    def scheme(self, targets: list[str]) -> dict[str, Any]:
        return {
            "targets": targets,
            "format": self.format,
            "weights": {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": self.symmetric,
                "strategy": "group",
                "group_size": self.group,
                "dynamic": False,
            },
        }


@dataclass(frozen=True)
class Codes:
    """A weight [rows, columns] as levels int8, scales fp32 [rows, columns / group], and where the
    grid is asymmetric integer zero points int8 like the scales: (level - zero) · scale."""

    grid: Grid
    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return fp32 [rows, columns]."""
        q = self.levels.float().unflatten(1, (-1, self.grid.group))
        if self.zeros is not None:
            q = q - self.zeros.float()[..., None]
        return (q * self.scales[..., None]).flatten(1)


def misfit(codec: Codec) -> str | None:
    """Return why the format cannot hold this codec's numbers, None where it can."""
    if type(codec) is not BlockCodec:
        name = "codec=normal" if isinstance(codec, NormalCodec) else type(codec).__name__
        return f"{name} has its own levels"
    if codec.hadamard:
        return f"hadamard={codec.hadamard} rotates the values before they are scaled"
    if not codec.symmetric:
        return "symmetric=false has offsets in floating point, the format integer zero points"
    return None


def widest_group(codecs: Iterable[tuple[BlockCodec, int]]) -> int:
    """Return the most elements that never see two blocks, given each codec's row length."""
    return math.gcd(*(n for codec, columns in codecs for n in (codec.block_size, columns)))


def exact_codes(
    codec: BlockCodec, payload: Tensor, n: int, shape: tuple[int, ...], group: int
) -> Codes:
    """Return the numbers of `payload` uint8 [W, nbytes(n)]: every rank's shard of n elements,
    padding included, of a weight of `shape`."""
    assert misfit(codec) is None
    assert codec.block_size % group == 0 == shape[1] % group
    rows, numel = shape[0], math.prod(shape)
    q, scale, _ = codec.levels_and_scales(payload, n)
    each = scale.flatten(1).repeat_interleave(codec.block_size // group, 1)[:, : n // group]
    return Codes(
        Grid(codec.bits, True, group),
        q.flatten(1)[:, :n].reshape(-1)[:numel].view(shape).to(torch.int8),
        each.reshape(-1)[: numel // group].view(rows, shape[1] // group).contiguous(),
    )


def nearest_fitting(codec: BlockCodec) -> BlockCodec:
    """Return the format's own symmetric grid with as many bits, rounding to nearest."""
    return BlockCodec(codec.bits, codec.block_size, scale_dtype=codec.scale_dtype)


def codes_with_zero_points(codec: BlockCodec, weight: Tensor, group: int) -> Codes:
    """Round to nearest with integer zero points: each group's range, stretched to hold 0, in 2^bits
    - 1 steps, 0 being one of the levels. weight: [rows, columns]."""
    x = weight.float().unflatten(1, (-1, group))
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = ((high - low) / codec.levels).clamp_min(torch.finfo(torch.float32).tiny)
    if codec.scale_dtype == "bf16":
        scale = scale.to(torch.bfloat16).float()
    first = -(2 ** (codec.bits - 1))
    last = first + codec.levels
    zero = (first - torch.round(low / scale)).clamp(first, last)
    q = (torch.round(x / scale[..., None]) + zero[..., None]).clamp(first, last)
    grid = Grid(codec.bits, False, group)
    return Codes(grid, q.flatten(1).to(torch.int8), scale, zero.to(torch.int8))


def stored(codes: Codes) -> dict[str, Tensor]:
    """Return a module's tensors in the format, by the ending of their names."""
    library = compressed_tensors()
    if codes.grid.symmetric:
        packed = library.compressors.pack_quantized.pack_to_int32(codes.levels, codes.grid.bits)
        return {
            "weight_packed": packed,
            "weight_scale": codes.scales,
            "weight_shape": torch.tensor(codes.levels.shape),
        }
    assert codes.zeros is not None
    return {"weight": codes.levels, "weight_scale": codes.scales, "weight_zero_point": codes.zeros}


def stored_shapes(grid: Grid, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of what `stored` gives; the scales' dtype is None."""
    scales = (shape[0], shape[1] // grid.group)
    if grid.symmetric:
        words = -(-shape[1] * grid.bits // 32)
        return {
            "weight_packed": ((shape[0], words), torch.int32),
            "weight_scale": (scales, None),
            "weight_shape": ((2,), torch.int64),
        }
    return {
        "weight": (shape, torch.int8),
        "weight_scale": (scales, None),
        "weight_zero_point": (scales, torch.int8),
    }


def quantization_config(packed: dict[str, Grid], linears: Iterable[str]) -> dict[str, Any]:
    """Return config.json's `quantization_config`. packed: the grid of each packed module; linears:
    every Linear of the model. With one grid the target is the class, which every loader
    understands."""
    grids = list(dict.fromkeys(packed.values()))
    one = len(grids) == 1
    groups = {
        f"group_{i}": grid.scheme(
            ["Linear"] if one else [n for n, g in packed.items() if g == grid]
        )
        for i, grid in enumerate(grids)
    }
    formats = {grid.format for grid in grids}
    values = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(linears) - set(packed)),
    }
    compressed_tensors().quantization.QuantizationConfig.model_validate(values)
    return values


def linear_weights(model: nn.Module) -> dict[str, str]:
    """Return the weight of each Linear that hangs nowhere else → the module's name."""
    hangs = places(model)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(m.weight)]: n for n, m in modules.items() if len(hangs[id(m.weight)]) == 1}


def compressed_tensors() -> Any:
    """Return the library; ValueError says how to get it."""
    try:
        import compressed_tensors
        import compressed_tensors.compressors
        import compressed_tensors.compressors.pack_quantized
        import compressed_tensors.quantization
    except ImportError:
        raise ValueError(
            "--quantized needs the `compressed-tensors` package: pip install 'zpp_lab[hf]'"
        ) from None
    return compressed_tensors
