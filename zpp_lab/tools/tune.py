"""`zpp-lab tune RUN`: bits for each class of weights, for the least gap that a budget allows.

A class is what differs in a layer's number alone: `layers.*.attention.wq.weight`. A trained run's
weights are rounded, a class at a time, with few bits (`PROBES`). The held-out loss gives the cost
of an error there: s = (sum of losses' rises) / (sum of NMSE). A choice of bits and block costs s
times its own NMSE. `spend` finds the choices of least cost within the budget exactly, by a knapsack
(as L-GreCo for layers' ranks: Markov et al. 2022, arXiv:2210.17357).

Rounding a trained model stands in for training with such gathers: the recipe is a proposal until a
study has compared it with the uniform one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from zpp_lab.codecs import BlockCodec, NormalCodec
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import BITS, BLOCK_SIZES, NORMAL_BITS, CodecConfig
from zpp_lab.config.load import load
from zpp_lab.config.parser import check_own
from zpp_lab.config.schema import Config, RecipeConfig, RuleConfig
from zpp_lab.config.wires import FORWARD, GATHERS
from zpp_lab.files import conf_dir, conf_dirs, text_table, write_atomic
from zpp_lab.tools.evaluate import Bench
from zpp_lab.tools.export.model import open_run
from zpp_lab.tools.export.wire import WireWeights
from zpp_lab.tools.plan.law import load_law

PROBES = (4, 3)  # bits: errors large enough to see, small enough to stay in proportion
CHOSEN = ("codec", "bits", "block_size", "symmetric", "scale_dtype")
LEVELS = (("block", True), ("block", False), ("normal", True))  # codec, symmetric
POWER = 1  # of NAMES in tools/plan/law.py: a gap grows as this power of the weights' error
_WRITTEN = ": zpp-lab tune "  # in a recipe's first line


@dataclass(frozen=True)
class Choice:
    """What a class may be sent with; nbytes: of all its parameters, all ranks together."""

    codec: CodecConfig
    nbytes: int
    nmse: float  # Σ(y-x)² / Σx² over the class
    cost: float  # nats a token, of this class alone

    @property
    def text(self) -> str:
        kind = "" if self.codec.symmetric else ", asymmetric"
        kind += ", normal levels" if self.codec.codec == "normal" else ""
        kind += ", bf16 scales" if self.codec.scale_dtype == "bf16" else ""
        return f"{self.codec.bits} bits, blocks of {self.codec.block_size}{kind}"


@dataclass(frozen=True)
class Class:
    """Parameters treated the same; `rises`: loss with PROBES bits less the masters'."""

    pattern: str
    names: tuple[str, ...]
    numel: int
    rises: tuple[float, ...]
    slope: float  # s, nats for a unit of NMSE
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Tuned:
    """Each class's choice; `uniform`: the best single codec within the budget, or None."""

    settings: dict[str, Any]  # of the recipe
    chosen: dict[str, Choice]
    classes: tuple[Class, ...]
    budget: int  # bytes
    numel: int
    uniform: tuple[Choice, ...] | None
    loss: float  # of the masters
    tokens: int

    @property
    def recipe(self) -> RecipeConfig:
        return load(RecipeConfig, self.settings)

    @property
    def cost(self) -> float:
        return sum(c.cost for c in self.chosen.values())

    @property
    def bits(self) -> float:
        """A weight, scales and filling included."""
        return 8 * sum(c.nbytes for c in self.chosen.values()) / self.numel

    @property
    def unseen(self) -> list[str]:
        """Classes whose rounding raised the loss by nothing that could be seen."""
        return [c.pattern for c in self.classes if sum(c.rises) <= 0]

    @property
    def ratio(self) -> float | None:
        """The gap expected, as a share of the uniform recipe's: by the law's power of an error."""
        if self.uniform is None or not (all_alike := sum(c.cost for c in self.uniform)):
            return None
        power: float = load_law().values[POWER]
        return (self.cost / all_alike) ** power


@torch.no_grad()
def tune(
    run: Path,
    bits: float,
    name: str = "tuned",
    among: Sequence[int] = BITS,
    blocks: Sequence[int] = (64, 128, 256, 2048),
    tokens: int | None = None,
    device: str = "auto",
) -> Tuned:
    """Return the recipe of least expected gap that sends at most `bits` a quantized weight on
    average, scales and filling included, from the newest weights of `run`. Of each choice it takes
    the best of symmetric and asymmetric codes and, up to 4 bits, of `normal` ones, with scales in
    fp32 or bf16.

    among, blocks: bits and block sizes to choose from. tokens: held-out tokens to measure on, in
    place of the run's train.eval_tokens. What the run's recipe exempts stays raw. ValueError for
    what is no run, for choices that no codec has, and for a budget below the smallest choice.
    """
    for value, there, what in ((among, BITS, "bits"), (blocks, BLOCK_SIZES, "block sizes")):
        if not value or set(value) - set(there):
            raise ValueError(f"{what} {list(value)}: use values of {', '.join(map(str, there))}")
    config, saved = open_run(run)
    if config.model.lora.on:
        raise ValueError(f"{run} trained adapters: use a run that trained whole weights")
    probes = [_codec("block", b, max(blocks), True, "fp32") for b in PROBES]
    offered = [
        _codec(name, b, n, symmetric, scale)
        for b, n, (name, symmetric), scale in product(among, blocks, LEVELS, ("fp32", "bf16"))
        if name == "block" or b in NORMAL_BITS
    ]
    wires = {codec: WireWeights(config, saved, codec) for codec in (*probes, *offered)}
    by_pattern: dict[str, list[str]] = {}
    for parameter in next(iter(wires.values())).quantized:
        by_pattern.setdefault(_pattern(parameter), []).append(parameter)
    sizes = {
        pattern: {codec: _nbytes(wires[codec], names) for codec in offered}
        for pattern, names in by_pattern.items()
    }
    numel = sum(math.prod(saved.shapes[n]) for names in by_pattern.values() for n in names)
    _check_budget(run, bits, numel, sizes)
    bench = Bench.of(run, tokens, device, None)
    model = bench.model(run, config, saved)
    params = dict(model.named_parameters())
    bench.fill(model, WireWeights(config, saved).source, config.seed)
    if broken := [n for n, p in params.items() if not p.isfinite().all()]:
        raise ValueError(f"{run}: {broken[0]} holds NaN or Inf; use a run that did not diverge")
    loss = bench.loss(model)
    classes = []
    for n, (pattern, names) in enumerate(by_pattern.items(), 1):
        print(f"class {n} of {len(by_pattern)}: {pattern}", file=sys.stderr, flush=True)
        masters = {n: params[n].detach().clone() for n in names}
        nmse, rises = {}, []
        for codec, wire in wires.items():
            rounded = {p: wire.decoded(p, bench.device) for p in names}
            wrong = {n: rounded[n].double() - x.double() for n, x in masters.items()}
            error = sum(float(x.square().sum()) for x in wrong.values())
            power = sum(float(x.double().square().sum()) for x in masters.values())
            nmse[codec] = error / power if power else 0.0
            if codec in probes:
                _load(params, rounded)
                rises.append(bench.loss(model) - loss)
        _load(params, masters)
        seen = sum(nmse[codec] for codec in probes)
        slope = max(0.0, sum(rises)) / seen if seen else 0.0
        choices = tuple(
            Choice(codec, sizes[pattern][codec], nmse[codec], slope * nmse[codec])
            for codec in offered
        )
        elements = sum(t.numel() for t in masters.values())
        classes.append(Class(pattern, tuple(names), elements, tuple(rises), slope, choices))
    classes = floored(classes)
    budget = int(bits * numel / 8)
    chosen = spend([c.choices for c in classes], budget)
    assert chosen is not None, "the smallest choices are within the budget"
    picked = {c.pattern: choice for c, choice in zip(classes, chosen, strict=True)}
    settings = _recipe(name, config, classes, picked)
    _check(load(RecipeConfig, settings), wires[offered[0]], classes, picked)
    alike = [tuple(options) for options in zip(*(c.choices for c in classes), strict=True)]
    within = [u for u in alike if sum(c.nbytes for c in u) <= budget]
    uniform = min(within, key=lambda u: sum(c.cost for c in u)) if within else None
    return Tuned(settings, picked, tuple(classes), budget, numel, uniform, loss, bench.count)


def _check_budget(
    run: Path, bits: float, numel: int, sizes: Mapping[str, Mapping[CodecConfig, int]]
) -> None:
    """ValueError, before anything is measured, where there is nothing to choose for, or where not
    even the smallest choices fit. sizes: bytes by class and codec."""
    if not sizes:
        raise ValueError(f"{run}: its recipe exempts all weights; use a run with fewer exemptions")
    least = sum(min(own.values()) for own in sizes.values())
    if least > int(bits * numel / 8):
        raise ValueError(
            f"--bits {bits:g}: too few; the smallest choices take {8 * least / numel:.2f} a "
            "weight, scales and padding included; raise --bits, or allow fewer bits (--among) or "
            "larger blocks (--blocks)"
        )


def spend(choices: Sequence[Sequence[Choice]], budget: int) -> list[Choice] | None:
    """Return one of each class's choices: those of least cost that take at most `budget` bytes
    together; of equal cost the smallest. None where not even the smallest fit."""
    spare = [min(c.nbytes for c in own) for own in choices]
    left = sum(spare)
    best: list[tuple[int, float, tuple[Choice, ...]]] = [(0, 0.0, ())]
    for own, least in zip(choices, spare, strict=True):
        left -= least  # what the classes after this one take at least
        more = [
            (used + c.nbytes, cost + c.cost, (*bundle, c))
            for used, cost, bundle in best
            for c in own
            if used + c.nbytes + left <= budget
        ]
        best, lowest = [], float("inf")
        for bundle in sorted(more, key=lambda m: m[:2]):
            if bundle[1] < lowest:  # dearer than all smaller ones: of no use
                best.append(bundle)
                lowest = bundle[1]
    return list(best[-1][2]) if best else None


def _codec(*settings: Any) -> CodecConfig:
    """Those of CHOSEN, all of them, so that a rule takes none of the recipe's own."""
    return load(CodecConfig, dict(zip(CHOSEN, settings, strict=True)))


def _pattern(parameter: str) -> str:
    """Of its class: numbers between dots are a layer's, others (fc1 and fc2) part of a name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", parameter)


def _load(params: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        params[name].copy_(value)


def _nbytes(wire: WireWeights, names: Sequence[str]) -> int:
    own = {n: wire.parameter(n) for n in names}
    each = (p.parts * wire.codecs[n].nbytes(p.shard_numel) for n, p in own.items())
    return wire.world * sum(each)


def _recipe(
    name: str, config: Config, classes: Sequence[Class], chosen: Mapping[str, Choice]
) -> dict[str, Any]:
    """Return the recipe's settings: the choice that most weights have for all, and a rule for each
    class with another one. What the run's recipe exempts, by rules too, stays exempt."""
    held: dict[CodecConfig, int] = {}
    for c in classes:
        codec = chosen[c.pattern].codec
        held[codec] = held.get(codec, 0) + c.numel
    common = max(held, key=lambda codec: held[codec])
    rules = [
        {"name": pattern, "wires": list(GATHERS), "set": _given(c.codec)}
        for pattern, c in chosen.items()
        if c.codec != common
    ]
    rules += [_exempting(r) for r in config.recipe.rules if r.exempt and r.holds_on(FORWARD)]
    settings: dict[str, Any] = {"name": name, "weights": _given(common)}
    exempt = config.recipe.exempt
    if exempt != type(exempt)():
        settings["exempt"] = {
            "max_ndim": exempt.max_ndim,
            "names": list(exempt.names),
            "below_numel": exempt.below_numel,
        }
    return settings | {"rules": rules}


def _exempting(rule: RuleConfig) -> dict[str, Any]:
    sizes = {"ndim": rule.ndim, "min_numel": rule.min_numel, "max_numel": rule.max_numel}
    given = {k: v for k, v in sizes.items() if v}
    return {"name": rule.name, "wires": list(GATHERS), **given, "exempt": True}


def _check(
    recipe: RecipeConfig,
    weights: WireWeights,
    classes: Sequence[Class],
    chosen: Mapping[str, Choice],
) -> None:
    """ValueError where a rule's pattern reaches into another class."""
    made = Recipe(recipe, weights.recipe.cluster)
    wanted: dict[str, CodecConfig | None] = dict.fromkeys(weights.shapes)
    for c in classes:
        wanted.update(dict.fromkeys(c.names, chosen[c.pattern].codec))
    for name in weights.shapes:
        codec = made.codec(FORWARD, weights.parameter(name))
        own = None
        if isinstance(codec, BlockCodec):
            named = "normal" if isinstance(codec, NormalCodec) else "block"
            own = _codec(named, *(getattr(codec, name) for name in CHOSEN[1:]))
        if own != wanted[name]:
            raise ValueError(
                f"{name} would match the rule of another class, since * in a rule's name also "
                "matches dots: write the recipe's rules by hand for such names"
            )


# ---------------------------------------------------------------------- what is written


def _given(codec: CodecConfig) -> dict[str, Any]:
    return {name: getattr(codec, name) for name in CHOSEN}


def floored(classes: list[Class]) -> list[Class]:
    """Let a class without a measured rise cost as much as the least sensitive other one."""
    least = min((c.slope for c in classes if c.slope), default=0.0)

    def least_of(c: Class) -> Class:
        choices = tuple(replace(choice, cost=least * choice.nmse) for choice in c.choices)
        return replace(c, slope=least, choices=choices)

    return [c if c.slope else least_of(c) for c in classes]


def summary(tuned: Tuned) -> str:
    """Return what was chosen for each class, and why, for a terminal."""
    heads = ["class", "chosen", "weights", "rise, 4 bits", "3 bits", "nats/NMSE", "share of cost"]
    rows = []
    for c in sorted(tuned.classes, key=lambda c: -c.slope):
        choice = tuned.chosen[c.pattern]
        share = choice.cost / tuned.cost if tuned.cost else 0.0
        numbers = [f"{c.numel:,}", *(f"{rise:+.5f}" for rise in c.rises), f"{c.slope:.4f}"]
        rows.append([c.pattern, choice.text, *numbers, f"{share:.0%}"])
    lines = [text_table(heads, rows, left=2), ""]
    lines.append(
        f"{tuned.bits:.3f} bits a weight, by losses on {tuned.tokens:,} held-out tokens (with "
        f"uncompressed weights: {tuned.loss:.5f})"
    )
    if tuned.unseen:
        lines.append(f"no measurable rise for {', '.join(tuned.unseen)}: measure on more --tokens")
    elif tuned.uniform is not None and tuned.ratio is not None:
        lines.append(
            f"expected gap: {tuned.ratio:.2f} × that of the best uniform recipe of as many bytes, "
            f"{tuned.uniform[0].text}; a study with both shows the gap"
        )
    return "\n".join(lines)


def tune_command(
    run: Path,
    bits: float,
    among: Sequence[int],
    blocks: Sequence[int],
    tokens: int | None,
    device: str,
    out: Path,
) -> int:
    """Run `zpp-lab tune`: print the choices and write the recipe."""
    if out.suffix != ".yaml":
        raise ValueError(f"--out {out}: use a file that ends with .yaml, as in conf/recipe")
    check_own("--out", out, _WRITTEN)
    folder, used = out.parent.resolve(), f"zpp_lab.shard(model, {str(out)!r})"
    if folder.name == "recipe":
        taken = conf_dir() / "recipe" / out.name
        if taken.is_file() and taken.resolve() != out.resolve():
            raise ValueError(
                f"--out {out}: recipe={out.stem} would mean the recipe of zpp_lab with that name; "
                "use another name"
            )
        found = any(folder.parent == one.resolve() for one in conf_dirs())
        own = "" if found or out.parts[:-2] == ("conf",) else f"--config-dir {out.parent.parent} "
        used = f"zpp-lab train {own}recipe={out.stem}, or {used}"
    tuned = tune(run, bits, out.stem, among, blocks, tokens, device)
    out.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Weights of {tuned.bits:.2f} bits on average, scales included, by class"
    text = yaml.safe_dump(tuned.settings, sort_keys=False, default_flow_style=None, width=100)
    write_atomic(out, f"{head}{_WRITTEN}{run}\n{text}")
    print(summary(tuned))
    print(f"written: {out}")
    print(f"to train with it: {used}")
    return 0
