"""A run's saved weights as a rank sees them after the gather for forward.

What a model computes with in training is decode(encode(w)) of its shards, not the fp32 masters.
The same few lines serve an export and an evaluation, so that both speak of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from zpp_lab.codecs import Codec, Noise, RawCodec, kernels, noise_key
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config, RecipeConfig
from zpp_lab.runs.checkpoint.read import SavedWeights

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class WireWeights:
    """The weights of a checkpoint as `weights_forward` brings them at the checkpoint's step.

    codec: in place of the recipe's codec, for the parameters that the recipe does not exempt:
    plain rounding of the master weights after training. ValueError when it is no such codec.
    """

    config: Config
    saved: SavedWeights
    codec: CodecConfig | None = None

    @cached_property
    def recipe(self) -> Recipe:
        config, dtype = self.config, self.dtype
        if self.codec is None:
            return Recipe(config.recipe, config.cluster, dtype, DTYPES[config.train.reduce_dtype])
        # a codec does not depend on the cluster, but one rank has no wires to put it on
        cluster = ClusterConfig(1, 2) if config.cluster.world == 1 else config.cluster
        return Recipe(_rounded_afterwards(config.recipe, self.codec), cluster, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in, which is also what gets encoded."""
        return DTYPES[self.config.train.param_dtype]

    @cached_property
    def codecs(self) -> dict[str, Codec]:
        """The codec of every parameter, by name."""
        return {n: self.recipe.codec("weights_forward", self._parameter(n)) for n in self._shapes}

    @property
    def quantized(self) -> list[str]:
        """The parameters that do not travel as their own bytes."""
        return [n for n, codec in self.codecs.items() if not isinstance(codec, RawCodec)]

    def decoded(self, name: str, device: torch.device = _CPU) -> Tensor:
        """The whole parameter as the model computes with it, in `dtype`."""
        source, codec = self.source(name, device), self.codecs[name]
        if isinstance(codec, RawCodec):
            return source
        out = torch.empty_like(source)
        kernels.decode(self._layout(name, codec), self._encoded(name, codec, source), [out])
        return out

    def payload(self, name: str, codec: Codec | None = None) -> Tensor:
        """What all ranks send of one parameter: uint8 [W, nbytes] on the CPU. With another
        `codec`, what they would send then."""
        return self._encoded(name, codec or self.codecs[name], self.source(name))

    def shard_numel(self, name: str) -> int:
        """Elements of one rank's shard, padding included."""
        return self._parameter(name).shard_numel

    def source(self, name: str, device: torch.device = _CPU) -> Tensor:
        """The master weight in `dtype`, contiguous: what gets encoded."""
        return self.saved.read(name).to(device, self.dtype).contiguous()

    def _layout(self, name: str, codec: Codec) -> Layout:
        """One segment: neighbours in a unit's payload do not change its bytes."""
        return Layout.build([name], [self.shard_numel(name)], [codec])

    def _encoded(self, name: str, codec: Codec, source: Tensor) -> Tensor:
        layout, ranks = self._layout(name, codec), tuple(range(self._world))
        key = noise_key(self.config.seed, self.saved.step, 0, "weights_forward")
        payload = torch.empty(len(ranks), layout.nbytes, dtype=torch.uint8, device=source.device)
        kernels.encode(layout, [source], Noise(key, ranks, ranks), payload)
        return payload

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.saved.shapes

    @property
    def _world(self) -> int:
        one = self.config.cluster.world == 1
        return 1 if one else self.recipe.shards

    def _parameter(self, name: str) -> Parameter:
        return Parameter(name, self._shapes[name], self._world)


def parse_codec(text: str) -> CodecConfig:
    """ "bits=4,block_size=128,scale_dtype=bf16" → a codec; ValueError names what is wrong."""
    import yaml

    pairs = [part.partition("=") for part in text.split(",")]
    if not all(value for _, _, value in pairs):
        raise ValueError(f"--codec {text}: write settings such as bits=4,block_size=128")
    names = [key.strip() for key, _, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"--codec {text}: {twice.pop()} is there twice; give --codec once for each"
        )
    try:
        values = {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
        return load(CodecConfig, values)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--codec {text}: {' '.join(str(error).split())}") from None


def codec_text(codec: CodecConfig) -> str:
    """The inverse of `parse_codec`: what is set, in the order of the fields."""
    named = {f.name: getattr(codec, f.name) for f in fields(codec)}
    return ",".join(f"{k}={_plain(v)}" for k, v in named.items() if v is not None)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rounded_afterwards(recipe: RecipeConfig, codec: CodecConfig) -> RecipeConfig:
    """`codec` for every parameter that `recipe` does not exempt on the weights' wire."""
    if codec.rounding == "stochastic":
        raise ValueError("--codec rounds to nearest: leave rounding=stochastic out")
    if codec.bits is None and codec.codec in (None, "block", "none"):
        raise ValueError(f"--codec {codec_text(codec)} has no bits: add bits=4 or another number")
    exempting = [r for r in recipe.rules if r.exempt and "weights_forward" in r.wires]
    rules = [replace(r, wires=["weights_forward", "weights_backward"]) for r in exempting]
    return RecipeConfig(name="--codec", weights=codec, exempt=recipe.exempt, rules=rules)
