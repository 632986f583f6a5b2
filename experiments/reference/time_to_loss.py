"""Time to the same loss: how long a recipe would train to the loss that plain training reaches.

    python experiments/reference/time_to_loss.py

A recipe's steps are shorter, but after as many tokens its loss is a little higher. So

    time = (1 + extra tokens) x seconds a token

as multiples of those of the strongest uncompressed arm of the same call and link: plain FSDP2,
FSDP2 resharded to the node, HSDP or a raw twin. Seconds are those of experiments/speed, gaps those
of the study's arm with the same training (tools/plan/search/limits.py).

Extra tokens make up the gap: exp(gap / slope) - 1, with the nats that plain training gains per unit
of log tokens at the gaps' budget. That slope depends on the shape of its curve, so it is a range
(Slopes.through).

Prints the table and renews it in this folder's README. Writes time_to_loss.csv and
time_to_loss.svg.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import altair as alt
from law import HERE, figure, interval, kept, renew

from zpp_lab.config.flat import stored_config
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.files import write_atomic
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.speed.results import BASE, HSDP, MAX, Measured, read_speeds
from zpp_lab.study.speed.speeds import twins, without_hsdp, without_twin
from zpp_lab.tools.plan.search.limits import Numbers

GAPS = ("reference_10m", "reference_10m_more", "reference_10m_6000")  # the first of as many steps
ANCHORS = ("token_curve", "reference_10m_6000", "reference_10m_200m")  # of plain training's curve
SEEDS = 8  # fewer say too little of a gap
SPEEDS = HERE.parent / "speed" / "results.csv"
SIZE = "1_3b"  # of the speeds
SHAPE = "2 × 2"  # nodes and GPUs a node, in the page's table and in the figure
CONFIDENCE = 0.95
HEAD = "training (recipe)"
ARMS = {  # in the table's order, a raw twin above its arms
    "fsdp2": "plain FSDP2",
    "fsdp2+node": "plain FSDP2, resharded to the node",
    HSDP: "plain FSDP2, copies across nodes",
    "zeropp_raw": "raw twin of ZeRO++",
    "zeropp": "ZeRO++",
    "amsp_node": "raw twin of differences",
    "diff_g84h": "4-bit differences, 8- and 4-bit gradients",
    "diff3_g83": "3-bit differences, 8- and 3-bit gradients",
}


class Line(NamedTuple):
    """A line of the figure. aside: its points move by so much, where ranges would overlap."""

    label: str
    light: str
    dark: str  # on a dark screen
    dy: float  # of the label, from its first point
    dx: float = 0
    aside: float = 1.0


STRONGEST = Line("strongest uncompressed arm", "#6b7280", "#9aa4b2", 16)
LINES = {
    HSDP: Line("HSDP, uncompressed", "#111111", "#f5f5f5", -24),
    "zeropp": Line("ZeRO++", "#0b6eff", "#6aa8ff", -18, 6, 0.97),
    "diff_g84h": Line("4-bit differences", "#b45309", "#f5a524", -16, 12),
    "diff3_g83": Line("3-bit differences", "#7c3aed", "#c4b5fd", 20, 4, 1.03),
}
TITLE: Any = {
    "text": "Estimated time to plain training's loss",
    "subtitle": "% of the strongest uncompressed arm's",
}


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


ONE, NONE = Estimate(1.0, 1.0, 1.0), Estimate(0.0, 0.0, 0.0)


class Slopes(NamedTuple):
    """Nats that plain training gains per unit of log tokens, at the third of its budgets."""

    middle: float
    steepest: float
    shallowest: float

    @classmethod
    def through(cls, losses: Mapping[int, float]) -> Slopes:
        """Return the slopes that four anchors allow: tokens -> loss, nats a token.

        middle: of the power law with a floor through the first three, each of as many times the
        tokens as the one before. steepest, shallowest: the chords before and behind the third,
        between which the slope of a convex curve lies. ValueError for anchors of no such curve.
        """
        tokens, values = sorted(losses), [losses[at] for at in sorted(losses)]
        if len(tokens) < 4 or not math.isclose(tokens[1] ** 2, tokens[0] * tokens[2]):
            raise ValueError(f"anchors at {tokens} tokens: use three at equal ratios and a later")
        if any(later >= earlier for earlier, later in pairwise(values)):
            raise ValueError(f"anchors {values}: the loss must fall with tokens; tune or drop one")
        step = math.log(tokens[1] / tokens[0])
        fall, ratio = values[1] - values[2], (values[1] - values[2]) / (values[0] - values[1])
        after = (values[2] - values[3]) / math.log(tokens[3] / tokens[2])
        if ratio >= 1:
            raise ValueError(f"anchors {values}: the fall must slow down; tune or drop one")
        middle = fall * ratio / (1 - ratio) * -math.log(ratio) / step
        if after > middle:
            raise ValueError(f"anchors {values}: the last falls too fast; tune the others")
        return cls(middle, fall / step, after)

    def extra(self, gaps: Sequence[float]) -> Estimate:
        """Return the extra tokens that make up a gap, as a share, of a recipe's gaps by seed.

        low, high: the ends of the gap's 95 % interval at the slope that takes them farthest.
        """
        ends = t_interval(gaps, CONFIDENCE)
        low, high = (
            choose(math.expm1(end / slope) for slope in self[1:])
            for end, choose in zip(ends, (min, max), strict=True)
        )
        return Estimate(math.expm1(fmean(gaps) / self.middle), low, high)


Place = tuple[str, str]  # shape and link


@dataclass(frozen=True)
class Loss:
    """An arm's gaps by seed after so many steps, and the extra tokens that make them up."""

    arm: str
    steps: int
    verdict: str
    gaps: Sequence[float]
    more: Estimate


@dataclass(frozen=True)
class Row:
    """An arm of the speeds, its loss (None: no codec, so no gap), and its times as multiples of
    those of the strongest uncompressed arm and of its raw twin."""

    arm: str
    loss: Loss | None
    times: Mapping[Place, Estimate]
    over_twin: Mapping[Place, Estimate]


def rows_of(
    measured: Sequence[Measured], slopes: Slopes, studies: Sequence[StudyResult]
) -> list[Row]:
    """Return a row for each arm and each number of steps with SEEDS gaps, in the order of ARMS.

    The first study of as many steps that has an arm gives its gap. ValueError for a call without
    HSDP or a raw twin, for two measurements of one place, and for studies of as many steps with
    different baselines.
    """
    if lacking := [*without_hsdp(measured), *without_twin(measured)]:
        raise ValueError(
            f"{lacking[0].text}: a call lacks HSDP or a raw twin, so its strongest uncompressed "
            "arm is not known: measure again without --no-twins"
        )
    losses, raw = losses_of(slopes, studies), twins(measured)
    bases: dict[object, Measured] = {}
    arms: dict[str, dict[Place, Measured]] = {}
    for one in (m for m in measured if m.engine in (BASE, "fsdp")):  # DeepSpeed has other numbers
        base = bases.get(one.cell)
        if not one.coded and (base is None or one.tokens_per_s > base.tokens_per_s):
            bases[one.cell] = one
        place = (f"{one.setting.nodes} × {one.setting.gpus_per_node}", one.place)
        if arms.setdefault(one.arm, {}).setdefault(place, one) is not one:
            raise ValueError(f"{one.arm} was measured twice at {place}: keep one of the rows")
    rows = []
    for arm, places in arms.items():
        first = next(iter(places.values()))
        found: dict[int, Loss | None] = {} if first.coded else {0: None}
        for numbers, loss in losses if first.coded else ():
            if numbers.covers(_numbers(first)):
                found.setdefault(loss.steps, loss)
        for own in found.values():
            more = own.more if own else NONE
            times = {at: time_over(more, m, bases[m.cell]) for at, m in places.items()}
            twin = {at: raw[id(m)] for at, m in places.items() if id(m) in raw}
            over = {at: time_over(more, places[at], m) for at, m in twin.items()}
            rows.append(Row(arm, own, times, over))
    return sorted(rows, key=lambda row: [*ARMS, *arms].index(row.arm))


def time_over(more: Estimate, arm: Measured, base: Measured) -> Estimate:
    """Return the time over another arm's, for more tokens; 1 for the arm itself. The ends: the
    tokens' own with the arm's fastest step over the base's slowest, and the other way round."""
    assert arm.setting == base.setting, (arm, base)
    if arm == base:
        return ONE
    own, theirs = _seconds(arm), _seconds(base)
    return Estimate(
        (1 + more.value) * own.value / theirs.value,
        (1 + more.low) * own.low / theirs.high,
        (1 + more.high) * own.high / theirs.low,
    )


def _seconds(one: Measured) -> Estimate:
    """Return the median, fastest and slowest step. ValueError where they are not known."""
    if one.step_s is None or one.step_min_s is None or one.step_max_s is None:
        raise ValueError(f"{one.arm} at {one.place} lacks step_s, step_min_s or step_max_s")
    return Estimate(one.step_s, one.step_min_s, one.step_max_s)


def losses_of(slopes: Slopes, studies: Sequence[StudyResult]) -> list[tuple[Numbers, Loss]]:
    """Return each study's arms with SEEDS gaps, and what makes them train so."""
    found: list[tuple[Numbers, Loss]] = []
    baselines: dict[int, list[float]] = {}
    for result in studies:
        steps = _config(result.baseline).train.steps
        if not set(_plain(result)) <= set(baselines.setdefault(steps, _plain(result))):
            raise ValueError(f"{result.study.name} has another baseline: leave it out")
        for arm in result.arms:
            gaps = list(arm.gaps.values())
            if arm.arm.role == "arm" and len(gaps) >= SEEDS:
                loss = Loss(arm.name, steps, arm.verdict, gaps, slopes.extra(gaps))
                found.append((Numbers.of(_config(arm)), loss))
    return found


def _config(arm: ArmResult) -> Config:
    assert arm.first_run is not None, f"{arm.name} has no run"
    return stored_config(arm.first_run.config)


def _plain(result: StudyResult) -> list[float]:
    """Return the baseline's losses, nats a token, by seed."""
    return [run.heldout_loss for run in result.baseline.finished if run.heldout_loss is not None]


def _numbers(one: Measured) -> Numbers:
    config = load(Config, one.config or {})
    shape = ClusterConfig(one.setting.nodes, one.setting.gpus_per_node)
    return Numbers.of(replace(config, cluster=shape))


# ---------------------------------------------------------------------- shown


def table(rows: Sequence[Row]) -> str:
    """Return the rows of SHAPE as Markdown, times in %."""
    places = [at for at in dict.fromkeys(at for row in rows for at in row.times) if at[0] == SHAPE]
    head = [HEAD, "loss gap, nats a token (seeds)", "verdict", "more tokens, %"]
    head += [f"time at {link}, %" for _, link in places]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        name, cells = ARMS.get(row.arm, row.arm), ["0", "", "0"]
        if row.loss:
            cells = [interval(list(row.loss.gaps)), row.loss.verdict, more_text(row.loss.more)]
            if row not in _usual(rows):
                name += f", gap after {row.loss.steps:,} steps"
        times = [_percent(row.times[at]) if at in row.times else "" for at in places]
        lines.append("| " + " | ".join([f"{name} (`{row.arm}`)", *cells, *times]) + " |")
    return "\n".join(lines)


def _usual(rows: Sequence[Row]) -> list[Row]:
    """Return those with the gap after the fewest steps."""
    fewest = min((row.loss.steps for row in rows if row.loss), default=0)
    return [row for row in rows if not row.loss or row.loss.steps == fewest]


def more_text(more: Estimate) -> str:
    value, *ends = (f"{100 * v:.1f}" for v in vars(more).values())
    return f"{value} ({' to '.join(ends)})".replace("-", "−")


def _percent(time: Estimate) -> str:
    """Return a time without decimals, and its ends where these differ."""
    value, *ends = (f"{100 * v:.0f}" for v in vars(time).values())
    return value if set(ends) == {value} else f"{value} ({'–'.join(ends)})"


def as_csv(rows: Sequence[Row]) -> str:
    """Return a line for each row and place."""
    text = io.StringIO()
    ends = [f"{name}{end}" for name in ("more", "time") for end in ("", "_low", "_high")]
    names = ["arm", "gap_of", "steps", "seeds", "gap", "shape", "link", *ends, "over_twin"]
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        for place, time in row.times.items():
            both = [*vars(row.loss.more if row.loss else NONE).values(), *vars(time).values()]
            line = dict(zip(ends, (f"{v:.5f}" for v in both), strict=True))
            line |= {"arm": row.arm, "shape": place[0], "link": place[1]}
            if loss := row.loss:
                line |= {"gap_of": loss.arm, "steps": str(loss.steps), "seeds": str(len(loss.gaps))}
                line["gap"] = f"{fmean(loss.gaps):.6f}"
            if place in row.over_twin:
                line["over_twin"] = f"{row.over_twin[place].value:.5f}"
            writer.writerow(line)
    return text.getvalue()


def draw(rows: Sequence[Row]) -> str:
    """Return the figure as SVG, which is dark where the reader's screen is."""
    points = [
        {"arm": row.arm, "gbps": float(link.split()[0]) * LINES[row.arm].aside, **vars(time)}
        for row in _usual(rows)
        if row.arm in LINES
        for (shape, link), time in row.times.items()
        if shape == SHAPE
    ]
    links = sorted({link for row in rows for shape, link in row.times if shape == SHAPE}, key=_gbps)
    ends = _gbps(links[0]) / 1.06, _gbps(links[-1]) * 1.06
    x = alt.X(
        "gbps:Q",
        title="Gb/s between nodes",
        scale=alt.Scale(type="log", domain=ends, nice=False),
        axis=alt.Axis(values=[_gbps(link) for link in links], format="~g", grid=False),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(domain=[0, 1.4], nice=False),
        axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1, 1.25], format="~%"),
    )
    color = alt.Color(
        "arm:N",
        legend=None,
        scale=alt.Scale(domain=list(LINES), range=[line.light for line in LINES.values()]),
    )
    every = alt.Chart(alt.Data(values=points)).encode(x=x, color=color)
    layers = [
        alt.Chart(alt.Data(values=[{"value": 1}]))
        .mark_rule(strokeWidth=2.5, color=STRONGEST.light)
        .encode(y=y),
        every.mark_line(strokeWidth=2.5).encode(y=y),
        every.mark_rule(strokeWidth=2.5).encode(y=alt.Y("low:Q", title=None), y2="high:Q"),
        every.mark_point(size=60, filled=True, opacity=1).encode(y=y),
    ]
    first = {p["arm"]: p for p in sorted(points, key=lambda p: p["gbps"], reverse=True)}
    labels = [(STRONGEST, {"gbps": _gbps(links[0]), "value": 1})]
    labels += [(line, first[arm]) for arm, line in LINES.items() if arm in first]
    for line, at in labels:
        mark = alt.Chart(alt.Data(values=[at])).mark_text(
            text=line.label, align="left", dx=line.dx, dy=line.dy, fontSize=17, color=line.light
        )
        layers.append(mark.encode(x=x, y=y))
    chart = alt.layer(*layers).properties(width=400, height=420, title=TITLE)
    return figure(chart, {line.light: line.dark for line in (STRONGEST, *LINES.values())})


def _gbps(link: str) -> float:
    return float(link.split()[0])


def anchors() -> dict[int, float]:
    """Return plain training's loss by tokens: the best arm of each budget among the kept runs."""
    found: dict[int, float] = {}
    for arm in (arm for name in ANCHORS for arm in read_kept(name).arms):
        if arm.arm.role == "baseline" and arm.heldout_loss is not None:
            tokens = next(int(run.summary["tokens"]) for run in arm.finished if run.summary)
            found[tokens] = min(arm.heldout_loss, found.get(tokens, math.inf))
    return found


def read_kept(name: str) -> StudyResult:
    found = kept(name)
    if found is None:
        raise ValueError(f"{name} has no kept runs: keep some with experiments/reference/keep.py")
    return found


def read_measured() -> list[Measured]:
    """Return the speeds of SIZE over named links, of calls with raw twins."""
    measured = [m for m in read_speeds(SPEEDS) if m.setting.model == SIZE and m.link != MAX]
    calls = {m.call for m in measured if m.twin}
    return [m for m in measured if m.call in calls]


def main() -> int:
    losses = anchors()
    slopes = Slopes.through(losses)
    studies = [read_kept(name) for name in GAPS]
    rows = rows_of(read_measured(), slopes, studies)
    made = table(rows)
    renew(HERE / "README.md", HEAD, made)
    write_atomic(HERE / "time_to_loss.csv", as_csv(rows))
    write_atomic(HERE / "time_to_loss.svg", draw(rows))
    print(made)
    for tokens, loss in sorted(losses.items()):
        print(f"plain training after {tokens / 1e6:.0f}M tokens: {loss:.4f}")
    print("nats per unit of log tokens:", *(f"{n} {v:.3f}" for n, v in slopes._asdict().items()))
    for _, loss in losses_of(slopes, studies[-1:]):
        print(f"{loss.arm} after {loss.steps} steps: {more_text(loss.more)} % more tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
