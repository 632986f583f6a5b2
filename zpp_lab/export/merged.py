"""A run's adapters added to the frozen base that they were trained on, one tensor at a time.

The base is what the run computed with: read from where the run started, encoded and decoded as
its ranks keep it, in train.param_dtype. So the export has the run's own losses, and not those of
the adapters on a base that they never saw. The recipe's codecs are for the adapters: on the sum
they would make weights that no rank ever had.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zpp_lab.checkpoint.read import SavedWeights
from zpp_lab.config import CodecConfig, Config, LoraConfig, RecipeConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.export.wire import WireWeights
from zpp_lab.frozen import Marks, check_marks, decode_shards, encode_shards, mark
from zpp_lab.models.build import build_model
from zpp_lab.models.lora import adapters_of, inputs_first, merged
from zpp_lab.models.start import whole


def merge_adapters(config: Config, saved: SavedWeights) -> tuple[Config, SavedWeights]:
    """The run without adapters: its config, and weights that hold them, which no wire brings.
    Others as they are."""
    if not config.model.lora.on:
        return config, saved
    plain = replace(config.model, lora=LoraConfig())
    recipe = _without_codecs(config.recipe)
    return replace(config, model=plain, recipe=recipe), MergedWeights(config, saved)


def _without_codecs(recipe: RecipeConfig) -> RecipeConfig:
    none, exempting = CodecConfig(), [r for r in recipe.rules if r.exempt]
    return replace(
        recipe, weights=none, weights_forward=none, weights_backward=none, rules=exempting
    )


class MergedWeights:
    """`SavedWeights` of the model that base and adapters are together.

    ValueError when the weights that the run started from have changed or are gone.
    """

    marks: Marks = {}  # nothing stands on anything

    def __init__(self, config: Config, adapters: SavedWeights) -> None:
        self.config, self.adapters, self.step = config, adapters, adapters.step
        if not adapters.marks:
            raise ValueError("the checkpoint has no frozen base, but the run's config has adapters")
        self.shapes = {n: tuple(m[1:].tolist()) for n, m in adapters.marks.items()}
        vocabulary = self.shapes.get("embed.weight", (0,))[0]
        self.model = build_model(config.model, vocabulary, "meta")
        self.plan = build_plan(self.model, config)
        self.segments = {s.name: s for u in self.plan.units for s in u.stored.segments}
        self.start = self.model.start(config.seed)

    def wired(self) -> MergedWeights | None:
        """The same, with the adapters that the gather before forward brings at the checkpoint's
        step; None where they travel as their own bytes."""
        wire = WireWeights(self.config, self.adapters)
        return MergedWeights(self.config, _Wired(wire)) if wire.quantized else None

    def read(self, name: str) -> Tensor:
        """A whole weight on the CPU, fp32, its adapters added."""
        base, (a, b) = self._base(name), adapters_of(name)
        if a not in self.adapters.shapes or not name.endswith(".weight"):
            return base
        parts = self.adapters.read(a), self.adapters.read(b)
        return merged(base, *parts, self.config.model.lora.scale, inputs_first(self.model, name))

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of `read`, which takes the whole base to decode them."""
        return self.read(name)[first:last]

    def _base(self, name: str) -> Tensor:
        shape, recipe = self.shapes[name], self.plan.recipe
        value = self.start.rows(name, *whole(shape))
        check_marks({name: mark(value, 0, shape)}, {name: self.adapters.marks[name]})
        payload = encode_shards(self.segments[name], value, recipe.shards)
        out = torch.empty(shape, dtype=recipe.weights_dtype)
        decode_shards(self.segments[name], payload, out)
        return out.float()


class _Wired:
    """`SavedWeights` as the wire brings them."""

    def __init__(self, wire: WireWeights) -> None:
        saved = wire.saved
        self.wire, self.step, self.shapes, self.marks = wire, saved.step, saved.shapes, saved.marks

    def read(self, name: str) -> Tensor:
        return self.wire.decoded(name).float()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.read(name)[first:last]
