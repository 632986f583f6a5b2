"""Fits the law of what bits cost (zpp_lab/tools/plan/law.py) to measured gaps.

`fit` takes the most probable exponents under wide normal priors (`PRIOR`). Cells are weighted by
their scatter over seeds and by the misfit with the largest evidence; that and the intervals are
Laplace's approximation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zpp_lab.tools.plan.law import FLOOR, NAMES, Cell, Law, Vector, gap_at, quantities, slope_at

PRIOR = {  # mean and standard deviation
    "aw": (0.0, 3.0),
    "pw": (1.0, 0.3),
    "ag": (-2.0, 3.0),
    "pg": (1.0, 0.3),
    "s": (0.7, 0.7),  # of log: stochastic rounding doubles an error's cost, or does not
    "alpha": (0.0, 0.4),
    "beta_w": (0.0, 0.4),
    "beta_g": (0.0, 0.4),
    "gamma": (0.0, 0.4),
}
MISFIT = (math.log(0.1), 0.7)  # prior of its log: few cells cannot rule out a tenth of a gap
MISFITS = tuple(0.02 * 1.25**i for i in range(18))  # shares of a gap that are tried


def fit(cells: Sequence[Cell]) -> Law:
    """The law of these cells. ValueError for too few of them."""
    if len(cells) < 4:
        raise ValueError(f"{len(cells)} cells: a scaling law needs 4 or more; train more arms")
    best: tuple[float, float, Vector, Vector] | None = None
    for misfit in MISFITS:
        at, inverse = _most_probable(cells, misfit)
        evidence = _log_likelihood(at, cells, misfit) - 0.5 * np.linalg.slogdet(inverse)[1]
        found = float(evidence), misfit, at, inverse
        if best is None or found[0] > best[0]:
            best = found
    assert best is not None
    _, misfit, at, inverse = best
    ranges: dict[str, tuple[float, float]] = {}
    for cell in cells:
        for name, value in quantities(cell).items():
            if value:
                low, high = ranges.get(name, (value, value))
                ranges[name] = min(low, value), max(high, value)
    covariance = np.linalg.inv(inverse)
    return Law(at.tolist(), covariance.tolist(), misfit, len(cells), ranges)


def _deviations(at: Vector, cells: Sequence[Cell], misfit: float) -> Vector:
    """Of each cell, by its own scatter and by the misfit."""
    gaps = np.array([gap_at(at, cell) for cell in cells])
    own = np.array([cell.error for cell in cells])
    return np.sqrt(own**2 + (misfit * gaps) ** 2 + FLOOR**2)


def _log_likelihood(at: Vector, cells: Sequence[Cell], misfit: float) -> float:
    sd = _deviations(at, cells, misfit)
    off = np.array([cell.gap - gap_at(at, cell) for cell in cells]) / sd
    expected = (_from_prior(at) ** 2).sum() + ((math.log(misfit) - MISFIT[0]) / MISFIT[1]) ** 2
    return float(-0.5 * (off**2).sum() - np.log(sd).sum() - 0.5 * expected)


def _from_prior(at: Vector) -> Vector:
    means, widths = np.array([PRIOR[name] for name in NAMES]).T
    return np.asarray((at - means) / widths)


def _most_probable(cells: Sequence[Cell], misfit: float) -> tuple[Vector, Vector]:
    """Values and the inverse of their covariance: Fisher's scoring, damped. A gap's deviation
    grows with the gap, so the slopes of both count."""
    widths = np.array([PRIOR[name][1] for name in NAMES])
    at, damping = np.array([PRIOR[name][0] for name in NAMES]), 1.0
    value = _log_likelihood(at, cells, misfit)
    for _ in range(400):
        sd = _deviations(at, cells, misfit)
        gaps = np.array([gap_at(at, cell) for cell in cells])
        slopes = np.array([slope_at(at, cell) for cell in cells]) / sd[:, None]
        wider = slopes * (misfit**2 * gaps / sd)[:, None]  # of log sd
        off = np.array([cell.gap for cell in cells]) / sd - gaps / sd
        inverse = slopes.T @ slopes + 2 * wider.T @ wider + np.diag(widths**-2.0)
        uphill = slopes.T @ off + wider.T @ (off**2 - 1) - _from_prior(at) / widths
        step = np.linalg.solve(inverse + damping * np.diag(np.diag(inverse)), uphill)
        tried = _log_likelihood(at + step, cells, misfit)
        if tried > value:
            at, value, damping = at + step, tried, damping / 3
        else:
            damping *= 4
        if damping > 1e12 or (damping < 1e-3 and float(np.abs(step).max()) < 1e-8):
            break
    return at, inverse
