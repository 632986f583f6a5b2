"""What `zpp-lab bench step` compares: arms, each a maker of training steps and its settings.

An arm is a word of `--recipes`, or `--arm "NAME: overrides"`:

    fsdp2          plain FSDP2 in a loop of its own, without anything of ours
    fsdp2+node     the same, resharded to the node after the forward: backward gathers in the node
    hsdp           the same on a mesh of two dimensions: sharded in the node, copies across nodes
    fsdp2+groups   the same as fsdp2, with a communicator of its own for gradients
    tp             torch's tensor and sequence parallelism, compiled, under FSDP2: of cluster.tp
    tp+async       the same with async TP: products of chunks while others travel
    compute        one rank's work without any communication: the floor of every arm whose ranks
                   have the whole model
    ...+graph      any of these with forward and backward in one CUDA graph, as our own arms have;
                   compute+graph is the floor of arms with a graph: what the kernels need
    RECIPE         a recipe of conf/recipe on engine=fsdp
    NAME: ...      any overrides of `zpp-lab train`; after one of the words above its own

`compared` adds plain FSDP2 in each way that differs on the cluster, and for each arm of engine=fsdp
with codecs its raw twin (`config.recipe.twin`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zpp_lab.config.compose import compose
from zpp_lab.config.recipe import twin
from zpp_lab.config.schema import ClusterConfig, Config

# By word: maker, the engine's name in the results, the recipe's there, its settings.
OWN = {
    "fsdp2": ("plain", "fsdp2", "zero3", []),
    "fsdp2+node": ("plain_node", "fsdp2", "zero3 + reshard to node", []),
    "hsdp": ("plain_hsdp", "fsdp2", "zero3 + copies across nodes", ["recipe.shard=node"]),
    "fsdp2+groups": ("plain_groups", "fsdp2", "zero3 + separate groups", []),
    "tp": ("plain_tp", "fsdp2", "zero3 + tensor parallel", ["engine.compile=true"]),
    "tp+async": ("plain_async_tp", "fsdp2", "zero3 + async TP", ["engine.compile=true"]),
    "compute": ("compute", "none", "compute only", []),
}
TP = "tp", "tp+async"
COMPUTE, KERNELS = FLOORS = "compute", "compute+graph"
GRAPH = "+graph"
OWN |= {
    word + GRAPH: (maker, engine, f"{recipe} + CUDA graph", [*more, "engine.graph=true"])
    for word, (maker, engine, recipe, more) in OWN.items()
}
PLAIN = "fsdp2"  # the engine of arms with nothing of this package around them
DEFAULTS = [
    "engine=fsdp",
    "engine.deterministic=false",
    "train.param_dtype=bf16",
    "train.reduce_dtype=bf16",
]


@dataclass(frozen=True)
class Arm:
    """maker: a function of `step_engines`. session: arms of one are timed in turns by the same
    processes; engines that are not ours get processes of their own. twin: the name of its raw twin;
    "" where it has no codec, or none was asked for."""

    name: str
    maker: str
    engine: str
    recipe: str
    session: str
    config: Config
    twin: str = ""


def arms(words: Sequence[str], overrides: Sequence[str]) -> list[Arm]:
    """Return the arms that `words` name, under the overrides. ValueError names what is wrong."""
    found = [_arm(word, overrides) for word in words]
    for arm in found:
        if arm.config.cluster.split:
            _check_model(arm)
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"bench step: arm named twice: {', '.join(twice)}")
    if not found:
        raise ValueError("bench step: no arms; give --recipes or --arm")
    return found


def _arm(word: str, overrides: Sequence[str]) -> Arm:
    name, colon, own = word.partition(":")
    if not colon and ("=" in word or " " in word):
        raise ValueError(f"bench step: arm {word!r} has no colon: use NAME: SETTINGS")
    settings = shlex.split(own) if colon else [word if word in OWN else f"recipe={word}"]
    if settings and settings[0] in OWN:
        maker, engine, recipe, more = OWN[settings[0]]
        config = compose(merged(DEFAULTS, overrides, ["recipe=zero3"], more, settings[1:]))
        _check_split(name, settings[0], config.cluster)
        return Arm(name.strip(), maker, engine, recipe, "ours", config)
    config = compose(merged(DEFAULTS, overrides, settings))
    engine = config.engine.name
    if engine == "virtual":
        raise ValueError(f"arm {name}: engine=virtual cannot be timed; use engine=fsdp")
    if config.recipe.phases:
        raise ValueError(
            f"arm {name}: each phase has a step of its own: time one of them, with its settings "
            "and recipe.phases=[]"
        )
    ours = engine == "fsdp"
    maker, session = ("quick", "ours") if ours else ("built", name)
    return Arm(name.strip(), maker, engine, config.recipe.name, session, config)


def _check_split(name: str, word: str, cluster: ClusterConfig) -> None:
    """ValueError where a plain loop does not split the model as the cluster does."""
    parted = word.removesuffix(GRAPH) in TP
    if parted and (cluster.tp == 1 or cluster.pp > 1):
        raise ValueError(
            f"arm {name}: {word} is for tensor parts alone, not cluster.tp={cluster.tp} "
            f"cluster.pp={cluster.pp}: set cluster.tp, and cluster.pp=1"
        )
    if not parted and cluster.split:
        raise ValueError(
            f"arm {name}: {word} does not split the model, but {cluster.split}: use tp, or add "
            f"cluster.tp=1 cluster.pp=1 as --arm '{word}: {word} cluster.tp=1 cluster.pp=1'"
        )


def _check_model(arm: Arm) -> None:
    """ValueError where the arm's model has no such parts or stages: before any rank starts."""
    from zpp_lab.engines.build import model_of
    from zpp_lab.tools.bench.step.engines import vocabulary

    config = replace(arm.config, engine=replace(arm.config.engine, compile=False))
    try:
        model_of(config, vocabulary(config), "meta", 0)
    except ValueError as error:
        raise ValueError(f"arm {arm.name}: {error}") from None


def compared(every: Sequence[Arm], overrides: Sequence[str]) -> list[Arm]:
    """Return the arms with what they are compared with, each once: plain FSDP2 first, and a raw
    twin before the first arm that it belongs to."""
    if not every:
        return []
    there = {(arm.maker, arm.config.engine.graph is True) for arm in every}
    cluster = every[0].config.cluster
    words = plain_words(cluster, gpus=every[0].config.engine.device != "cpu")
    # FSDP2's users can have a graph, too: of the way that was fastest with one, and which that is
    # of torch's tensor parallelism depends on how many tokens a GPU has
    if _graphs(every):
        fast = words if cluster.tp > 1 else words[:2][-1:]
        words += [word + GRAPH for word in fast]
    plain = [w for w in words if (OWN[w][0], w.endswith(GRAPH)) not in there]
    found = [*arms(plain, overrides)] if plain else []
    usual = compose(merged(DEFAULTS, overrides, ["recipe=zero3"]))
    for arm in every:
        if config := _twin(arm):
            same = [a for a in (*every, *found) if _same(a, config)]
            taken = {a.name for a in (*every, *found)}
            raw = same[0] if same else _raw(arm, config, usual, taken)
            if not same:
                found.append(raw)
            arm = replace(arm, twin=raw.name)
        found.append(arm)
    first = [arm for arm in found if arm.engine == PLAIN]  # so that no budget ends before them
    return [*first, *(arm for arm in found if arm.engine != PLAIN)]


def paired(every: Sequence[Arm]) -> list[Arm]:
    """Return the arms alone, each with its raw twin's name where that is one of them."""
    found = []
    for arm in every:
        config = _twin(arm)
        names = [a.name for a in every if config and _same(a, config)]
        found.append(replace(arm, twin=names[0] if names else ""))
    return found


def _twin(arm: Arm) -> Config | None:
    """The settings of the arm's raw twin; None where it has none."""
    if arm.maker != "quick" or not arm.config.recipe.coded:
        return None
    return replace(arm.config, recipe=twin(arm.config.recipe))


def _graphs(every: Sequence[Arm]) -> bool:
    """Whether arms of this package may replay CUDA graphs."""
    return any(
        arm.maker == "quick" and arm.config.engine.graph and arm.config.engine.device != "cpu"
        for arm in every
    )


def plain_words(cluster: ClusterConfig, gpus: bool = True) -> list[str]:
    """Return the ways of plain FSDP2 that differ on a cluster. Inside one node weights resharded to
    the node and copies across nodes are both what `fsdp2` does. Where a node has one GPU
    `fsdp2+node` differs from it: weights stay whole until backward is done. With tensor parts there
    are torch's own, on GPUs overlapped too; with stages none, as 1f1b is torch's schedule."""
    if cluster.pp > 1:
        return []
    if cluster.tp > 1:
        return [*TP] if gpus else ["tp"]
    if cluster.nodes == 1:
        return ["fsdp2"]
    return ["fsdp2", "fsdp2+node", "hsdp"]


def _same(arm: Arm, config: Config) -> bool:
    """Whether an arm of this package's engine trains as `config` does; recipe names may differ."""
    named = replace(config, recipe=replace(config.recipe, name=arm.config.recipe.name))
    return arm.maker == "quick" and arm.config == named


def _raw(arm: Arm, config: Config, usual: Config, taken: set[str]) -> Arm:
    """The twin as an arm, with its name in conf/recipe where all other settings are usual."""
    from zpp_lab.tools.plan.search.space import named

    known = named(config.recipe)
    alike = replace(config, recipe=usual.recipe) == usual
    own = known is not config.recipe and alike and known.name not in taken
    name = known.name if own else f"{arm.name}_raw"
    if name in taken:
        raise ValueError(f"bench step: arm {name} is not the raw twin of {arm.name}: rename it")
    recipe = replace(config.recipe, name=name)
    return replace(arm, name=name, recipe=name, config=replace(config, recipe=recipe))


def merged(*groups: Sequence[str]) -> list[str]:
    """Return all overrides; of two with one key the later one stays."""
    last = {word.partition("=")[0]: word for group in groups for word in group}
    return list(last.values())


def sessions(every: Sequence[Arm]) -> list[list[Arm]]:
    """Return arms by session, in their order."""
    names = dict.fromkeys(arm.session for arm in every)
    return [[arm for arm in every if arm.session == name] for name in names]


def with_compute(every: Sequence[Arm]) -> list[Arm]:
    """Return the arms, and first of all their floors, of the settings of the first arm; none where
    a rank has a part of the model alone."""
    rest = [arm for arm in every if arm.name not in FLOORS]
    if not rest or rest[0].config.cluster.split:
        return list(every)
    floors = []
    for name in FLOORS if _graphs(rest) else [COMPUTE]:
        maker, engine, recipe, _ = OWN[name]
        config = rest[0].config
        config = replace(config, engine=replace(config.engine, graph=name == KERNELS))
        made = replace(rest[0], name=name, maker=maker, engine=engine, recipe=recipe, twin="")
        floors.append(replace(made, config=config, session="ours"))
    return [*floors, *rest]
