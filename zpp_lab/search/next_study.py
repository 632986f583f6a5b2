"""The study that would say whether faster plans keep the loss: a finished one with new arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from zpp_lab.collectives.recipe import Recipe
from zpp_lab.compose import compose
from zpp_lab.config import ArmConfig, ClusterConfig, Config, StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.runconfig import differing, flat_config
from zpp_lab.search.fastest import Answer, Timed
from zpp_lab.search.limits import LossLimit
from zpp_lab.search.overrides import recipe_overrides, written

CONTROLS = ("order_control", "negative_control")


def tempting(answer: Answer) -> list[Timed]:
    """Faster than the chosen plan and measured by no arm, each recipe once."""
    found = [*([answer.promising] if answer.promising else []), *answer.unmeasured]
    return list({id(t.option.candidate.recipe): t for t in found}.values())


def next_study(limit: LossLimit, plans: Sequence[Timed], cluster: ClusterConfig) -> StudyConfig:
    """The same seeds, data and training as `limit`'s study, its baseline and controls, and an arm
    for each of `plans`, judged with the limit as margin."""
    study = limit.study
    base = next(m for m in limit.measured if m.arm.name == study.baseline)
    overrides = list(study.overrides) or _overrides(base.config)
    if _fewer_hops(base.config, cluster):
        overrides += [f"cluster.nodes={cluster.nodes}"]
        overrides += [f"cluster.gpus_per_node={cluster.gpus_per_node}"]
    kept = [
        replace(arm, factors={}, overrides=arm.overrides or recipe_overrides(base.config.recipe))
        for arm in study.arms
        if arm.name == study.baseline or (arm.role in CONTROLS and arm.against is None)
    ]
    return StudyConfig(
        name=f"{study.name}_next",
        question=f"Are faster recipes within {limit.share:.2%} of the loss of {study.baseline}?",
        arms=[*kept, *(_arm(plan, {arm.name for arm in kept}) for plan in plans)],
        seeds=study.seeds,
        overrides=overrides,
        prepare=study.prepare,
        baseline=study.baseline,
        margin=limit.share,
        confidence=study.confidence,
        jobs=study.jobs,
        runs_per_gpu=study.runs_per_gpu,
        max_seeds=study.max_seeds,
        seeds_per_look=study.seeds_per_look,
    )


def write_next_study(path: Path, study: StudyConfig) -> None:
    """As a file that `zpp-lab study` takes. ValueError for a name that it would not take."""
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--next-study {path}: give a file that ends in .yaml")
    text = yaml.safe_dump(asdict(study), sort_keys=False, allow_unicode=True)  # type: ignore[call-overload]
    write_atomic(path, text)


def _arm(plan: Timed, taken: set[str]) -> ArmConfig:
    candidate = plan.option.candidate
    state = candidate.knobs.optimizer_state
    overrides = recipe_overrides(candidate.recipe)
    name = candidate.recipe.name
    if state != "fp32":
        name, overrides = f"{name}_{state}", [*overrides, f"train.optimizer_state={state}"]
    return ArmConfig(f"{name}_new" if name in taken else name, overrides)


def _overrides(config: Config) -> list[str]:
    """Of plain runs, which have no study: what differs from the defaults, the recipe apart."""
    usual, own = flat_config(compose([])), flat_config(config)
    changed = [k for k in differing(usual, own) if not k.startswith(("recipe.", "seed"))]
    return [f"{key}={written(own.get(key))}" for key in changed]


def _fewer_hops(config: Config, cluster: ClusterConfig) -> bool:
    """Whether gradients cross fewer hops on the study's cluster than on the planned one."""
    two = replace(config.recipe, hops=2, shard="world")
    return len(Recipe(two, config.cluster).hops) < len(Recipe(two, cluster).hops)
