"""Which colour and dash an arm has, in every figure of a study's report and in its dashboard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zpp_lab.config import StudyConfig
from zpp_lab.study.controls import EXPECTED

TOLD = 20  # arms with a look of their own; more could not be told apart
OTHERS = "other arms"
_SOLID = (1.0, 0.0)
# Beside the hue, for print in grey, for eyes that see two hues as one, and so that a line that
# covers an equal one lets it show through.
_DASHES = (_SOLID, (7.0, 3.0), (3.0, 2.0), (9.0, 3.0, 2.0, 3.0))
# First Paul Tol's "muted" scheme. Each of the others was chosen to be as far as can be, in OKLab,
# from those before it and from the greys, as most people see them and as red- and green-blind
# readers do; where these might take one for another, the dashes differ.
_HUES = (
    *("#332288", "#CC6677", "#117733", "#DDAA33", "#44AA99", "#882255", "#88CCEE"),
    *("#AA4499", "#999933", "#0B6EFF", "#7D98F5", "#6F3DE0", "#5AD87E", "#1F4217"),
    *("#596DB2", "#C21B0D", "#522545", "#D773D0", "#292FCB"),
)
# Controls are no candidates, so they stand back: the greys that colour-blind readers least take
# for a hue, with dashes that no hue has.
_GREYS = ("#646464", "#888888", "#404040")
_GREY_DASHES = ((14.0, 3.0), (2.0, 4.0))


@dataclass(frozen=True)
class Look:
    """A colour as #RRGGBB, and a dash as pixels drawn and left out by turns."""

    color: str
    dash: tuple[float, ...] = _SOLID


BASELINE = Look("#111111")
OTHER = Look("#B6BCC6")
HUES = tuple(Look(hue, _DASHES[i % len(_DASHES)]) for i, hue in enumerate(_HUES))
GREYS = tuple(Look(grey, _GREY_DASHES[i % len(_GREY_DASHES)]) for i, grey in enumerate(_GREYS))


def arm_looks(
    arms: Iterable[str],
    baseline: str,
    controls: Collection[str] = (),
    taken: Mapping[str, Look] | None = None,
) -> dict[str, Look]:
    """The looks of the baseline and of the first arms after it, TOLD in all, in that order.

    No two are alike. controls: arms in grey tones, as long as there are some. taken: looks that
    arms have already; the others get what these leave.
    """
    taken = dict(taken or {})
    greys, hues = ([one for one in some if one not in taken.values()] for some in (GREYS, HUES))
    looks = {baseline: BASELINE}
    for arm in [arm for arm in dict.fromkeys(arms) if arm != baseline][: TOLD - 1]:
        left = greys if arm in controls and greys else hues
        looks[arm] = taken[arm] if arm in taken else left.pop(0)
    return looks


def study_looks(study: StudyConfig, told: Sequence[str] = ()) -> dict[str, Look]:
    """The looks of a study's arms. told: those that get one, where there are more than TOLD."""
    controls = [arm.name for arm in study.arms if arm.role in EXPECTED]
    return arm_looks(told or [arm.name for arm in study.arms], study.baseline, controls)
