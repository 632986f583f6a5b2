"""The studies of conf/study: what each must have, and that its first arms can be built."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from zpp_lab.config.compose import compose, load_study, study_names
from zpp_lab.config.flat import flat_config
from zpp_lab.config.recipe import POINTS
from zpp_lab.config.schema import Config
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.config.wires import WIRES
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.study.run.plan import Planner, differences

NAMES = study_names()
Arms = Callable[[str], list[ArmConfig]]


@cache
def study_of(name: str) -> StudyConfig:
    return load_study(name)


@cache
def config_of(name: str, arm: str) -> Config:
    study = study_of(name)
    overrides = next(a.overrides for a in study.arms if a.name == arm)
    return compose([*study.overrides, *overrides, "seed=1"])


def base_of(name: str, arm: ArmConfig) -> Config:
    return config_of(name, arm.against or study_of(name).baseline)


def some_arms(name: str) -> list[ArmConfig]:
    """One of each role: composing all of them takes half a minute."""
    return list({arm.role: arm for arm in reversed(study_of(name).arms)}.values())


def all_arms(name: str) -> list[ArmConfig]:
    return study_of(name).arms


def tokens_of(config: Config) -> int:
    step = config.cluster.readers * config.train.batch_size * config.train.micro_steps
    return step * config.data.seq_len * config.train.steps


TWIN = re.compile(r"_(x2|quiet|older)\b")  # another size of a study
# another size, length or text
SISTER = re.compile(r"_(?!10m)(x2|older|\w*\d+[mb]|\d{4}|reread|prose|more|quiet|tiny|first|calm)$")
MOST = [name for name in NAMES if not SISTER.search(name)]
REST = [(name, some_arms if TWIN.search(name) else all_arms) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_a_question_a_baseline_and_controls(name: str) -> None:
    study = study_of(name)
    roles = [arm.role for arm in study.arms]
    assert study.name == name
    assert study.question.endswith("?")
    assert {"baseline", "order_control", "negative_control"} <= set(roles)
    assert all(arm.describe for arm in study.arms)
    assert next(a for a in study.arms if a.name == study.baseline).role == "baseline"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_study_can_be_rehearsed(name: str, tmp_path: Path) -> None:
    mini, baseline = study_of(f"{name}_mini"), study_of(name).baseline
    Planner(mini, tmp_path, compose)  # all arms compose, and differ
    assert [arm.name for arm in mini.arms] == [arm.name for arm in study_of(name).arms]
    assert mini.branch is None or mini.branch.steps == 8
    for arm in some_arms(mini.name):
        config = config_of(mini.name, arm.name)
        assert (config.engine.device, config.data.seq_len) == ("cpu", 64)
        assert config.model.layers == 2 or name == "scale"  # whose arms are sizes
        assert config.train.micro_steps == 1 or arm.name != baseline or config.task == "rl"
        assert 8 <= config.train.steps <= 128
        assert (config.train.warmup_steps, config.train.eval_every) == (5, 4)


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        *(("tokens_tiny", 128), ("nudged", 8)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("token_curve", 64), ("scale", 8))
        ),
    ],
)
def test_arms_with_steps_of_their_own_are_rehearsed_in_proportion(
    name: str, longest: int, tmp_path: Path
) -> None:
    mini = study_of(f"{name}_mini")
    steps = [config_of(mini.name, arm.name).train.steps for arm in mini.arms]
    assert (min(steps), max(steps)) == (8, longest)
    Planner(mini, tmp_path, compose)
    if name == "tokens_tiny":
        assert steps == [8 * int(arm.name.rpartition("_")[2]) // 200 for arm in mini.arms]


@pytest.mark.parametrize(
    ("name", "arms"),
    [
        *((name, some_arms) for name in MOST),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_an_arm_is_its_baseline_but_for_the_recipe(name: str, arms: Arms) -> None:
    """In its settings; its factors are what the config says; and it sends less, raw partitions
    between nodes."""
    for arm in arms(name):
        config, base = config_of(name, arm.name), base_of(name, arm)
        settings = flat_config(config)
        assert all(settings[key] == level for key, level in arm.factors.items() if "." in key)
        if arm.role == "baseline":
            continue
        changed = differences(base, config)
        assert set(changed) - {"recipe.name"}
        peer = config.engine.name == "deepspeed"
        free = ("engine.", "train.param_dtype", "train.reduce_dtype") if peer else ()
        free += ("recipe.", "rl.correction")
        reordered = arm.role in ("order_control", "baseline_repeat")
        if reordered:  # gradients in two sums are as many, and so are a model's in one part
            free += ("train.batch_size", "train.micro_steps", "cluster.gpus_per_node", "cluster.tp")
            assert tokens_of(config) == tokens_of(base)
        assert all(key.startswith(free) for key in changed), (arm.name, changed)
        if peer or config.model.layers > 6 or config.cluster.world > 64:
            continue  # DeepSpeed follows no plan of ours; large ones are slow to lay out
        cut = config.recipe.parts, config.recipe.hops
        raw = cut != (base.recipe.parts, base.recipe.hops) and not reordered
        raw &= all(config.recipe.wire(wire).raw for wire in WIRES)
        sent, whole = (bytes_of(each, raw, not reordered) for each in (config, base))
        rounds = config.train.micro_steps // base.train.micro_steps
        if arm.role == "sham_control":  # saves no bits
            assert sent <= whole
        else:
            once = acts_of(base) if reordered else 0  # activations of as many tokens
            again = 0 if config.cluster.tp < base.cluster.tp else (whole - once) * rounds + once
            assert sent == again if reordered else sent < whole


def test_partitions_has_every_point_of_the_grid() -> None:
    arms = all_arms("partitions")
    assert {config_of("partitions", arm.name).recipe.parts for arm in arms} == set(POINTS)


def bytes_of(config: Config, between: bool, rolled: bool) -> int:
    """Of the plan, or of it between nodes; the meta device holds no weights."""
    plan = build_plan(build_model(config.model, 256, device="meta"), config)
    sent = [*plan.step_bytes().values()]
    if plan.rollouts and rolled:
        sent += plan.rollout_bytes(None).values()
    return sum(t.inter if between else sum(t) for t in sent)


def acts_of(config: Config) -> int:
    plan = build_plan(build_model(config.model, 256, device="meta"), config)
    wires = plan.step_bytes().items()
    return sum(sum(traffic) for wire, traffic in wires if WIRES[wire].carries == "activations")
