"""A run's saved weights as a rank sees them after the gather for forward.

What a model computes with in training is decode(encode(w)) of its shards, not the fp32 masters.
The same few lines serve an export and an evaluation, so that both speak of the same numbers. Where
nodes keep weights, those are what that gather encodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from zpp_lab.codecs import Codec, Noise, RawCodec, kernels
from zpp_lab.codecs.layout import Layout, Parameter
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config, RecipeConfig
from zpp_lab.config.wires import FORWARD, GATHERS, UPDATE, Wire
from zpp_lab.models.cut import cut_dim, merged, part_of
from zpp_lab.runs.checkpoint.read import Saved, SavedWeights

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
            return self._after(self.saved.step)
        # a codec does not depend on the cluster, but one rank has no wires to put it on
        cluster = ClusterConfig(1, 2) if config.cluster.readers == 1 else config.cluster.dp
        return Recipe(_rounded_afterwards(config.recipe, self.codec), cluster, dtype)

    def _after(self, done: int) -> Recipe:
        """Of the step after `done` steps."""
        config, dtypes = self.config, (self.dtype, DTYPES[self.config.train.reduce_dtype])
        return Recipe(config.at(done).recipe, config.cluster.dp, *dtypes)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in, which is also what gets encoded."""
        return DTYPES[self.config.train.param_dtype]

    @cached_property
    def codecs(self) -> dict[str, Codec]:
        """The codec of every parameter, by name."""
        return {n: self.recipe.codec(FORWARD, self.parameter(n)) for n in self.shapes}

    @property
    def quantized(self) -> list[str]:
        """The parameters that do not travel as their own bytes, or did not when nodes got them."""
        return [n for n, c in self.codecs.items() if not all(map(_raw, (c, self._update(n))))]

    def decoded(self, name: str, device: torch.device = _CPU) -> Tensor:
        """Return the whole parameter as the model computes with it, in `dtype`."""
        source, codec = self.sent(name, device), self.codecs[name]
        return source if _raw(codec) else self._decoded(name, codec, source)

    def payloads(self, name: str, codec: Codec | None = None) -> list[Tensor]:
        """Return what all ranks send of each tensor part: uint8 [W, nbytes] on the CPU."""
        parts = self._encoded(name, codec or self.codecs[name], self.sent(name))
        return [payload for _, payload, _ in parts]

    def source(self, name: str, device: torch.device = _CPU) -> Tensor:
        """Return the master weight in `dtype`, contiguous."""
        return self.saved.read(name).to(device, self.dtype).contiguous()

    def sent(self, name: str, device: torch.device = _CPU) -> Tensor:
        """Return what gets encoded, in `dtype`: the master or the node-replicated weight."""
        master, codec = self.source(name, device), self._update(name)
        if _raw(codec):
            return master
        if not self.recipe.differences:
            return self._decoded(name, codec, master, UPDATE)
        chosen = self.saved.kept(name) if isinstance(self.saved, Saved) else None
        if chosen is None:
            raise ValueError(
                f"the checkpoint of step {self.saved.step} has no node-replicated weights, which "
                "differences need: use one saved without train.checkpoint_weights_only"
            )
        return chosen.to(device, self.dtype).contiguous()

    def _update(self, name: str) -> Codec:
        """By which nodes get the weights that they keep; raw where they keep none."""
        if not self.recipe.kept:
            return RawCodec(self.dtype)
        sent_by = self._after(max(0, self.saved.step - 1))
        return sent_by.codec(UPDATE, self.parameter(name))

    def _decoded(self, name: str, codec: Codec, source: Tensor, wire: Wire = FORWARD) -> Tensor:
        """Return what ranks decode of the whole `source`."""
        outs = []
        for layout, payload, own in self._encoded(name, codec, source, wire):
            outs.append(torch.empty_like(own))
            kernels.decode(layout, payload, outs[-1:])
        return merged(name, outs) if len(outs) > 1 else outs[0]

    def _encoded(
        self, name: str, codec: Codec, source: Tensor, wire: Wire = FORWARD
    ) -> Iterator[tuple[Layout, Tensor, Tensor]]:
        """Yield each tensor part's layout, its payload, and the part of `source` in it."""
        of, ranks = self.parameter(name), range(self.world)
        noise = Noise.of_owners(self.config.seed, self.saved.step, wire, ranks)
        for part in range(of.parts):
            # one segment: neighbours in a unit's payload do not change its bytes
            layout = Layout.build([name], [of.shard_numel], [codec], [part])
            own = part_of(name, source, of.parts, part).contiguous() if of.parts > 1 else source
            payload = own.new_empty(len(ranks), layout.nbytes, dtype=torch.uint8)
            kernels.encode(layout, [own], noise, payload)
            yield layout, payload, own

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.saved.shapes

    @property
    def world(self) -> int:
        one = self.config.cluster.readers == 1
        return 1 if one else self.recipe.shards

    def parameter(self, name: str) -> Parameter:
        """Return what the ranks of a cell shard: the parameter, or a tensor part of it."""
        shape, tp = self.shapes[name], self.config.cluster.tp
        dim = cut_dim(name) if tp > 1 else None
        own = tuple(n // tp if i == dim else n for i, n in enumerate(shape))
        return Parameter(name, own, self.world, parts=1 if dim is None else tp)


def _raw(codec: Codec) -> bool:
    return isinstance(codec, RawCodec)


def parse_codec(text: str) -> CodecConfig:
    """ "bits=4,block_size=128,scale_dtype=bf16" → a codec; ValueError names what is wrong."""
    import yaml

    pairs = [part.partition("=") for part in text.split(",")]
    if not all(value for _, _, value in pairs):
        raise ValueError(f"--codec {text}: use settings such as bits=4,block_size=128")
    names = [key.strip() for key, _, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"--codec {text}: {twice.pop()} appears twice; give --codec once for each value"
        )
    try:
        values = {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
        return load(CodecConfig, values)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--codec {text}: {' '.join(str(error).split())}") from None


def codec_text(codec: CodecConfig) -> str:
    """Return the inverse of `parse_codec`: what is set, in the order of the fields."""
    named = {f.name: getattr(codec, f.name) for f in fields(codec) if f.name != "memory"}
    return ",".join(f"{k}={_plain(v)}" for k, v in named.items() if v is not None)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rounded_afterwards(recipe: RecipeConfig, codec: CodecConfig) -> RecipeConfig:
    """`codec` for every parameter that `recipe` does not exempt on the weights' wire."""
    if codec.rounding == "stochastic":
        raise ValueError("--codec rounds to nearest: leave rounding=stochastic out")
    if codec.bits is None and codec.codec in (None, "block", "none"):
        raise ValueError(f"--codec {codec_text(codec)} has no bits: add bits=4 or another number")
    exempting = [r for r in recipe.rules if r.exempt and r.holds_on(FORWARD)]
    rules = [replace(r, wires=list(GATHERS)) for r in exempting]
    return RecipeConfig(name="--codec", weights=codec, exempt=recipe.exempt, rules=rules)
