"""The plans that a search visits: every recipe that the engines can run × settings of memory.

A recipe is a weights' part (partition, bits of its weights' wires, secondary partition) and a
gradients' part (hops, bits, rotation). Parts are checked first, so that few pairs are. Blocks and
rounding are the recipes' defaults; other recipes enter as `extra`: the user's own and measured
ones. Without a study nothing is rotated and all weights' wires have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, get_args, get_type_hints

import yaml

from zpp_lab.config.codec import CodecConfig, MemoryConfig
from zpp_lab.config.load import load
from zpp_lab.config.recipe import POINTS, Parts, ShardingConfig
from zpp_lab.config.schema import Config, RecipeConfig, TrainConfig
from zpp_lab.config.wires import INTER, INTRA, SHORTS, WIRES
from zpp_lab.engines.build import check_engine
from zpp_lab.files import conf_dir

BITS: tuple[int | None, ...] = (None, 8, 6, 4, 2)
ROTATION = 64  # of the gradients, as in the recipe g8_4_hadamard
LOSS_CHUNK = 2048  # tokens, as in the large models' presets
UNITS = (1, 4)  # blocks in one; at 1.3B four are the fastest where the host is the bound
STATES = get_args(get_type_hints(TrainConfig)["optimizer_state"])
SHARDS = get_args(get_type_hints(RecipeConfig)["shard"])
_CODECS = (*SHORTS, *(wire for wire, spec in WIRES.items() if spec.codecs != "none"))
GRADS = ("hops", "order", "grads", INTRA, INTER)  # a recipe's gradients' part
PLAIN = RecipeConfig()


@dataclass(frozen=True)
class Knobs:
    """Settings that trade time for memory and leave the wires alone."""

    blocks_per_unit: int = 1
    checkpoint_activations: bool = False
    loss_chunk: int = 0
    optimizer_state: str = "fp32"


@dataclass(frozen=True)
class Candidate:
    """A recipe with settings of memory."""

    recipe: RecipeConfig
    knobs: Knobs

    def config(self, base: Config) -> Config:
        """Return `base` with this plan in it."""
        model = replace(
            base.model,
            checkpoint_activations=self.knobs.checkpoint_activations,
            loss_chunk=self.knobs.loss_chunk,
        )
        train = replace(base.train, optimizer_state=self.knobs.optimizer_state)  # type: ignore[arg-type]
        engine = replace(base.engine, blocks_per_unit=self.knobs.blocks_per_unit)
        return replace(base, recipe=self.recipe, model=model, train=train, engine=engine)


@dataclass(frozen=True)
class Space:
    """What there is to choose from. `bits` can be narrowed, which only tests do."""

    base: Config  # engine=fsdp; its model, data, cluster and batch stay
    extra: Sequence[RecipeConfig] = ()
    studied: bool = False  # rotations too, and weights with other bits in backward
    bits: tuple[int | None, ...] = BITS

    def recipes(self) -> list[RecipeConfig]:
        """Return every recipe that the engine can run, each once: the extra ones, then the grid."""
        found: dict[str, RecipeConfig] = {}
        extra = (recipe for recipe in self.extra if runs(recipe, self.base))
        for recipe in [*extra, *self._grid()]:
            found.setdefault(without_name(recipe), named(recipe))
        return list(found.values())

    def knobs(self) -> list[Knobs]:
        """Return all combinations, those that cost the least time first, larger units last."""
        units = sorted({*UNITS, self.base.engine.blocks_per_unit})
        chunks = {0: None, LOSS_CHUNK: None, self.base.model.loss_chunk: None}
        return [
            Knobs(*values)
            for values in product(units, (False, True), sorted(chunks), STATES)
            if self.base.model.name == "llama" or values[2] == 0
        ]

    def _grid(self) -> Iterator[RecipeConfig]:
        if self.base.cluster.readers == 1:  # nobody sends anything
            yield PLAIN
            return
        own: dict[str, Any] = {"exempt": self.base.recipe.exempt, "rules": self.base.recipe.rules}
        weights, grads = (
            [part for part in parts if runs(RecipeConfig(**part[1], **own), self.base)]
            for parts in (self._weights(), self._grads())
        )
        for (weight_name, weight), (grad_name, grad) in product(weights, grads):
            if RecipeConfig(**weight).two_hops:
                if "hops" not in grad:
                    continue
                grad = {k: v for k, v in grad.items() if k != "hops"}
                grad_name = grad_name.removeprefix("hops2")
            name = "_".join(part for part in (weight_name, grad_name) if part) or "zero3"
            yield RecipeConfig(name=name, **weight, **grad, **own)

    def _points(self) -> list[Parts]:
        """Of the grid, each once: where a step has one reduction gradients may as well be cut as
        the optimizer is, and on one node a node is the world."""
        one = self.base.train.micro_steps == 1 or self.base.train.accumulate == "last"
        points = [p for p in POINTS if self.base.cluster.dp.nodes > 1 or "node" not in p]
        return [p for p in points if p[1] == p[2] or not one]

    def _weights(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, settings) of the weights' parts; one that `RecipeConfig` refuses is no part."""
        for point, secondary in product(self._points(), (False, True)):
            for forward, backward in product(self.bits, self.bits):
                if forward != backward and (point[0] != "world" or secondary or not self.studied):
                    continue  # mostly because backward has the forward's weights
                if point[2] == "none" and forward:
                    continue  # no weights travel
                name, settings = _point(point)
                settings |= {"secondary": True} if secondary else {}
                settings |= _bits("weights", ("forward", "backward"), (forward, backward))
                if _valid(settings):
                    yield _weight_name(name, settings, forward, backward), settings

    def _grads(self) -> Iterator[tuple[str, dict[str, Any]]]:
        cluster = self.base.cluster.dp
        both = cluster.nodes > 1 and cluster.gpus_per_node > 1
        pairs = [(1, bits, bits) for bits in self.bits]
        pairs += [(2, *two) for two in product(self.bits, self.bits)] if both else []
        for hops, intra, inter in pairs:
            settings: dict[str, Any] = {"hops": hops} if hops != 1 else {}
            settings |= _bits("grads", ("intra", "inter"), (intra, inter))
            name = _grad_name(hops, intra, inter)
            yield name, settings
            if self.studied and (intra or inter):
                bits = settings.get("grads", CodecConfig()).bits
                turned = {"grads": CodecConfig(bits=bits, hadamard=ROTATION)}
                yield f"{name}_h{ROTATION}", settings | turned


@cache
def named_recipes() -> tuple[RecipeConfig, ...]:
    """Return those of conf/recipe but `base`, which nobody runs as it is, those whose encoders
    remember, which no figures predict, those in phases, whose steps differ in time, and those that
    start from another one, as none of ours does."""
    found = []
    for path in sorted((conf_dir() / "recipe").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem != "base" and "defaults" not in values:
            found.append(load(RecipeConfig, values))
    return tuple(recipe for recipe in found if not (recipe.remembers or recipe.phases))


@cache
def _by_settings() -> dict[str, RecipeConfig]:
    return {without_name(recipe): recipe for recipe in named_recipes()}


def named(recipe: RecipeConfig) -> RecipeConfig:
    """Return the recipe of conf/recipe with the same settings, or `recipe` where there is none."""
    return _by_settings().get(without_name(recipe), recipe)


def runs(recipe: RecipeConfig, base: Config) -> bool:
    """Return whether configs and engine take `recipe` with the other settings of `base`."""
    try:
        check_engine(replace(base, recipe=recipe))
    except ValueError:
        return False
    return True


def unrotated(recipe: RecipeConfig) -> RecipeConfig | None:
    """Return the recipe without rotated gradients, at least as fast; None if it has none."""
    codecs = {name: getattr(recipe, name) for name in ("grads", INTRA, INTER)}
    if not any(codec.hadamard for codec in codecs.values()):
        return None
    return replace(recipe, **{k: replace(c, hadamard=None) for k, c in codecs.items()})


def grads_part(recipe: RecipeConfig) -> dict[str, Any]:
    """Return the settings of the gradients' part."""
    return {name: getattr(recipe, name) for name in GRADS}


def weights_part(recipe: RecipeConfig) -> dict[str, Any]:
    """Return all other settings."""
    names = [f.name for f in fields(recipe) if f.name not in (*GRADS, "name")]  # type: ignore[arg-type]
    return {name: getattr(recipe, name) for name in names}


def without_name(recipe: RecipeConfig) -> str:
    """Return a text that two recipes share when they differ in their names only."""
    return repr({**weights_part(recipe), **grads_part(recipe)})


def wire_bits(recipe: RecipeConfig) -> list[int]:
    """Return the bits of each wire; raw ones have 16."""
    found = []
    for wire in recipe.wires:
        found.append(recipe.wire(wire).bits or 16)
    return found


def without_bits(recipe: RecipeConfig) -> str:
    """Return a text that recipes share whose steps have the same tasks."""
    none = {"bits": None, "memory": MemoryConfig()}  # error feedback has no figures anyway
    bare: dict[str, Any] = {n: replace(getattr(recipe, n), **none) for n in _CODECS}
    return without_name(replace(recipe, **bare))


def _bits(
    short: str, ends: tuple[str, str], bits: tuple[int | None, int | None]
) -> dict[str, CodecConfig]:
    """The short-hand where both wires have the same bits, else each wire's own."""
    if bits[0] == bits[1]:
        return {short: CodecConfig(bits=bits[0])} if bits[0] else {}
    return {f"{short}_{end}": CodecConfig(bits=b) for end, b in zip(ends, bits, strict=True) if b}


def _valid(settings: dict[str, Any]) -> bool:
    try:
        RecipeConfig(**settings)
    except ValueError:
        return False
    return True


def _point(point: Parts) -> tuple[str, dict[str, Any]]:
    """A point's name and settings: by short-hands where there are such."""
    for stage, shard in product((3, 2, 1), SHARDS):
        settings = {"stage": stage, "shard": shard}
        if RecipeConfig(**settings).parts == point:
            own = {k: v for k, v in settings.items() if v != getattr(PLAIN, k)}
            zero = f"zero{stage}" if stage != 3 else ""
            return "_".join(filter(None, (zero, "hsdp" if shard == "node" else ""))), own
    name = "ddp" if point[2] == "none" else "_".join(point)
    return name, {"sharding": ShardingConfig(*point)}


def _weight_name(
    point: str, settings: dict[str, Any], forward: int | None, backward: int | None
) -> str:
    parts = [point] if point else []
    if forward or backward:
        parts.append(f"w{forward or 16}" + (f"_{backward or 16}" if forward != backward else ""))
    return "_".join([*parts, *(["hpz"] if settings.get("secondary") else [])])


def _grad_name(hops: int, intra: int | None, inter: int | None) -> str:
    if not intra and not inter:
        return "hops2" if hops == 2 else ""
    return f"g{intra}" if hops == 1 else f"g{intra or 16}_{inter or 16}"
