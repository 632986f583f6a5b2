"""Arms can be told apart, also by readers who do not see red or green."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from zpp_lab.study.report import style
from zpp_lab.study.report.style import (
    BASELINE,
    GREYS,
    HUES,
    LOOKS,
    OTHER,
    Look,
    arm_looks,
)

CSS = Path(style.__file__).with_name("templates").joinpath("report.css").read_text()
NAMES = [f"arm{i}" for i in range(LOOKS)]
_CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
# What linear RGB looks like without one kind of cones (Machado, Oliveira, Fernandes 2009).
SEEN_BY = {
    "most": np.eye(3),
    "red-blind": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "green-blind": [
        [0.3673, 0.8606, -0.2280],
        [0.2801, 0.6725, 0.0474],
        [-0.0118, 0.0429, 0.9689],
    ],
}


# CSS: hue-rotate(180deg), on coded colours (Filter Effects Module Level 1).
_TURNED = [[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]]


def at_night(look: Look) -> Look:
    """Apply the filter that report.css has for charts on dark pages."""
    kept = float(re.search(r"filter: invert\((.+?)\) hue-rotate\(180deg\)", CSS)[1])
    coded = np.array([int(look.color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    turned = np.clip(np.array(_TURNED) @ (kept + (1 - 2 * kept) * coded), 0, 1)
    return replace(look, color="#" + "".join(f"{round(255 * part):02x}" for part in turned))


def oklab(look: Look, eyes: str) -> np.ndarray:
    """The colour in OKLab, where distances are about as large as they look."""
    coded = np.array([int(look.color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SEEN_BY[eyes]) @ linear, 0, 1)
    return np.array(_LAB) @ np.cbrt(np.array(_CONES) @ seen)


def apart(one: Look, other: Look, eyes: str) -> float:
    return float(np.linalg.norm(oklab(one, eyes) - oklab(other, eyes)))


@pytest.mark.parametrize("controls", [[], ["arm3", "arm4"], NAMES[1:12]])
def test_no_two_of_twenty_arms_share_colour_or_look(controls: list[str]) -> None:
    looks = arm_looks(NAMES, "arm0", controls)
    assert list(looks) == NAMES
    assert looks["arm0"] == BASELINE
    assert len(set(looks.values())) == len({look.color for look in looks.values()}) == LOOKS == 20
    assert OTHER not in looks.values()


@pytest.mark.parametrize("eyes", ["red-blind", "green-blind"])
def test_where_hues_look_alike_to_some_the_dashes_differ(eyes: str) -> None:
    for one, other in combinations([*HUES, *GREYS], 2):
        assert apart(one, other, eyes) > 0.09 or one.dash != other.dash
    assert min(apart(a, b, eyes) for a, b in combinations(HUES, 2)) > 0.05
    assert min(apart(a, b, eyes) for a in HUES for b in GREYS) > 0.035


def test_dark_pages_keep_arms_apart() -> None:
    night = [at_night(look) for look in (*HUES, *GREYS, BASELINE)]
    assert min(apart(a, b, "most") for a, b in combinations(night, 2)) > 0.045
    page = Look("#0e1116")
    assert all(oklab(look, "most")[0] - oklab(page, "most")[0] > 0.2 for look in night)
    for eyes in ("red-blind", "green-blind"):
        for one, other in combinations(night, 2):
            assert apart(one, other, eyes) > 0.045 or one.dash != other.dash
