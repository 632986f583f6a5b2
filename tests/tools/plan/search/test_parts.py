"""Figures by parts equal those of whole plans, whatever the plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zpp_lab.config.schema import Config
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.tools.plan.cost.machine import Bus, load_machine
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.tools.plan.search.fastest import Parts
from zpp_lab.tools.plan.search.space import Candidate, Space
from zpp_lab.train.memory.buffers import MOMENTS
from zpp_lab.train.memory.estimate import estimate

from .problems import base

MACHINE = replace(load_machine("h200"), bus=Bus(50e9, 50e9, 90e9, 0.5))
SHAPES = [
    ("cluster=1x4",),
    ("cluster=2x2", "train.micro_steps=2"),
    ("cluster=2x4", "engine.ordered=true", "model.tied_head=true"),
    ("cluster=2x2", "engine.place=host", "train.masters=split"),
]


def memory(config: Config) -> tuple[float, ...]:
    found = estimate(plan_of(config), config, vocabulary(config))
    return found.host, *(found.at(moment) for moment in MOMENTS)


def busy(config: Config) -> tuple[float, ...]:
    time = predict(config, MACHINE, 25.0)
    return time.step_s - time.exposed_s, time.host_s, time.intra_s, time.inter_s


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up(shape: tuple[str, ...]) -> None:
    settings = base(*shape)
    space = Space(settings, studied=True)
    draw = random.Random(7)
    recipes, knobs = space.recipes(), space.knobs()
    by_memory, by_time = Parts(settings, memory), Parts(settings, busy)
    for recipe in [*recipes[:1], *draw.sample(recipes, 6)]:
        one = Candidate(recipe, draw.choice(knobs))
        assert by_memory.of(one) == memory(one.config(settings)), one
        assert by_time.of(one) == pytest.approx(busy(one.config(settings)), rel=1e-9), one
