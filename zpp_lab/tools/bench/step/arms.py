"""What `zpp-lab bench step` compares: arms, each a maker of training steps and its settings.

An arm is a word of `--recipes`, or `--arm "NAME: overrides"`:

    fsdp2          plain FSDP2 in a loop of its own, without anything of ours
    fsdp2+node     the same, resharded to the node after the forward: backward gathers in the node
    fsdp2+groups   the same as fsdp2, with a communicator of its own for gradients
    compute        one rank's work without any communication: the floor of every arm
    RECIPE         a recipe of conf/recipe on engine=fsdp
    NAME: ...      any overrides of `zpp-lab train`, such as `ds: engine=deepspeed recipe=zeropp`;
                   behind one of the first four words its own: `kept: fsdp2 model.loss_chunk=0`

An engine of this package is timed through `engines.build.build_engine`; to time something else,
add a maker to `tools/bench/step/engines.py` and its word here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config

# By word: maker, the engine's name in the results, the recipe's there.
OWN = {
    "fsdp2": ("plain", "fsdp2", "zero3"),
    "fsdp2+node": ("plain_node", "fsdp2", "zero3 + reshard to node"),
    "fsdp2+groups": ("plain_groups", "fsdp2", "zero3 + separate groups"),
    "compute": ("compute", "none", "compute only"),
}
COMPUTE = "compute"
DEFAULTS = [
    "engine=fsdp",
    "engine.deterministic=false",
    "train.param_dtype=bf16",
    "train.reduce_dtype=bf16",
]


@dataclass(frozen=True)
class Arm:
    """maker: a function of `step_engines`. session: arms of one are timed in turns by the same
    processes; engines that are not ours get processes of their own."""

    name: str
    maker: str
    engine: str
    recipe: str
    session: str
    config: Config


def arms(words: Sequence[str], overrides: Sequence[str]) -> list[Arm]:
    """The arms that `words` name, under the overrides. ValueError names what is wrong."""
    found = [_arm(word, overrides) for word in words]
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"bench step: arm named twice: {', '.join(twice)}")
    if not found:
        raise ValueError("bench step: name arms with --recipes or --arm")
    return found


def _arm(word: str, overrides: Sequence[str]) -> Arm:
    name, colon, own = word.partition(":")
    if not colon and ("=" in word or " " in word):
        raise ValueError(f"bench step: arm {word!r} has no colon: write NAME: SETTINGS")
    settings = shlex.split(own) if colon else [word if word in OWN else f"recipe={word}"]
    if settings and settings[0] in OWN:
        maker, engine, recipe = OWN[settings[0]]
        config = compose(merged(DEFAULTS, overrides, ["recipe=zero3"], settings[1:]))
        return Arm(name.strip(), maker, engine, recipe, "ours", config)
    config = compose(merged(DEFAULTS, overrides, settings))
    engine = config.engine.name
    if engine == "virtual":
        raise ValueError(f"arm {name}: engine=virtual has no time of its own; use engine=fsdp")
    if config.recipe.phases:
        raise ValueError(
            f"arm {name}: each phase has a step of its own: time one of them, with its settings "
            "and recipe.phases=[]"
        )
    ours = engine == "fsdp"
    maker, session = ("quick", "ours") if ours else ("built", name)
    return Arm(name.strip(), maker, engine, config.recipe.name, session, config)


def merged(*groups: Sequence[str]) -> list[str]:
    """All overrides; of two with one key the later one stays."""
    last = {word.partition("=")[0]: word for group in groups for word in group}
    return list(last.values())


def sessions(every: Sequence[Arm]) -> list[list[Arm]]:
    """Arms by session, in their order."""
    names = dict.fromkeys(arm.session for arm in every)
    return [[arm for arm in every if arm.session == name] for name in names]


def with_compute(every: Sequence[Arm]) -> list[Arm]:
    """The arms, and first of all `compute`, of the settings of the first arm."""
    rest = [arm for arm in every if arm.name != COMPUTE]
    if not rest:
        return list(every)
    maker, engine, recipe = OWN[COMPUTE]
    first = replace(rest[0], name=COMPUTE, maker=maker, engine=engine, recipe=recipe)
    return [replace(first, session="ours"), *rest]
