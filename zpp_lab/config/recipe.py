"""A recipe's settings: which codec each wire uses, for which parameters and from which step on, and
the sharding."""

from __future__ import annotations

from dataclasses import field, replace
from itertools import product
from typing import Any, Literal, get_args

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import STRICT as _STRICT
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.codec import need as _need
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, ACTS_PIPE, ROLLOUT, WIRES, Wire

Part = Literal["none", "node", "world"]
Parts = tuple[Part, Part, Part]  # of weights, gradients, optimizer
SHARDED = ("weights", "grads", "optimizer")
PARTS: tuple[Part, ...] = get_args(Part)
POINTS: tuple[Parts, ...] = tuple(  # of the grid: see ShardingConfig
    (w, g, o)
    for w, g, o in product(PARTS, repeat=3)
    if PARTS.index(w) <= PARTS.index(g) <= PARTS.index(o)
)


@dataclass(frozen=True, config=_STRICT)
class RuleConfig:
    """Codec settings for the parameters that match; the last matching rule wins."""

    name: str = "*"
    ndim: int | None = None
    min_numel: int = 0
    max_numel: int | None = None
    wires: list[Wire] | None = None  # None: every one of weights and gradients
    exempt: bool = False
    set: CodecConfig = field(default_factory=CodecConfig)

    def holds_on(self, wire: Wire) -> bool:
        """Return whether the rule is for that wire."""
        if self.wires is None:
            return WIRES[wire].carries != "activations"
        return wire in self.wires


@dataclass(frozen=True, config=_STRICT)
class ShardingConfig:
    """Over which ranks weights, gradients and the optimizer with its masters are sharded: those of
    a `node`, the `world`, or `none`; null: as the short-hands recipe.stage and recipe.shard say.

    The grid is AMSP's (Chen et al. 2023, arXiv:2311.00257). Weights are sharded no finer than
    gradients, and gradients no finer than the optimizer: a rank updates what it has summed.

    Gradients sharded over a node are summed in it at each micro-step and between nodes once a step,
    as in MiCS (Zhang et al. 2022, arXiv:2205.00119). An optimizer that is not sharded over the
    world is replicated in each node, or on each rank; every copy gets the same sums and stays equal
    to the bit.

    With node-replicated weights and an optimizer sharded over the world, a step's new weights
    travel between nodes once, on the wire `weights_update`; `update` says as what: the weights, or
    their differences from the node's. With `differences` a node also keeps weights that are not
    sharded: it gathers them once a step, and they stay whole until backward is done.
    """

    weights: Part | None = None
    grads: Part | None = None
    optimizer: Part | None = None
    update: Literal["weights", "differences"] = "weights"


@dataclass(frozen=True, config=_STRICT)
class PhaseConfig:
    """What holds `after` so many steps, or after that share of the run's steps. A field that is set
    replaces the recipe's own up to the next phase that sets it; other settings stay. Warm-ups with
    raw gradients are 1-bit Adam's (Tang et al. 2021, arXiv:2102.02888)."""

    after: int | float
    hops: Literal[1, 2] | None = None
    weights: CodecConfig | None = None
    grads: CodecConfig | None = None
    weights_forward: CodecConfig | None = None
    weights_backward: CodecConfig | None = None
    grads_intra: CodecConfig | None = None
    grads_inter: CodecConfig | None = None
    weights_update: CodecConfig | None = None
    rules: list[RuleConfig] | None = None

    def __post_init__(self) -> None:
        after = self.after
        _need(
            after >= 1 if isinstance(after, int) else 0 < after < 1,
            f"recipe.phases: after={after}: use steps, a whole number from 1 on, or a share of the "
            "run's steps between 0 and 1, such as 0.5",
        )

    def first_step(self, steps: int) -> int:
        """Return the steps done when the phase begins, in a run of `steps`."""
        return self.after if isinstance(self.after, int) else max(1, round(self.after * steps))

    @property
    def changes(self) -> dict[str, Any]:
        """What it sets of a recipe."""
        own = vars(self).items()
        return {name: value for name, value in own if name != "after" and value is not None}


@dataclass(frozen=True, config=_STRICT)
class RecipeConfig:
    """Which codec each wire uses, for which parameters, and the sharding. `weights`, `grads` and
    `acts` are short-hands: each wire starts from its short-hand and changes what it sets itself. So
    are `stage` and `shard`, for points of `sharding`. Phases change settings later."""

    name: str = "zero3"
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    stage: Literal[1, 2, 3] = 3
    shard: Literal["world", "node"] = "world"  # node: sharded inside a node, copies across (HSDP)
    secondary: bool = False  # hpZ: the node keeps the forward payload for backward
    hops: Literal[1, 2] = 1
    order: Literal["rank", "reversed"] = "rank"
    weights: CodecConfig = field(default_factory=CodecConfig)
    grads: CodecConfig = field(default_factory=CodecConfig)
    acts: CodecConfig = field(default_factory=CodecConfig)  # in every phase
    weights_forward: CodecConfig = field(default_factory=CodecConfig)
    weights_backward: CodecConfig = field(default_factory=CodecConfig)
    grads_intra: CodecConfig = field(default_factory=CodecConfig)
    grads_inter: CodecConfig = field(default_factory=CodecConfig)
    weights_update: CodecConfig = field(default_factory=CodecConfig)
    acts_forward: CodecConfig = field(default_factory=CodecConfig)
    acts_backward: CodecConfig = field(default_factory=CodecConfig)
    acts_pipe: CodecConfig = field(default_factory=CodecConfig)
    weights_rollout: CodecConfig = field(default_factory=CodecConfig)  # in every phase
    exempt: ExemptConfig = field(default_factory=ExemptConfig)
    rules: list[RuleConfig] = field(default_factory=list)
    phases: list[PhaseConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check_sharding()
        _need(
            not self.secondary or self.again,
            f"recipe.secondary=true needs recipe.stage=3: with recipe.{self.setting('weights')} "
            "backward gathers nothing; leave recipe.secondary out",
        )
        self._check_codecs()
        _need(
            not self.secondary or "node" not in self.parts,
            f"recipe.{self.setting('weights')}: all weights are in the node already; leave "
            "recipe.secondary out",
        )

    @property
    def parts(self) -> Parts:
        """Over which ranks weights, gradients and the optimizer are sharded."""
        own = self.sharding.weights, self.sharding.grads, self.sharding.optimizer
        weights, grads, optimizer = (o or s for o, s in zip(own, self._short, strict=True))
        return weights, grads, optimizer

    @property
    def _short(self) -> Parts:
        """What the short-hands mean."""
        cut = self.shard
        return cut if self.stage == 3 else "none", "none" if self.stage == 1 else cut, cut

    @property
    def again(self) -> bool:
        """Whether backward gathers weights again (stage 3)."""
        return self.parts[0] != "none"

    @property
    def copied(self) -> bool:
        """Whether several ranks have the same shard of the optimizer."""
        return self.parts[2] != "world"

    @property
    def two_hops(self) -> bool:
        """Whether gradients are summed in nodes, then between them."""
        return self.hops == 2 or self.copied or self.parts[1] == "node"

    @property
    def kept(self) -> bool:
        """Whether node-replicated weights have a fifth wire, `weights_update`."""
        weights, _, optimizer = self.parts
        whole = weights == "none" and self.sharding.update == "differences"
        return optimizer == "world" and (weights == "node" or whole)

    @property
    def rolls(self) -> bool:
        """Whether weights for generation have settings of their own."""
        named = any(ROLLOUT in (rule.wires or ()) for rule in self.rules)
        return named or self.weights_rollout != CodecConfig()

    @property
    def acting(self) -> bool:
        """Whether activations between tensor parts have settings."""
        return self._sets("acts", ACTS_FORWARD, ACTS_BACKWARD)

    @property
    def piping(self) -> bool:
        """Whether activations between stages have settings."""
        return self._sets("acts", ACTS_PIPE)

    def _sets(self, *names: str) -> bool:
        return any(getattr(self, name) != CodecConfig() for name in names)

    def check_acts(self, tp: int, pp: int) -> None:
        """ValueError where settings of activations have no wire with so many parts and stages."""
        for axis, size, names in (
            ("tp", tp, (ACTS_FORWARD, ACTS_BACKWARD)),
            ("pp", pp, (ACTS_PIPE,)),
            ("tp or cluster.pp", max(tp, pp), ("acts",)),
        ):
            for name in names:
                _need(
                    size > 1 or not self._sets(name),
                    f"recipe {self.name}: recipe.{name} has no wire, as the model is whole there: "
                    f"set cluster.{axis}, or leave recipe.{name} out",
                )

    @property
    def wires(self) -> tuple[Wire, ...]:
        return tuple(w for w, s in WIRES.items() if not s.needs or getattr(self, s.needs))

    @property
    def coded(self) -> bool:
        """Whether a codec, or a difference in place of a weight, changes what travels."""
        rules = [rule for rule in self.rules if not rule.exempt]
        own = [(self.wire(wire), wire) for wire in self.wires]
        ruled = [rule.set.over(c) for c, wire in own for rule in rules if rule.holds_on(wire)]
        later = [own for phase in self.phases for own in phase.changes.values()]
        each = [*(codec for codec, _ in own), *ruled, *later]
        coded = any(isinstance(codec, CodecConfig) and not codec.raw for codec in each)
        return coded or self.sharding.update == "differences"

    @property
    def plain(self) -> bool:
        """Whether torch alone can train so: no codec, and ZeRO-3 or ZeRO-2 over the world or the
        node with copies across nodes (HSDP), weights resharded to the node, or copies alone."""
        weights, grads, optimizer = self.parts
        torchs = grads == optimizer and weights in ("none", grads)
        return torchs and not self.coded and (self.hops, self.order) == (1, "rank")

    def setting(self, part: str) -> str:
        """Return the setting that decides how a part is sharded, such as stage=2."""
        own = getattr(self.sharding, part)
        staged = part == "weights" and self.stage != 3
        short = f"stage={self.stage}" if staged else f"shard={self.shard}"
        return short if own is None else f"sharding.{part}={own}"

    def _check_sharding(self) -> None:
        short = " ".join(
            f"recipe.{key}={getattr(self, key)}"
            for key, usual in (("stage", 3), ("shard", "world"))
            if getattr(self, key) != usual
        )
        for part, wanted in zip(SHARDED, self._short, strict=True):
            own = getattr(self.sharding, part)
            _need(
                not short or own in (None, wanted),
                f"recipe.sharding.{part}={own} contradicts {short} ({wanted}): leave one out",
            )
        nearest = min(POINTS, key=lambda point: sum(map(_apart, point, self.parts)))
        texts = [", ".join(map("=".join, zip(SHARDED, k))) for k in (self.parts, nearest)]  # noqa: B905
        _need(
            self.parts in POINTS,
            f"recipe.sharding: {texts[0]} is not supported: weights cannot be sharded finer than "
            "gradients, nor gradients finer than the optimizer; the nearest supported one is "
            f"{texts[1]}",
        )
        _need(
            self.kept or (self.weights_update, self.sharding.update) == (CodecConfig(), "weights"),
            "recipe.weights_update and recipe.sharding.update need node-replicated weights and "
            "an optimizer sharded over all ranks: set recipe.sharding.weights=node, or for whole "
            "weights recipe.sharding.update=differences",
        )

    def wire(self, wire: Wire) -> CodecConfig:
        """Return the wire's own codec settings over its short-hand."""
        spec = WIRES[wire]
        own: CodecConfig = CodecConfig() if spec.codecs == "none" else getattr(self, wire)
        return own.over(getattr(self, spec.short)) if spec.short else own

    def phased(self, steps: int) -> list[tuple[int, RecipeConfig]]:
        """Return what holds in a run of `steps`: (steps done when it begins, from 0 on; a recipe
        without phases). ValueError for phases out of order, or that never begin or change nothing.
        Of shares that come to one step the later one begins a step later."""
        begun, recipe = 0, replace(self, phases=[])
        found = [(begun, recipe)]
        for i, phase in enumerate(self.phases):
            first, place = phase.first_step(steps), f"recipe.phases[{i}]"
            named = f"{place}.after={phase.after}"
            earlier = self.phases[i - 1].after if i else 0
            if {type(phase.after), type(earlier)} == {float} and phase.after > earlier:
                first = max(first, begun + 1)  # of few steps both may come to the same one
            _need(
                first < steps,
                f"{named}: train.steps={steps} ends before this phase begins; use a smaller "
                "number, a share such as 0.5, or leave the phase out",
            )
            _need(
                first > begun,
                f"{named} is step {first}, and the phase before it begins at step {begun}: order "
                "phases by their steps, each with a different step",
            )
            try:
                following = replace(recipe, **phase.changes)
            except ValidationError as error:
                raise ValueError(f"{place}: {error.errors()[0]['ctx']['error']}") from None
            _need(
                following._holds() != recipe._holds(),
                f"{place} changes nothing: its settings apply already, or a wire's own settings "
                "override them; set something else, or leave it out",
            )
            begun, recipe = first, following
            found.append((begun, recipe))
        return found

    def _holds(self) -> tuple[Any, ...]:
        """Return what phases can change, short-hands resolved."""
        return self.hops, self.rules, [self.wire(wire) for wire in self.wires]

    @property
    def remembers(self) -> bool:
        """Whether a wire, or a rule for one, asks for a residual."""
        ruled = any(rule.set.memory.on for rule in self.rules if not rule.exempt)
        return ruled or any(self.wire(wire).memory.on for wire in self.wires)

    def _check_codecs(self) -> None:
        rules = [r for r in self.rules if not r.exempt]
        named = {wire for rule in self.rules for wire in rule.wires or ()}
        for wire in named:
            _need(
                WIRES[wire].carries != "activations",
                f"recipe {self.name}, recipe.rules: {wire} carries no parameters: set recipe.acts, "
                f"recipe.{ACTS_FORWARD}, recipe.{ACTS_BACKWARD} or recipe.{ACTS_PIPE}",
            )
        for wire in self.wires:
            own = self.wire(wire)
            ruled = [rule.set.over(own) for rule in rules if rule.holds_on(wire)]
            try:
                for settings in (own, *ruled):
                    settings.check()
                    self._check_sparse(wire, settings)
                _need(
                    own.codec != "block" or any(not s.raw for s in (own, *ruled)),
                    "codec=block needs bits: set 2, 3, 4, 6 or 8, or leave codec out",
                )
                _check_memory(wire, [s for s in (own, *ruled) if s.memory.on])
            except ValueError as error:
                raise ValueError(f"recipe {self.name}, {wire}: {error}") from None

    def _check_sparse(self, wire: Wire, settings: CodecConfig) -> None:
        allowed, update = WIRES[wire].codecs, self.sharding.update
        _need(
            settings.codec != "topk" or allowed in ("all", update),
            "codec=topk would set most weights to 0: set it for recipe.grads, in rules that name "
            "wires, or for recipe.weights_update with recipe.sharding.update=differences",
        )


def twin(recipe: RecipeConfig) -> RecipeConfig:
    """Return the raw twin: no codec on any wire and new weights sent uncompressed, with the same
    sharding, secondary partition, hops and order. What `recipe` is faster by, its bits bring."""
    same = ("stage", "shard", "secondary", "hops", "order")
    return RecipeConfig(
        name=f"{recipe.name}_raw",
        sharding=replace(recipe.sharding, update="weights"),
        **{name: getattr(recipe, name) for name in same},
    )


def _apart(one: Part, other: Part) -> int:
    return abs(PARTS.index(one) - PARTS.index(other))


def _check_memory(wire: Wire, remembered: list[CodecConfig]) -> None:
    """ValueError where one of the residuals `remembered` would have nothing to do."""
    residual = "memory.kind=residual"
    _need(
        not remembered or WIRES[wire].residual,
        f"{residual} works only for gradients: leave it out of weights, and of rules for them",
    )
    _need(
        not remembered or not all(settings.raw for settings in remembered),
        f"{residual} without a codec has no error to feed back: set bits, or leave memory out",
    )
    _need(
        all(settings.codec != "sham" for settings in remembered),
        f"{residual} would cancel the noise of codec=sham: leave memory out, or use another codec",
    )
