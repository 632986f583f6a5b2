"""The law of what bits cost: found again in made cells, and told for recipes that never ran."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.experiments.scripts import loaded
from zpp_lab.codecs import BlockCodec, TopKCodec
from zpp_lab.config.compose import compose
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.tools.plan import law
from zpp_lab.tools.plan.planner import plan_command

fit_law = loaded("experiments/reference/fit_law.py")
TRUE = dict(zip(law.NAMES, (-0.5, 0.8, -2.5, 1.1, 1.2, 0.15, -0.25, 0.5, 0.6), strict=True))


def made(
    errors: law.Errors, parameters: float, tokens: float, steps: float, noise: float = 0.0
) -> law.Cell:
    tokens_read = tokens / law.TOKENS
    gap = math.exp(TRUE["ag"]) * errors.grads ** TRUE["pg"] * tokens_read ** TRUE["beta_g"]
    gap *= (steps / law.STEPS) ** (TRUE["gamma"] * errors.unrotated)
    weights = math.exp(TRUE["aw"] + TRUE["s"] * errors.stochastic) * errors.weights ** TRUE["pw"]
    gap += weights * tokens_read ** TRUE["beta_w"]
    gap *= (parameters / law.PARAMETERS) ** TRUE["alpha"]
    return law.Cell("", errors, parameters, tokens, steps, gap * (1 + 0.03 * noise), 2e-4)


@cache
def fitted(seed: int) -> law.Law:
    found: law.Law = fit_law.fit(grid(seed))
    return found


def grid(seed: int = 0) -> list[law.Cell]:
    draw = np.random.default_rng(seed)
    errors = [law.Errors(w, 0.0) for w in (1e-3, 1e-2, 0.1, 0.6)]
    errors += [law.Errors(0.0, g) for g in (0.02, 0.06, 0.3)]
    errors += [law.Errors(0.0, g, unrotated=1.0) for g in (0.06, 0.3)]
    errors += [law.Errors(0.05, 0.05), law.Errors(0.02, 0.0, 1.0)]
    runs = [(3e6, 5e7, 1500), (1e7, 1.2e7, 375), (1e7, 5e7, 1500), (3e7, 5e7, 1500)]
    runs += [(1e7, 5e7, 6000)]
    return [made(e, *run, draw.standard_normal()) for e in errors for run in runs]


SEEDS = pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])


@SEEDS
def test_fits_find_the_law_that_made_the_cells(seeds: int) -> None:
    """Within two of the errors that they claim, in about as many values as normal ones."""
    near = []
    for seed in range(seeds):
        found = fitted(seed)
        errors = np.sqrt(np.diag(found.covariance))
        off = np.array(found.values) - np.array([TRUE[name] for name in law.NAMES])
        near += list(np.abs(off) < 2 * errors)
        assert 0.015 < found.misfit < 0.06
    assert sum(near) / len(near) > 0.88


@SEEDS
def test_intervals_hold_cells_that_were_not_fitted(seeds: int) -> None:
    """Of fresh cells, larger than all that were fitted, at least the share that is claimed less
    what chance takes: a hundred cells a fit."""
    inside = total = 0
    for seed in range(seeds):
        found, draw = fitted(seed), np.random.default_rng(1000 + seed)
        for _ in range(100):
            errors = law.Errors(10 ** draw.uniform(-2.5, -0.3), 10 ** draw.uniform(-1.6, -0.6))
            cell = made(errors, 1.3e8, 5e7, 1500, draw.standard_normal())
            told = found.predict(errors, cell.parameters, cell.tokens, cell.steps)
            inside += told.low <= cell.gap <= told.high
            total += 1
            assert told.beyond == ("parameters 1.3e+08, fitted 3e+06 to 3e+07",)
    assert inside / total > law.CONFIDENCE - 0.06


def test_a_prediction_for_tokens_beyond_those_fitted_is_wider() -> None:
    """On both sides, by more the further they lie; the middle value is the law's."""
    found, weights = fitted(0), law.Errors(0.1, 0.0)

    def factor(tokens: float) -> float:
        told = found.predict(weights, 1e7, tokens, 1500)
        assert told.low < told.gap < told.high
        return told.high / told.gap

    assert factor(1.2e7) < 1.3
    assert factor(5e7) < 1.3
    assert 1.8 < factor(2e8) < factor(2e9)
    assert factor(3e6) > 1.8


def test_steps_raise_the_gaps_of_gradients_that_are_not_rotated() -> None:
    """Beyond the steps that were fitted predictions are wider, and say so."""
    found = fitted(0)
    plain, rotated = law.Errors(0.0, 0.06, unrotated=1.0), law.Errors(0.0, 0.06)

    def gap(errors: law.Errors, steps: int) -> float:
        return found.predict(errors, 1e7, 5e7, steps).gap

    assert gap(plain, 6000) > 1.5 * gap(plain, 1500)
    assert gap(rotated, 6000) == gap(rotated, 1500) == pytest.approx(gap(plain, 1500))
    near, far = (found.predict(plain, 1e7, 5e7, steps) for steps in (6000, 60000))
    assert far.high / far.gap > near.high / near.gap
    assert not any("steps" in text for text in near.beyond)
    assert any("steps" in text for text in far.beyond)


def test_too_few_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 or more"):
        fit_law.fit(grid()[:3])


def errors(*overrides: str) -> law.Errors:
    config = compose(["model=tiny", "cluster=2x2", *overrides])
    return law.Errors.of(build_plan(build_model(config.model, 256, "meta"), config))


def test_a_recipes_errors_are_those_of_its_codecs() -> None:
    assert errors("recipe=zero3") == law.Errors(0.0, 0.0)
    w4 = errors("recipe=w4", "recipe.weights.block_size=256")
    whole = law.nmse(BlockCodec(bits=4, block_size=256), False)
    assert 0.95 * whole < w4.weights <= whole  # small parameters travel as they are
    assert w4.grads == w4.stochastic == 0
    coarse = errors("recipe=w4", "recipe.weights.bits=2")
    assert coarse.weights > 10 * w4.weights
    assert errors("recipe=qsdp").stochastic == pytest.approx(1)
    two = errors("recipe=base", "recipe.grads.bits=4", "recipe.hops=2")
    one = errors("recipe=base", "recipe.grads.bits=4", "recipe.hops=1")
    assert two.grads == pytest.approx(2 * one.grads)
    assert two.unrotated == pytest.approx(1)
    rotated = errors("recipe=base", "recipe.grads.bits=4", "recipe.grads.hadamard=64")
    assert rotated.unrotated == 0 < rotated.grads


def test_sparse_gradients_err_by_what_they_leave_out() -> None:
    """Over both hops; more than the law was fitted to, so that it says so."""
    sparse = ["recipe=base", "recipe.grads.codec=topk", "recipe.grads.keep=2"]
    some = errors(*sparse, "recipe.hops=2")
    assert some.weights == 0
    assert some.grads == pytest.approx(2 * law.nmse(TopKCodec(torch.float32, 2), True), rel=0.02)
    assert 1 < some.grads < 2
    told = law.load_law().predict(some, 1e7, 5e7, 1500)
    assert any("gradients' NMSE" in text for text in told.beyond)


def test_no_gap_is_told_of_recipes_that_remember(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=10m", "recipe=topk_ef", "cluster=2x2"]
    plan_command(words, 80, as_json=True)
    assert json.loads(capsys.readouterr().out)["gap"] is None
    plan_command(words, 80, as_json=False)
    assert "No gap is predicted" in capsys.readouterr().out


def test_plan_tells_the_gap_and_where_it_extrapolates(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=10m", "recipe=w4", "cluster=2x2", "train.steps=1500"]
    plan_command(words, 80, as_json=True)
    told = json.loads(capsys.readouterr().out)["gap"]
    assert told["low"] < told["gap"] < told["high"]
    plan_command(["model=13b", *words[1:]], 80, as_json=True)
    assert "parameters" in json.loads(capsys.readouterr().out)["gap"]["beyond"][0]
    plan_command(["model=10m", "recipe=zero3", *words[2:]], 80, as_json=True)
    assert json.loads(capsys.readouterr().out)["gap"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["model.start=x"],
        ["run.start_from=x"],
        ["model.path=x", "model.weights=pretrained"],
        ["model.start=x", "model.lora.rank=2"],
    ],
)
def test_of_other_weights_the_law_says_nothing(words: list[str]) -> None:
    config = compose(["model=tiny", "recipe=w4", "cluster=2x2"])
    plan = build_plan(build_model(config.model, 256, "meta"), config)
    assert law.predicted(config, plan) is not None
    assert law.predicted(compose(["model=tiny", "recipe=w4", "cluster=2x2", *words]), plan) is None


def test_a_damaged_law_is_told(tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    zeros = replace(law.load_law(), values=[0.0] * len(law.NAMES))
    path.write_text(json.dumps(asdict(zeros)))
    assert law.load_law(path).values == [0.0] * len(law.NAMES)
    path.write_text(path.read_text().replace('"misfit"', '"misfits"'))
    with pytest.raises(ValueError, match="misfit: missing"):
        law.load_law(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"law\.json"):
        law.load_law(path)
