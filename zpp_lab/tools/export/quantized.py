"""The quantized model that training leaves behind, as a folder that transformers loads.

By default the numbers are exactly those of the weights' wire at the checkpoint's step. With a codec
they are the master weights rounded to nearest after training, for comparison. What does not fit the
format is refused unless --requantize or --dense says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zpp_lab.codecs import BlockCodec, RawCodec
from zpp_lab.config.codec import CodecConfig
from zpp_lab.models.cut import merged
from zpp_lab.tools.export.card import Card, write_card
from zpp_lab.tools.export.model import (
    EXPORT_DTYPES,
    Exported,
    MergedWeights,
    itself,
    new_folder,
    open_run,
    write_config,
)
from zpp_lab.tools.export.packed import (
    Codes,
    Grid,
    codes_with_zero_points,
    exact_codes,
    misfit,
    nearest_fitting,
    quantization_config,
    stored,
    stored_shapes,
    widest_group,
)
from zpp_lab.tools.export.shards import LIMIT, write_safetensors
from zpp_lab.tools.export.target import Target, target_of, write_tokenizer
from zpp_lab.tools.export.wire import WireWeights

Unfit = Literal["refuse", "requantize", "dense"]
Way = Literal["own", "decoded", "packed", "requantized"]


@dataclass(frozen=True)
class QuantizedExported(Exported):
    packed: int  # weights in the format
    decoded: int  # quantized weights stored as they decode
    requantized: int  # of the packed ones, those with other numbers than the wire's


def export_quantized(
    run: Path,
    out: Path,
    *,
    codec: CodecConfig | None = None,
    unfit: Unfit = "refuse",
    dtype: str | None = None,
    limit: int = LIMIT,
    license: str | None = None,
) -> QuantizedExported:
    """Write the run's newest weights, quantized, to the new folder `out`.

    codec: rounds the master weights to nearest, in place of the recipe's wire.
    unfit: what to do with Linear weights whose codec the format cannot hold: refuse; requantize
        rounds them to nearest on the format's grid with as many bits; dense stores them decoded.
    dtype: fp32, bf16 or fp16 of scales and of all that is not packed; None: what keeps the
        numbers as they are. license: for the card; None: the base's.
    ValueError when there is no run or checkpoint, nothing is quantized, or a codec does not fit;
    without a codec also for a run with adapters, whose sum with the base was never quantized.
    """
    with new_folder(out) as folder:
        config, saved = open_run(run)
        if codec is None and isinstance(saved, MergedWeights):
            raise ValueError(
                f"{run} has adapters: added to their base they are no codec's values. Leave "
                "--quantized out, or round the sum with --codec bits=4,block_size=128"
            )
        weights = WireWeights(config, saved, codec)
        made = _Contents(weights, target_of(config, saved), unfit)
        kind = dtype or made.natural_dtype
        shapes, dtypes = made.shapes(EXPORT_DTYPES[kind])
        read = made.readers(EXPORT_DTYPES[kind])
        nbytes = write_safetensors(folder, shapes, lambda n: read[n](), dtypes, limit)
        write_config(folder, made.config(), kind)
        write_tokenizer(run, config.data, folder)
        write_card(folder, made.card(kind), license)
    counts = {way: len(made.named(way)) for way in ("packed", "requantized", "decoded")}
    packed = counts["packed"] + counts["requantized"]
    return QuantizedExported(
        saved.step, len(shapes), nbytes, packed, counts["decoded"], counts["requantized"]
    )


class _Contents:
    """Which tensors a folder holds for each parameter, and how to make them one at a time."""

    def __init__(self, weights: WireWeights, target: Target, unfit: Unfit) -> None:
        self.weights, self.target = weights, target
        self.ways = _ways(weights, target, unfit)
        self.grids = _grids(weights, [*self.named("packed"), *self.named("requantized")])
        self.latest: tuple[str, dict[str, Tensor]] | None = None

    def named(self, way: Way) -> list[str]:
        return [n for n, w in self.ways.items() if w == way]

    @property
    def natural_dtype(self) -> str:
        """bf16 when it holds every number of a model that computes in bf16, else fp32."""
        scales = (self.weights.codecs[n] for n in self.grids)
        narrow = all(isinstance(c, BlockCodec) and c.scale_dtype == "bf16" for c in scales)
        return "bf16" if narrow and self.weights.dtype == torch.bfloat16 else "fp32"

    def shapes(
        self, dtype: torch.dtype
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """Return shape and dtype of every tensor of the folder."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
        for name, shape in self.weights.saved.shapes.items():
            if name in self.grids:
                parts = stored_shapes(self.grids[name], shape)
                found |= {self._part(name, end): part for end, part in parts.items()}
            else:
                found[self.target.names[name]] = (shape, None)
        found |= {n: (tuple(b.shape), None) for n, b in self.target.buffers.items()}
        return {n: s for n, (s, _) in found.items()}, {n: d or dtype for n, (_, d) in found.items()}

    def readers(self, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
        """Return how to get each tensor. `dtype` must hold the scales."""
        read: dict[str, Callable[[], Tensor]] = {}
        for name, shape in self.weights.saved.shapes.items():
            if name in self.grids:
                for end in stored_shapes(self.grids[name], shape):
                    read[self._part(name, end)] = partial(self._stored, name, end, dtype)
            else:
                read[self.target.names[name]] = partial(self._whole, name)
        return read | {n: partial(itself, b) for n, b in self.target.buffers.items()}

    def config(self) -> dict[str, Any]:
        if not self.grids:
            return self.target.config
        packed = {self.target.linears[n]: grid for n, grid in self.grids.items()}
        found = quantization_config(packed, self.target.modules)
        return {**self.target.config, "quantization_config": found}

    def card(self, dtype: str) -> Card:
        folder = {n: self.target.names[n] for n in self.ways}
        return Card(
            config=self.weights.config,
            step=self.weights.saved.step,
            codec=self.weights.codec,
            dtype=dtype,
            grids=sorted(set(self.grids.values()), key=lambda g: (g.bits, g.symmetric)),
            packed=[folder[n] for n in self.named("packed")],
            requantized=[folder[n] for n in self.named("requantized")],
            decoded=[folder[n] for n in self.named("decoded")],
            stochastic=any(self.weights.codecs[n].stochastic for n in self.ways),
        )

    def _part(self, name: str, end: str) -> str:
        return f"{self.target.linears[name]}.{end}"

    def _whole(self, name: str) -> Tensor:
        return self.target.arrange(name, self.weights.decoded(name))

    def _stored(self, name: str, end: str, dtype: torch.dtype) -> Tensor:
        """The parts of a weight come one after another: the last one's are kept."""
        if self.latest is None or self.latest[0] != name:
            self.latest = (name, stored(self._codes(name, dtype)))
        return self.latest[1][end]

    def _codes(self, name: str, dtype: torch.dtype) -> Codes:
        codes = _codes(self.weights, name, self.grids[name], self.ways[name] == "requantized")
        if not bool(codes.scales.isfinite().all()):
            raise ValueError(
                f"{name} has numbers that are not finite: export an earlier checkpoint"
            )
        if not torch.equal(codes.scales.to(dtype).float(), codes.scales):
            raise ValueError(
                f"the scales of {name} are fp32 numbers that {dtype} would change: leave --dtype "
                "out, or use a codec with scale_dtype=bf16"
            )
        turn = partial(self.target.arrange, name)
        zeros = None if codes.zeros is None else turn(codes.zeros)
        return Codes(codes.grid, turn(codes.levels), turn(codes.scales), zeros)


def _ways(weights: WireWeights, target: Target, unfit: Unfit) -> dict[str, Way]:
    """How each parameter is stored; ValueError when the format cannot hold what was asked for."""
    if not weights.quantized:
        raise ValueError(
            f"recipe {weights.config.recipe.name} has no codec on its weights: leave --quantized "
            "out, or round them after training with --codec bits=4,block_size=128"
        )
    ways: dict[str, Way] = {}
    reasons: dict[str, list[str]] = {}
    for name, codec in weights.codecs.items():
        fault = misfit(codec)
        packable = name in target.linears
        requantizable = unfit == "requantize" and isinstance(codec, BlockCodec)
        if isinstance(codec, RawCodec):
            ways[name] = "own"
        elif not packable or (fault and unfit == "dense"):
            ways[name] = "decoded"
        elif fault and not requantizable:
            reasons.setdefault(fault, []).append(name)
        else:
            ways[name] = "requantized" if fault else "packed"
    _complain(reasons, unfit)
    if unfit != "dense" and not {"packed", "requantized"} & set(ways.values()):
        raise ValueError(
            "the format packs only Linear modules, and the gather quantizes none of this "
            "model's: --dense stores all weights as ranks compute with them"
        )
    return ways


def _complain(reasons: dict[str, list[str]], unfit: Unfit) -> None:
    if not reasons:
        return
    faults = "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in reasons.items()
    )
    other = "" if unfit == "requantize" else ", --requantize rounds the masters again"
    raise ValueError(
        f"the format cannot hold {faults}. --dense stores what they decode to{other}; --codec "
        "rounds the master weights to nearest with another codec; a recipe with codec=block, "
        "symmetric=true and hadamard=0 on its weights fits the format"
    )


def _grids(weights: WireWeights, names: list[str]) -> dict[str, Grid]:
    """Weights with as many bits share one group size: loaders know one scheme best."""
    kinds: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        codec = _block(weights, name)
        kinds.setdefault((codec.bits, codec.symmetric), []).append(name)
    grids: dict[str, Grid] = {}
    for (bits, symmetric), own in kinds.items():
        widest = widest_group((_block(weights, n), weights.parameter(n).shape[1]) for n in own)
        grids |= dict.fromkeys(own, Grid(bits, symmetric, widest))
    return grids


def _codes(weights: WireWeights, name: str, grid: Grid, requantize: bool) -> Codes:
    codec, own = _block(weights, name), weights.parameter(name)
    if not grid.symmetric:
        return codes_with_zero_points(codec, weights.sent(name), grid.group)
    used = nearest_fitting(codec) if requantize else codec
    parts = [
        exact_codes(used, payload, own.shard_numel, own.shape, grid.group)
        for payload in weights.payloads(name, used)
    ]
    if own.parts == 1:
        return parts[0]
    levels, scales = ([getattr(p, kind) for p in parts] for kind in ("levels", "scales"))
    return Codes(parts[0].grid, merged(name, levels), merged(name, scales))


def _block(weights: WireWeights, name: str) -> BlockCodec:
    codec = weights.codecs[name]
    assert isinstance(codec, BlockCodec)
    return codec
