from __future__ import annotations

import itertools

import numpy as np
import pytest

from zpp_lab.study.judge.effects import (
    Cell,
    interactions,
    main_effects,
)
from zpp_lab.study.report.figures.gap import front


def cell(gap: float, spread: float = 0.0, **levels: object) -> Cell:
    seeds = {seed: gap + spread * (seed - 2) for seed in (1, 2, 3)}
    return Cell(" ".join(f"{k}{v}" for k, v in levels.items()), levels, seeds)  # type: ignore[arg-type]


def test_main_effects_of_an_additive_grid_are_the_ones_put_in() -> None:
    cells = [
        cell(0.1 * a + 0.01 * b, 0.001, bits=a, block=b)
        for a, b in itertools.product((2, 4, 8), (32, 64))
    ]
    bits, block = main_effects(cells)
    assert (bits.factor, bits.groups, list(bits.levels)) == ("bits", 2, [2, 4, 8])
    assert bits.levels[4].mean == pytest.approx(0.4 + 0.01 * 48)
    assert block.levels[64].mean - block.levels[32].mean == pytest.approx(0.01 * 32)
    # The spread of three seeds is 0.001: Student's interval with two degrees of freedom.
    assert bits.levels[2].high - bits.levels[2].mean == pytest.approx(4.30265 * 0.001 / 3**0.5)
    assert [one.departure.mean for one in interactions(cells)] == [pytest.approx(0.0, abs=1e-12)]


def test_interaction_is_found_where_it_is() -> None:
    cells = [
        cell(0.1 * a + 0.01 * b + (0.4 if (a, b) == (8, 64) else 0), bits=a, block=b, rest="x")
        for a, b in itertools.product((2, 4, 8), (32, 64))
    ]
    (one,) = interactions(cells)
    # The bump of one cell, less its share of row, column and mean.
    assert one.departure.mean == pytest.approx(0.4 * (1 - 1 / 2 - 1 / 3 + 1 / 6))
    assert one.at in {(8, 32), (8, 64)}
    assert len(one.cells) == 6


def test_only_arms_alike_in_all_else_are_compared() -> None:
    cells = [
        cell(0.0, bits=None, block=None),
        cell(0.5, bits=2, block=32),  # the only one with 2 bits and this block
        cell(0.1, bits=4, block=64),
        cell(0.0, bits=8, block=64),
    ]
    (bits,) = main_effects(cells)
    assert list(bits.levels) == [4, 8]
    assert bits.left_out == [2, None]
    assert bits.levels[4].mean == pytest.approx(0.1)
    assert interactions(cells) == []


def test_factors_that_move_together_are_one_more_effect() -> None:
    cells = [cell(1 / a if a else 0.0, weights=a, grads=a) for a in (2, 4, 8, None)]
    cells.append(cell(0.2, weights=4, grads=None))
    effects = {effect.factor: effect for effect in main_effects(cells)}
    assert list(effects["grads = weights"].levels) == [2, 4, 8, None]
    assert list(effects["weights"].levels) == [4, None]


def test_front_equals_the_definition() -> None:
    rng = np.random.default_rng(3)
    points = [(float(x), float(y), i) for i, (x, y) in enumerate(rng.integers(0, 12, (60, 2)))]
    slow = {
        i
        for x, y, i in points
        if not any((a <= x and b <= y) and (a < x or b < y) for a, b, _ in points)
    }
    assert set(front(points)) == slow
