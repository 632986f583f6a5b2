"""A recipe made concrete: the codec of every parameter on every wire of a cluster.

On one node a two-hop recipe has one hop, and one that would then carry nothing is an error. With
one hop both gradient wires have one codec: rows that stay in the node count for `grads_intra`, the
others for `grads_inter`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from zpp_lab.codecs import Codec, RawCodec, build_codec
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.codecs.layout import Parameter
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.model import OUTER, LoraConfig
from zpp_lab.config.schema import ClusterConfig, Config, RecipeConfig, RuleConfig
from zpp_lab.config.wires import (
    BACKWARD,
    FORWARD,
    GATHERS,
    INTER,
    INTRA,
    ROLLOUT,
    UPDATE,
    WIRES,
    Wire,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RAW = CodecConfig(codec="none")
_IN_CELL = [wire for wire, spec in WIRES.items() if spec.carries != "activations"]


@dataclass(frozen=True)
class Recipe:
    """A recipe on a cluster, checked: what is asked for on a wire is what the wire carries."""

    config: RecipeConfig
    cluster: ClusterConfig
    weights_dtype: torch.dtype = torch.float32  # of raw weights on the wire
    grads_dtype: torch.dtype = torch.float32  # of raw gradients on the wire
    lora: LoraConfig = field(default_factory=LoraConfig)  # how a frozen base is stored

    @classmethod
    def of(cls, config: Config) -> Recipe:
        """The recipe on the configured cluster, checked; ValueError names what does not fit."""
        sent = DTYPES[config.train.param_dtype], DTYPES[config.train.reduce_dtype]
        return cls(config.recipe, config.cluster.dp, *sent, lora=config.model.lora)

    def __post_init__(self) -> None:
        assert self.cluster == self.cluster.dp, "a recipe knows the ranks of one cell"
        for wire in self.config.wires:
            for settings in self._settings(wire):
                _check_settings(self.config, wire, settings)
        _check_reduction(self)
        _check_memory(self)
        _check_weights(self)
        _check_shard(self)
        _check_kept(self)
        _check_base(self)

    @property
    def shards(self) -> int:
        """Into how many parts each parameter is cut."""
        cluster = self.cluster
        return {"none": 1, "node": cluster.gpus_per_node, "world": cluster.world}[
            self.config.parts[2]
        ]

    @property
    def cut(self) -> int:
        """Into how many parts gradients are summed."""
        return self.cluster.gpus_per_node if self.config.copied else self.cluster.world

    @property
    def node_sums(self) -> bool:
        """Whether sums of a step's micro-steps stay in the node until the last one."""
        return self.config.parts[1] == "node"

    @property
    def kept(self) -> bool:
        """Whether each node keeps the weights, and a step's new ones travel between nodes once."""
        return self.config.kept and self.cluster.nodes > 1

    @property
    def differences(self) -> bool:
        """Whether those travel as differences from what the node keeps."""
        return self.kept and self.config.sharding.update == "differences"

    @property
    def hops(self) -> tuple[Wire, ...]:
        """The wires a gradient crosses, in order. A hop with one participant does not exist. With
        an optimizer on every rank the sums return inside the node."""
        nodes, local = self.cluster.nodes, self.cluster.gpus_per_node
        if self.cluster.world == 1:
            return ()
        if self.config.parts[2] == "none":
            return (INTRA, INTER, INTRA)
        if self.config.two_hops and nodes > 1 and local > 1:
            return (INTRA, INTER)
        return (INTRA,) if local > 1 else (INTER,)

    def wire(self, wire: Wire) -> CodecConfig:
        """The wire's own codec settings over its short-hand."""
        return self.config.wire(wire)

    def codec(self, wire: Wire, parameter: Parameter) -> Codec:
        """The codec of `parameter` on `wire`, exemptions and rules applied."""
        if parameter.dtype is not None:
            return RawCodec(parameter.dtype)
        raw = self._raw_dtype(wire)
        if self.cluster.world == 1:
            return RawCodec(raw)
        codec = RawCodec(raw) if _exempt(self.config.exempt, parameter) else self._codecs[wire]
        for rule in self.config.rules:
            if _matches(rule, wire, parameter):
                settings = RAW if rule.exempt else rule.set.over(self.wire(wire))
                codec = build_codec(settings, raw)
        return codec

    def memory(self, wire: Wire, parameter: Parameter) -> Memory | None:
        """What its encoder remembers of `parameter` on `wire`, rules applied; None: nothing, as of
        all that travels as it is."""
        if isinstance(self.codec(wire, parameter), RawCodec):
            return None
        settings = self.wire(wire)
        for rule in self.config.rules:
            if _matches(rule, wire, parameter):
                settings = rule.set.over(self.wire(wire))
        return Memory.of(settings.memory)

    def asks(self, wire: Wire) -> bool:
        """Whether the wire, or a rule for it, has a codec."""
        return any(
            not isinstance(build_codec(s, torch.float32), RawCodec) for s in self._settings(wire)
        )

    def remembers(self, wire: Wire) -> bool:
        """Whether the wire, or a rule for it, asks for a memory."""
        return any(settings.memory.on for settings in self._settings(wire))

    def _settings(self, wire: Wire) -> list[CodecConfig]:
        """The wire's own, and those that rules make of them."""
        own = self.wire(wire)
        rules = [r for r in self.config.rules if r.holds_on(wire) and not r.exempt]
        return [own, *(rule.set.over(own) for rule in rules)]

    def raw_by(self, wire: Wire, parameter: Parameter) -> str:
        """The setting by which `parameter` travels as it is on a wire that asks for bits."""
        exempt = self.config.exempt
        if any(_matches(rule, wire, parameter) for rule in self.config.rules):
            return "recipe.rules"
        if len(parameter.shape) <= exempt.max_ndim:
            return f"recipe.exempt.max_ndim={exempt.max_ndim}"
        if parameter.numel < exempt.below_numel:
            return f"recipe.exempt.below_numel={exempt.below_numel}"
        return "recipe.exempt.names" if _exempt(exempt, parameter) else "no rule that matches"

    @cached_property
    def _codecs(self) -> dict[Wire, Codec]:
        """Of the parameters that no exemption and no rule names: built once, not for each."""
        return {wire: build_codec(self.wire(wire), self._raw_dtype(wire)) for wire in WIRES}

    def _raw_dtype(self, wire: Wire) -> torch.dtype:
        dtypes = {"param": self.weights_dtype, "reduce": self.grads_dtype, "fp32": torch.float32}
        return dtypes[WIRES[wire].dtype]

    def acts_codec(self, wire: Wire) -> Codec:
        """Return the codec of activations on `wire`, on any cluster."""
        return self._codecs[wire]

    def base_codec(self, parameter: Parameter) -> Codec:
        """The codec of `parameter` of a frozen base, on any cluster and on both weights' wires."""
        if _exempt(self.lora.base_exempt, parameter):
            return RawCodec(self.weights_dtype)
        return build_codec(self.lora.base_codec, self.weights_dtype)


def check_patterns(recipe: Recipe, parameters: Sequence[Parameter], stored: Set[str]) -> None:
    """ValueError for a pattern or rule that matches no parameter of the model, which lists names
    near it. `stored`: of a frozen base. `model.lora.base_exempt.names` may stay the default, which
    lists what several families call their embeddings and heads."""
    names = [p.name for p in parameters]
    for pattern in recipe.config.exempt.names:
        _need_match("recipe.exempt.names", pattern, names)
    for i, rule in enumerate(recipe.config.rules):
        _need_match(f"recipe.rules[{i}].name", rule.name, names)
        wires = recipe.config.wires
        if not any(_matches(rule, wire, p) for wire in wires for p in parameters):
            raise ValueError(
                f"recipe.rules[{i}] (name {rule.name}) matches no parameter of this model: its "
                "wires, ndim, min_numel and max_numel exclude all; widen them, or remove the rule"
            )
    if stored and recipe.lora.base_exempt.names != OUTER:
        for pattern in recipe.lora.base_exempt.names:
            _need_match("model.lora.base_exempt.names", pattern, [n for n in names if n in stored])


def _need_match(setting: str, pattern: str, names: Sequence[str]) -> None:
    if not any(fnmatchcase(name, pattern) for name in names):
        raise ValueError(
            f"{setting}: {pattern!r} matches no parameter of this model; a pattern must match a "
            f"whole name (* matches anything); similar names: {', '.join(near(pattern, names))}"
        )


def near(pattern: str, names: Sequence[str], most: int = 4) -> list[str]:
    """The names that are most like `pattern`: its longest literal part beside as many dotted parts
    of each name."""
    literal = max(re.split(r"[*?\[\]]", pattern), key=len).strip(".").lower()
    width = literal.count(".") + 1

    def likeness(name: str) -> float:
        if literal in name.lower():
            return 2.0
        parts = name.lower().split(".")
        windows = [".".join(parts[i : i + width]) for i in range(max(1, len(parts) - width + 1))]
        return max(SequenceMatcher(None, literal, window).ratio() for window in windows)

    return sorted(names, key=likeness, reverse=True)[:most]


def _exempt(exempt: ExemptConfig, parameter: Parameter) -> bool:
    return (
        len(parameter.shape) <= exempt.max_ndim
        or parameter.numel < exempt.below_numel
        or any(fnmatchcase(parameter.name, pattern) for pattern in exempt.names)
    )


def _matches(rule: RuleConfig, wire: Wire, parameter: Parameter) -> bool:
    return (
        rule.holds_on(wire)
        and fnmatchcase(parameter.name, rule.name)
        and rule.ndim in (None, len(parameter.shape))
        and parameter.numel >= rule.min_numel
        and (rule.max_numel is None or parameter.numel <= rule.max_numel)
    )


def quantizes_any(recipe: Recipe) -> bool:
    """Whether some parameter may travel other than as its own bytes on some wire of a cell."""
    return any(_quantizes(recipe, wire) for wire in _IN_CELL)


def _quantizes(recipe: Recipe, wire: Wire) -> bool:
    asked = not isinstance(build_codec(recipe.wire(wire), torch.float32), RawCodec)
    ruled = any(r.holds_on(wire) and not r.exempt for r in recipe.config.rules)
    return asked or ruled


def _check_settings(recipe: RecipeConfig, wire: Wire, settings: CodecConfig) -> None:
    """Whether such a codec is there, takes them and suits the wire; `RecipeConfig` has looked at
    our own."""
    place = f"recipe {recipe.name}, {wire}"
    try:
        codec = build_codec(settings, torch.float32)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if codec.one_hop and WIRES[wire].carries != "gradients":
        raise ValueError(
            f"{place}: codec={settings.codec} sends sums of gradients alone: set it for "
            "recipe.grads, or in rules that name wires (recipe.rules[i].wires)"
        )
    if codec.one_hop and recipe.two_hops:
        cut = recipe.setting("optimizer" if recipe.copied else "grads")
        raise ValueError(
            f"{place}: codec={settings.codec} is summed over all ranks before it is decoded: "
            + ("set recipe.hops=1" if recipe.hops == 2 else f"leave recipe.{cut} out")
        )


def _check_reduction(recipe: Recipe) -> None:
    name, cluster = recipe.config.name, recipe.cluster
    if not recipe.config.two_hops and recipe.wire(INTRA) != recipe.wire(INTER):
        raise ValueError(
            f"recipe {name}: one hop sends each gradient once, so grads_intra and grads_inter "
            "must have the same codec; set recipe.grads for both, or recipe.hops=2"
        )
    asked = [w for w in (INTRA, INTER) if _quantizes(recipe, w)]
    if asked and recipe.config.two_hops and not set(asked) & set(recipe.hops):
        raise ValueError(
            f"recipe {name}: {' and '.join(asked)} would carry nothing on a cluster of "
            f"{cluster.nodes} × {cluster.gpus_per_node}; change the cluster or set recipe.grads"
        )
    if cluster.world == 1 and quantizes_any(recipe):
        raise ValueError(
            f"recipe {name}: a cluster of one rank has no wires to quantize; "
            "use recipe=zero3 or a larger cluster"
        )


def _check_memory(recipe: Recipe) -> None:
    """`RecipeConfig` has looked at each wire's settings."""
    asked = [wire for wire in WIRES if recipe.remembers(wire)]
    if asked and not set(asked) & set(recipe.hops):
        raise ValueError(
            f"recipe {recipe.config.name}, {' and '.join(asked)}: memory.kind=residual would have "
            f"no effect, since gradients of {recipe.cluster.nodes} × "
            f"{recipe.cluster.gpus_per_node} ranks use {', '.join(recipe.hops)} only; set it for "
            "that wire or for recipe.grads, or leave it out"
        )


def _check_shard(recipe: Recipe) -> None:
    """Parts that nodes have a copy of each need nodes, and ranks in them."""
    config, nodes, local = recipe.config, recipe.cluster.nodes, recipe.cluster.gpus_per_node
    part = "optimizer" if config.copied else "grads"
    said = f"recipe.{config.setting(part)}"
    if (config.copied or recipe.node_sums) and (nodes == 1 or local == 1):
        raise ValueError(
            f"recipe {config.name}: {said} needs several nodes with several GPUs each, not "
            f"{nodes} × {local}; use {said.rpartition('=')[0]}=world"
        )
    idle = [wire for wire in (*GATHERS, ROLLOUT) if not recipe.wire(wire).raw]
    if recipe.shards == 1 and nodes * local > 1 and idle:
        raise ValueError(
            f"recipe {config.name}: with {said} every rank holds all weights, so "
            f"{' and '.join(idle)} would carry nothing; leave recipe.weights out"
        )


def _check_kept(recipe: Recipe) -> None:
    """Bits of `weights_update`, and those inside nodes, must have bytes to travel as."""
    config, cluster = recipe.config, recipe.cluster
    differences = config.sharding.update == "differences"
    if not config.kept:
        return
    asked = differences or config.weights_update != CodecConfig()
    if asked and not recipe.kept:
        raise ValueError(
            f"recipe {config.name}: on one node nothing is sent between nodes, so "
            "recipe.weights_update would carry nothing; use a cluster of several nodes, or leave "
            "recipe.weights_update and recipe.sharding.update out"
        )
    if differences and not recipe.asks(UPDATE):
        raise ValueError(
            f"recipe {config.name}: recipe.sharding.update=differences needs a codec: "
            "uncompressed weights arrive exactly, without differences; set "
            "recipe.weights_update.bits, or update=weights"
        )
    inside = [w for w in (*GATHERS, ROLLOUT) if recipe.asks(w)]
    if inside and recipe.kept and cluster.gpus_per_node == 1:
        raise ValueError(
            f"recipe {config.name}: with one GPU a node nothing is sent inside nodes, so "
            f"{' and '.join(inside)} would carry nothing; set recipe.weights_update in place of "
            "recipe.weights"
        )


def _check_base(recipe: Recipe) -> None:
    """A frozen base is encoded once, and gathered by our collectives alone."""
    if not recipe.lora.on:
        return
    base = build_codec(recipe.lora.base_codec, recipe.weights_dtype)
    if base.one_hop:
        raise ValueError(
            f"model.lora.base_codec.codec={recipe.lora.base_codec.codec} sends sums of gradients "
            "alone: use block"
        )
    if base.stochastic:
        raise ValueError(
            f"model.lora.base_codec.codec={recipe.lora.base_codec.codec} rounds stochastically, "
            "but the base is encoded once: use a codec that rounds to nearest"
        )
    if "node" in recipe.config.parts or recipe.config.copied:
        raise ValueError(
            f"recipe {recipe.config.name}: model.lora needs a frozen base sharded over all ranks; "
            "leave recipe.shard and recipe.sharding out"
        )


def _check_weights(recipe: Recipe) -> None:
    config = recipe.config
    if recipe.wire(FORWARD) == recipe.wire(BACKWARD):
        return
    if config.secondary or not config.again:
        why = "recipe.secondary=true" if config.secondary else f"recipe.{config.setting('weights')}"
        raise ValueError(
            f"recipe {config.name}: with {why} backward uses the forward's weights; set "
            "recipe.weights_backward like recipe.weights_forward, or leave it out"
        )
