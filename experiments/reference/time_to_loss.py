"""Time to the same loss: how long a recipe trains to the loss that plain training reaches.

    python experiments/reference/time_to_loss.py

A recipe's steps are shorter, but after as many tokens its loss is a little higher. So

    time = tokens to make up the gap x seconds a token

both as multiples of plain training's, the strongest plain arm of the same call at each link (FSDP2,
FSDP2 resharded to the node, or HSDP). Raw twins stand beside their arms: what they save is the
partition's, and what an arm saves over its twin is what bits bring. The gap, and what plain
training gains from more tokens, are those of the kept runs of one size (BUDGETS, BESIDE); seconds
are those of experiments/speed, of 1.3B parameters. An arm of that table has the gap of the study's
arm that trains alike (tools/plan/search/limits.py).

Prints the table and renews it in this folder's README. Writes time_to_loss.csv and
time_to_loss.svg.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import altair as alt
import numpy as np
from law import HERE, figure, interval, kept, renew
from scipy.optimize import minimize_scalar

from zpp_lab.config.flat import stored_config
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.files import write_atomic
from zpp_lab.study.judge.stats import t_interval
from zpp_lab.study.judge.verdict import StudyResult
from zpp_lab.study.speed.results import BASE, Measured, read_speeds
from zpp_lab.study.speed.speeds import speed_ups
from zpp_lab.tools.plan.search.limits import Numbers

BUDGETS = ("reference_10m", "reference_10m_12m", "reference_10m_200m")  # the first has the gaps
BESIDE = ("normal",)  # studies with gaps of more arms, against runs of the first's baseline
SPEEDS = HERE.parent / "speed" / "results.csv"
SIZE = "1_3b"  # of the speeds: where all arms were timed
PLAIN = "fsdp2"  # the engine of arms with nothing of this package around them
CONFIDENCE = 0.95
POWERS = (0.02, 5.0)  # of tokens, tried
HEAD = "training (recipe)"
WORDS = {
    "fsdp2+node": "plain, weights kept in the node",
    "fsdp2": "plain",
    "hsdp": "plain, copies across nodes (HSDP)",
    "amsp_node": "raw twin of differences: weights kept in the node",
    "zeropp_raw": "raw twin of ZeRO++",
    "w8": "8-bit weights",
    "w4": "4-bit weights",
    "g8_4_hadamard": "8- and 4-bit gradients",
    "zeropp": "ZeRO++",
    "zeropp_4": "ZeRO++, units of four blocks",
    "w4_g84h": "4-bit weights, 8- and 4-bit gradients",
    "diff_g84h": "4-bit weight differences, 8- and 4-bit gradients",
    "diff_g84h_4": "4-bit differences, units of four blocks",
    "diff_g84h_whole": "4-bit differences, GPUs keep whole weights",
    "diff2_g84": "2-bit weight differences, 8- and 4-bit gradients",
    "diff2_g84_whole": "the same, GPUs keep whole weights",
    "diff2_g82": "2 bits between nodes for differences and gradients",
    "diff2_g82_whole": "the same, GPUs keep whole weights",
}


class Look(NamedTuple):
    """An arm in the figure; `after`: its text stands behind its last point, else at its first."""

    color: str
    dark: str  # on a dark screen
    dy: int
    after: bool = False
    text: str = ""  # where WORDS has another
    aside: float = 1.0  # of its place, where intervals would cover each other


LOOKS = {  # of arms whose lines can be told apart
    "fsdp2+node": Look("#111111", "#f5f5f5", -12, text="plain FSDP2, weights kept in the node"),
    "fsdp2": Look("#6b7280", "#9aa4b2", -12, text="plain FSDP2"),
    "w4": Look("#117733", "#5ad87e", 0, True),
    "g8_4_hadamard": Look("#aa4499", "#e59bd9", 0, True),
    "zeropp": Look("#0b6eff", "#6aa8ff", -12, aside=0.98),
    "diff_g84h": Look("#b45309", "#f5a524", -14, text="4-bit differences", aside=1.02),
    "diff_g84h_4": Look("#0f766e", "#5eead4", 17, text="4-bit differences, units of four blocks"),
    "diff2_g82": Look("#7c3aed", "#c4b5fd", 16),
}
TITLE: Any = {
    "text": "Time to the loss of plain training",
    "subtitle": "% of the strongest plain FSDP2's; lower is sooner",
}


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


ONE = Estimate(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Curve:
    """What tokens buy: loss = floor + scale * tokens^-power, nats a token."""

    floor: float
    scale: float
    power: float

    @classmethod
    def through(cls, losses: Mapping[int, float]) -> Curve:
        """tokens -> loss. Two budgets leave the floor open; 0 is the lowest that a loss can have,
        and has the steepest end, so the fewest tokens for a gap. More: least squares. ValueError
        for losses that no falling power law has."""
        tokens, values = np.array(sorted(losses.items()), dtype=np.float64).reshape(-1, 2).T
        if len(losses) < 2:
            raise ValueError(f"{len(losses)} budget of tokens: what more tokens buy needs two")
        if not (np.diff(values) < 0).all():
            raise ValueError(f"losses {values} do not fall with tokens {tokens}: no curve has them")
        if len(losses) == 2:
            power = math.log(values[0] / values[1]) / math.log(tokens[1] / tokens[0])
            return cls(0.0, float(values[0] * tokens[0] ** power), power)

        def line(power: float) -> tuple[float, float, float]:
            """Floor, the rest at the first budget, and what is left of the squares."""
            x = (tokens / tokens[0]) ** -power
            rest = ((x - x.mean()) @ values) / ((x - x.mean()) @ x)
            floor = values.mean() - rest * x.mean()
            return floor, rest, float(((floor + rest * x - values) ** 2).sum())

        best = minimize_scalar(
            lambda log: line(math.exp(log))[2],
            bounds=np.log(POWERS),
            method="bounded",
            options={"xatol": 1e-9},
        )
        power = math.exp(best.x)
        floor, rest, _ = line(power)
        if floor < 0 or not 1.01 * POWERS[0] < power < 0.99 * POWERS[1]:
            raise ValueError(
                f"losses {values} of {tokens} tokens: the nearest power law has a floor of "
                f"{floor:.2f} nats and a power of {power:.2f}, which is none; leave a budget out"
            )
        return cls(float(floor), float(rest * tokens[0] ** power), power)

    def loss(self, tokens: float) -> float:
        return self.floor + self.scale * tokens**-self.power

    def tokens(self, loss: float) -> float:
        """Infinite at the floor and below."""
        above = loss - self.floor
        return (self.scale / above) ** (1 / self.power) if above > 0 else math.inf


def to_make_up(losses: Mapping[int, Sequence[float]], gaps: Sequence[float], at: int) -> Estimate:
    """Tokens that a recipe needs for the loss of plain training after `at` tokens, over `at`.

    losses: plain training's by budget and seed. gaps: the recipe's after `at` tokens, by seed. More
    tokens are taken to lower its loss as they lower plain training's. The 95 % interval is over
    seeds: the gap's own ends, and every budget's mean as far as it moves the result, their squares
    added up (Banerjee 1960, as in study/judge/stats.py). ValueError for fewer than two seeds.
    """
    few = [n for n in (len(gaps), *map(len, losses.values())) if n < 2]
    if few:
        raise ValueError("one seed has no interval: two or more of the arm and of each budget")
    means = {tokens: fmean(values) for tokens, values in losses.items()}
    step = 1e-4  # nats, of the slopes
    moved = [
        [Curve.through({**means, tokens: means[tokens] + by}) for by in (step, -step)]
        for tokens in losses
    ]
    halves = [_half(values) for values in losses.values()]

    def log(gap: float, curve: Curve) -> float:
        return math.log(curve.tokens(curve.loss(at) - gap) / at)

    def spread(gap: float) -> float:
        """What the budgets' means may make of it at this gap."""
        slopes = [(log(gap, up) - log(gap, down)) / (2 * step) for up, down in moved]
        return math.hypot(*(slope * half for slope, half in zip(slopes, halves, strict=True)))

    curve = Curve.through(means)
    value = log(fmean(gaps), curve)
    ends = []
    for sign, gap in zip((-1, 1), t_interval(gaps, CONFIDENCE), strict=True):
        at_end = log(gap, curve)
        if math.isinf(at_end):
            ends.append(at_end)
        elif math.isinf(value):
            ends.append(at_end + sign * spread(gap))
        else:
            ends.append(value + sign * math.hypot(at_end - value, spread(gap)))
    return Estimate(*map(math.exp, (value, *ends)))


def _half(values: Sequence[float]) -> float:
    low, high = t_interval(values, CONFIDENCE)
    return (high - low) / 2


def time_over(tokens: Estimate, arm: Measured, base: Measured) -> Estimate:
    """Time over another arm's, both with steps of as many tokens; 1 for the arm itself. The ends:
    the tokens' own with the arm's fastest step over the base's slowest, and the other way."""
    assert arm.setting == base.setting, (arm, base)
    if arm == base:
        return ONE
    own, theirs = _seconds(arm), _seconds(base)
    return Estimate(
        tokens.value * own.value / theirs.value,
        tokens.low * own.low / theirs.high,
        tokens.high * own.high / theirs.low,
    )


def _seconds(one: Measured) -> Estimate:
    """Of a step: the median, the fastest and the slowest. ValueError where they are not known."""
    if one.step_s is None or one.step_min_s is None or one.step_max_s is None:
        raise ValueError(f"{one.arm} at {one.place} lacks step_s, step_min_s or step_max_s")
    return Estimate(one.step_s, one.step_min_s, one.step_max_s)


@dataclass(frozen=True)
class Row:
    """An arm of the speeds; tokens and, by place, time as multiples of the strongest plain arm's.
    alike: the study's arm that trains as it does, "" for raw ones; gaps: that one's by seed.
    over_twin: by place, time as a multiple of the raw twin's, where one was timed."""

    arm: str
    alike: str
    gaps: Sequence[float]
    tokens: Estimate
    times: Mapping[str, Estimate]
    over_twin: Mapping[str, Estimate]

    @property
    def spare(self) -> float:
        """How many times more slowly than here plain training's loss may fall with tokens until
        the upper end of the extra tokens takes the smallest lead of a link; infinite without."""
        leads = [self.tokens.value / time.value for time in self.times.values()]
        more = math.log(self.tokens.high)
        return min((math.log(v) / more for v in leads if v > 1 and more > 0), default=math.inf)


def rows_of(
    measured: Sequence[Measured], results: Sequence[StudyResult], beside: Sequence[StudyResult] = ()
) -> list[Row]:
    """Of every arm that has both, in the order of WORDS. results: the studies of BUDGETS that have
    run, of which the first has the gaps; beside: those of BESIDE, for arms that it lacks.
    ValueError where these have another baseline, or two measurements are of one place."""
    losses = {_tokens(result): _losses(result) for result in results}
    for other in beside:
        if not set(_losses(other)) <= set(_losses(results[0])):
            of = results[0].study.name
            raise ValueError(f"{other.study.name} has another baseline than {of}: leave it out")
    known = [
        (Numbers.of(stored_config(arm.first_run.config)), arm)
        for result in (results[0], *beside)
        for arm in result.arms
        if arm.first_run and len(arm.gaps) > 1 and arm.arm.role == "arm"
    ]
    rows: dict[str, Row] = {}
    for up in speed_ups(measured):
        one = up.at
        if one.engine not in (PLAIN, "fsdp"):  # DeepSpeed has numbers of its own
            continue
        row = rows.get(one.arm) or Row(one.arm, "", [], ONE, {}, {})
        if one.engine != PLAIN and not _is_raw(one):
            arm = next((a for n, a in known if n.covers(_numbers(one))), None)
            if arm is None:
                continue
            gaps = list(arm.gaps.values())
            tokens = row.tokens if row.gaps else to_make_up(losses, gaps, _tokens(results[0]))
            row = replace(row, alike=arm.name, gaps=gaps, tokens=tokens)
        if one.place in row.times:
            raise ValueError(f"{one.arm} was measured twice at {one.place}: keep one of the rows")
        times = {**row.times, one.place: time_over(row.tokens, one, up.base)}
        paired = dict(row.over_twin)
        if up.twin:
            paired[one.place] = time_over(row.tokens, one, up.twin)
        rows[one.arm] = replace(row, times=times, over_twin=paired)
    return sorted(rows.values(), key=lambda row: [*WORDS, *rows].index(row.arm))


def _is_raw(one: Measured) -> bool:
    """Whether an arm of this package is known to have no codec."""
    return one.recipe_config is not None and not one.coded


def _numbers(one: Measured) -> Numbers:
    config = load(Config, one.config or {})
    shape = ClusterConfig(one.setting.nodes, one.setting.gpus_per_node)
    return Numbers.of(replace(config, cluster=shape))


def _tokens(result: StudyResult) -> int:
    """That each run of the study read."""
    return int(next(run.summary["tokens"] for run in result.baseline.finished if run.summary))


def _losses(result: StudyResult) -> list[float]:
    """Of the baseline, nats a token, by seed."""
    return [run.heldout_loss for run in result.baseline.finished if run.heldout_loss is not None]


# ---------------------------------------------------------------------- shown


def table(rows: Sequence[Row], budgets: int) -> str:
    """As Markdown: times in % of the strongest plain arm's and, behind a slash, in % of the raw
    twin's where one was timed. budgets: of the curve; with two its floor is the lowest."""
    places = list(dict.fromkeys(place for row in rows for place in row.times))
    tokens = "more tokens, %" if budgets > 2 else "more tokens, %, at least"
    head = [HEAD, "loss gap, nats a token (seeds)", tokens, *places]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        gap = more = "0"
        if row.gaps:
            gap = interval(list(row.gaps))
            value, *ends = (f"{100 * (v - 1):.1f}" for v in vars(row.tokens).values())
            more = f"{value} ({' to '.join(ends)})".replace("-", "−")
        times = [_times(row, place) for place in places]
        cells = [f"{WORDS.get(row.arm, row.arm)} (`{row.arm}`)", gap, more]
        lines.append("| " + " | ".join([*cells, *times]) + " |")
    return "\n".join(lines)


def pages(rows: Sequence[Row], budgets: int) -> dict[Path, str]:
    """Return the tables that pages show."""
    return {HERE / "README.md": table(rows, budgets)}


def _times(row: Row, place: str) -> str:
    if place not in row.times:
        return ""
    twin = f" / {_percent(row.over_twin[place])}" if place in row.over_twin else ""
    return f"{_percent(row.times[place])}{twin}"


def _percent(time: Estimate) -> str:
    """Whole, and its ends where these differ."""
    value, *ends = (f"{100 * v:.0f}" for v in vars(time).values())
    return value if set(ends) == {value} else f"{value} ({'–'.join(ends)})"


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    names = ("arm", "alike", "seeds", "gap", "place", "tokens", "time")
    ends = [f"{name}_{end}" for name in names[5:] for end in ("low", "high")]
    paired = ["over_twin"] if any(row.over_twin for row in rows) else []  # older speeds have none
    writer = csv.DictWriter(text, [*names, *ends, *paired], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        gap = f"{fmean(row.gaps):.6f}" if row.gaps else 0
        told = {"arm": row.arm, "alike": row.alike, "seeds": len(row.gaps), "gap": gap}
        for place, time in row.times.items():
            for name, one in (("tokens", row.tokens), ("time", time)):
                told |= {name: f"{one.value:.5f}"}
                told |= {f"{name}_low": f"{one.low:.5f}", f"{name}_high": f"{one.high:.5f}"}
            if place in row.over_twin:
                told["over_twin"] = f"{row.over_twin[place].value:.5f}"
            writer.writerow(told | {"place": place})
            told.pop("over_twin", None)
    return text.getvalue()


def draw(rows: Sequence[Row], gbps: Mapping[str, float]) -> str:
    """The figure as SVG, dark where the reader's screen is. gbps: of the places that have one."""
    points = [
        {"arm": row.arm, "gbps": gbps[place] * LOOKS[row.arm].aside, **vars(time)}
        for row in rows
        for place, time in row.times.items()
        if row.arm in LOOKS and place in gbps
    ]
    names = {f"{v:.4g}": place.removesuffix(" Gb/s") for place, v in gbps.items()}
    x = alt.X(
        "gbps:Q",
        title="Gb/s between nodes",
        scale=alt.Scale(type="log", domain=[min(gbps.values()) / 1.06, max(gbps.values()) * 1.12]),
        axis=alt.Axis(
            values=list(gbps.values()),
            labelExpr=f"({json.dumps(names)})[format(datum.value, '.4~g')]",
            grid=False,
        ),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(type="log", domain=[0.08, 1.8], nice=False),
        axis=alt.Axis(values=[0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5], format="~%"),
    )
    looks = list(LOOKS.values())
    color = alt.Color(
        "arm:N",
        legend=None,
        scale=alt.Scale(domain=list(LOOKS), range=[look.color for look in looks]),
    )
    every = alt.Chart(alt.Data(values=points)).encode(x=x, color=color)
    layers = [
        every.mark_line(strokeWidth=2.5).encode(y=y),
        every.mark_rule(strokeWidth=2.5).encode(y=alt.Y("low:Q", title=None), y2="high:Q"),
        every.mark_point(size=60, filled=True, opacity=1).encode(y=y),
    ]
    for arm, look in LOOKS.items():
        own = [point for point in points if point["arm"] == arm]
        if not own:
            continue
        at = (max if look.after else min)(own, key=lambda point: point["gbps"])
        text = alt.Chart(alt.Data(values=[at])).mark_text(
            text=look.text or WORDS[arm],
            align="left",
            dx=10 if look.after else 0,
            dy=look.dy,
            fontSize=15,
        )
        layers.append(text.encode(x=x, y=y, color=color))
    chart = alt.layer(*layers).properties(width=450, height=390, title=TITLE)
    return figure(chart, {look.color: look.dark for look in looks})


def sources() -> tuple[list[Measured], list[StudyResult], list[StudyResult]]:
    """What the published table is made of: speeds, the budgets that have two seeds of plain
    training, and the studies beside them."""
    measured = [m for m in read_speeds(SPEEDS) if m.setting.model == SIZE]
    calls = {m.call for m in measured if m.twin}
    if calls:  # ratios of calls without twins are not shown beside them
        measured = [m for m in measured if m.call in calls]
    budgets, beside = ([r for name in names if (r := kept(name))] for names in (BUDGETS, BESIDE))
    return measured, [result for result in budgets if len(_losses(result)) > 1], beside


def main() -> int:
    measured, results, beside = sources()
    rows = rows_of(measured, results, beside)
    tables = pages(rows, len(results))
    for page, made in tables.items():
        renew(page, HEAD, made)
    write_atomic(HERE / "time_to_loss.csv", as_csv(rows))
    gbps = {m.place: m.gbps for m in measured if m.gbps and m.arm == BASE}
    write_atomic(HERE / "time_to_loss.svg", draw(rows, gbps))
    curve = Curve.through({_tokens(r): fmean(_losses(r)) for r in results})
    print(tables[HERE / "README.md"])
    for result in results:
        losses = _losses(result)
        print(
            f"plain after {_tokens(result) / 1e6:.0f}M tokens: {fmean(losses):.4f} ± "
            f"{_half(losses):.4f} ({len(losses)})"
        )
    at = _tokens(results[0])
    print(
        f"loss = {curve.floor:.3f} + {curve.scale:.4g} tokens^-{curve.power:.3f}; twice the "
        f"{at / 1e6:.0f}M take {curve.loss(at) - curve.loss(2 * at):.2f} nats off"
    )
    later = [r for r in results if _tokens(r) > at]
    if later:  # the least that a token gains, if the curve is convex
        far = max(later, key=_tokens)
        slope = math.log(_tokens(far) / at) / (fmean(_losses(results[0])) - fmean(_losses(far)))
        for row in (row for row in rows if row.gaps):
            more = math.expm1(fmean(row.gaps) * slope)
            print(f"{row.arm}: {more:.1%} more by a straight line to {_tokens(far) / 1e6:.0f}M")
        for arm in (arm for arm in far.arms if arm.arm.role == "arm" and len(arm.gaps) > 1):
            at, gap = _tokens(far), fmean(arm.gaps.values())
            more = [curve.tokens(curve.loss(at) - g) / at - 1 for g in (gap, *arm.gaps.values())]
            first, *each = (f"{m:.0%} more" if math.isfinite(m) else "more than any" for m in more)
            print(
                f"{arm.name} after {at / 1e6:.0f}M tokens: gap {gap:+.4f}, {first} by the curve "
                f"beyond them ({', '.join(each)} by single seeds)"
            )
    for row in rows:
        if math.isfinite(row.spare):
            print(f"{row.arm}: a loss that falls {row.spare:.1f} times more slowly takes a lead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
