"""The wires: every place where training moves data between ranks, and what holds on each.

Code asks this table what a wire carries, where and when; only what is one wire's own names it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zpp_lab.files import percents

Wire = Literal[
    "weights_forward",
    "weights_backward",
    "grads_intra",
    "grads_inter",
    "weights_update",
    "acts_forward",
    "acts_backward",
    "acts_pipe",
    "weights_rollout",
    "tp_raw",
]
Short = Literal["weights", "grads", "acts"]
SHORTS: tuple[Short, ...] = ("weights", "grads", "acts")

FORWARD: Wire = "weights_forward"
BACKWARD: Wire = "weights_backward"
INTRA: Wire = "grads_intra"
INTER: Wire = "grads_inter"
UPDATE: Wire = "weights_update"
ACTS_FORWARD: Wire = "acts_forward"
ACTS_BACKWARD: Wire = "acts_backward"
ACTS_PIPE: Wire = "acts_pipe"
ROLLOUT: Wire = "weights_rollout"
TP_RAW: Wire = "tp_raw"


@dataclass(frozen=True)
class WireSpec:
    """What holds on one wire.

    number: of its rounding noise; bits depend on it, so it never changes. short: the setting of a
    recipe from which the wire's own settings start. dtype: of raw transfers, train.param_dtype,
    train.reduce_dtype or fp32. gather: every rank gets all rows; hop: each rank sums what it
    receives; exchange: ranks of equal place swap rows; parts: tensor parts gather and sum; pipe:
    a stage sends to its neighbours. codecs: dense ones send every element, and `differences` also
    sparse ones where the wire carries differences; with `none` a recipe has no setting of the
    wire's name. tag: under which wandb shows its bits. needs: the property of `RecipeConfig`
    without which the wire does not exist; "": every recipe has it. brought_by: settings of which
    each alone may bring it.
    """

    number: int
    carries: Literal["weights", "gradients", "activations"]
    dtype: Literal["param", "reduce", "fp32"]
    pattern: Literal["gather", "hop", "exchange", "parts", "pipe"]
    tag: str
    short: Short | None = None
    codecs: Literal["none", "dense", "differences", "all"] = "none"
    residual: bool = False  # whether encoders may remember what was lost
    least_bits: int = 16  # that a search allows without a study
    needs: str = ""
    brought_by: tuple[str, ...] = ()


WIRES: dict[Wire, WireSpec] = {  # least bits are those of ZeRO++ as published
    FORWARD: WireSpec(0, "weights", "param", "gather", "weights", "weights", "dense", least_bits=8),
    BACKWARD: WireSpec(
        1, "weights", "param", "gather", "weights", "weights", "dense", least_bits=8
    ),
    INTRA: WireSpec(2, "gradients", "reduce", "hop", "grads", "grads", "all", True, least_bits=4),
    INTER: WireSpec(3, "gradients", "reduce", "hop", "grads", "grads", "all", True, least_bits=4),
    UPDATE: WireSpec(
        4,
        "weights",
        "param",
        "exchange",
        "update",
        "weights",
        "differences",
        least_bits=8,
        needs="kept",
        brought_by=("recipe.sharding.weights=node", "recipe.sharding.update=differences"),
    ),
    ACTS_FORWARD: WireSpec(
        5,
        "activations",
        "param",
        "parts",
        "acts",
        "acts",
        "dense",
        needs="acting",
        brought_by=("recipe.acts.bits=8", "recipe.acts_forward.bits=8"),
    ),
    ACTS_BACKWARD: WireSpec(
        6,
        "activations",
        "param",
        "parts",
        "acts",
        "acts",
        "dense",
        needs="acting",
        brought_by=("recipe.acts.bits=8", "recipe.acts_backward.bits=8"),
    ),
    ACTS_PIPE: WireSpec(  # activations to the next stage, their gradients back
        7,
        "activations",
        "param",
        "pipe",
        "acts",
        "acts",
        "dense",
        needs="piping",
        brought_by=("recipe.acts.bits=8", "recipe.acts_pipe.bits=8"),
    ),
    ROLLOUT: WireSpec(  # on demand: for generation, before a step; no codec unless it is given one
        8,
        "weights",
        "param",
        "gather",
        "rollout",
        codecs="dense",
        least_bits=8,
        needs="rolls",
        brought_by=("recipe.weights_rollout.bits=4",),
    ),
    TP_RAW: WireSpec(  # the loss over a vocabulary in parts, sums of gradients that parts share
        12,
        "activations",
        "fp32",
        "parts",
        "acts",
        needs="acting",
        brought_by=("recipe.acts.bits=8",),
    ),
}
GATHERS: tuple[Wire, ...] = tuple(  # of every step
    w for w, spec in WIRES.items() if spec.pattern == "gather" and not spec.needs
)


def wires_among(named: Iterable[Container[str]] = ()) -> tuple[Wire, ...]:
    """Return the wires that every recipe has, and those that any of `named` contains."""
    every = list(named)
    return tuple(w for w, s in WIRES.items() if not s.needs or any(w in one for one in every))


def kinds_among(named: Iterable[Container[str]]) -> tuple[str, ...]:
    """Return what codecs may make smaller: weights, gradients, and activations where any of
    `named` has a wire of them."""
    acts = [w for w, s in WIRES.items() if s.carries == "activations" and s.codecs != "none"]
    any_acts = any(wire in one for one in named for wire in acts)
    return ("weights", "gradients", "activations") if any_acts else ("weights", "gradients")


def shares(quantized: Mapping[Any, float], kinds: Iterable[str] | None = None) -> dict[str, str]:
    """Format the quantized part of each wire's bytes (0 to 1, by wire), by kind (None: those that
    are there), such as "98.8%", or "99.1/0%" where a kind's wires differ."""
    return {
        kind: percents(
            [
                value
                for wire, value in quantized.items()
                if WIRES[wire].carries == kind and WIRES[wire].codecs != "none"
            ]
        )
        for kind in kinds or kinds_among([quantized])
    }
