"""The noise band: what a gap is band_gap it, and how it opens over training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.study.fake_seed import judged
from zpp_lab.study.judge.noise import (
    BandGap,
    band_gap,
    heldout_band,
    noise_bands,
    noise_of,
    one_seed,
    training_band,
)


def test_only_arms_with_a_gap_and_a_control_stand_beside_a_band(tmp_path: Path) -> None:
    one = judged(tmp_path / "one", 1)
    bands = noise_bands(one)
    assert bands == {"zero3": noise_of(one, one.baseline)}
    placed = {arm.name: band_gap(one, arm, bands) for arm in one.arms}
    assert placed.pop("zero3") is None
    assert all(at is not None and at.noise == bands["zero3"] for at in placed.values())
    assert one_seed(one)
    assert not one_seed(judged(tmp_path / "two", 2))


def test_the_band_is_no_narrower_where_two_curves_happen_to_cross(tmp_path: Path) -> None:
    result = judged(tmp_path, 1)
    file = result.baseline.runs[1].dir.parents[1] / "zero3_reordered" / "seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, strays in ((rows[39], 9.0), (rows[79], 0.5)):
        row["heldout_loss"] = 3.0 + strays
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = result.baseline.runs[1].dir / "metrics.jsonl"
    rows = [json.loads(line) for line in base.read_text().splitlines()]
    rows[39]["heldout_loss"] = rows[79]["heldout_loss"] = 3.0
    base.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert noise_of(result, result.baseline) == pytest.approx(0.5)  # step 40 is the first half's


def test_bands_are_symmetric_and_as_wide_as_the_largest() -> None:
    runs = [{1: 0.5, 2: -0.1, 40: 0.0}, {40: 0.2}]
    near = training_band(runs, {1, 2, 20, 40})
    assert [(r["step"], r["low"], r["high"]) for r in near] == [
        (1, -0.5, 0.5),
        (2, -0.5, 0.5),
        (40, -0.2, 0.2),
    ]
    exact = heldout_band(runs, {2, 40})
    assert [(r["step"], r["high"]) for r in exact] == [(2, 0.1), (40, 0.2)]
    # Nothing after a step counts: the band opens where the runs part, not before.
    parting = training_band([{s: 0.0 if s < 60 else 0.3 for s in range(1, 101)}], {59, 60, 75})
    assert [r["high"] for r in parting] == [0.0, 0.3, 0.3]
    assert training_band([], {1}) == heldout_band([], {1}) == []


def test_a_gap_lies_inside_above_or_below() -> None:
    texts = [BandGap(gap, 0.02).text for gap in (-0.014, 0.05, -0.03)]
    assert texts == ["inside, 0.7×", "above, 2.5×", "below, 1.5×"]
