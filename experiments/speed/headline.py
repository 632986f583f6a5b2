"""The README's figure and its columns of speed, over the strongest uncompressed setting.

    python experiments/speed/headline.py [FOLDER ...]

Each FOLDER has results of `zpp-lab bench step`, all of one model and shape. Only calls count in
which plain FSDP2, HSDP and the raw twin of each arm with codecs took turns with it. headline.csv
gets, for each arm and named speed of the links, the lowest and the highest ratio of the calls to
their fastest uncompressed arm. Without a folder headline.csv stays unchanged.

Draws headline.svg from headline.csv, and puts its numbers into the README's table. The sentence on
the README's first screen is written by hand: tests/config/test_pages.py compares it.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.files import write_atomic
from zpp_lab.study.speed.results import BASE, MAX, Measured, Setting, read_speeds
from zpp_lab.study.speed.speeds import twins, without_hsdp, without_twin

HERE = Path(__file__).parent
TABLE, FIGURE, README = HERE / "headline.csv", HERE / "headline.svg", HERE.parents[1] / "README.md"
BOUND = "bound"  # in `how`: the uncompressed arm was timed in another call


@dataclass(frozen=True)
class Lead:
    """An arm's speed over the strongest uncompressed arm, the lowest and highest of `calls`.

    how: empty where both took turns in one call, else BOUND.
    """

    arm: str
    link_gbps: float
    low: float
    high: float
    calls: int
    how: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"{self.arm}: low={self.low}, high={self.high}: use 0 < low <= high")
        if self.how not in ("", BOUND):
            raise ValueError(f"{self.arm}: how={self.how!r}: leave it empty or write {BOUND!r}")

    @property
    def text(self) -> str:
        ends = ["1" if end == 1 else f"{end:.1f}" for end in (self.low, self.high)]
        return "–".join(dict.fromkeys(ends))


@dataclass(frozen=True)
class Line:
    """An arm's line in the figure, with its colour on a light and on a dark screen."""

    arm: str
    label: str
    light: str
    dark: str


LINES = (
    Line("diff_g84h", "diff_g84h: 4-bit weight differences", "#b45309", "#f5a524"),
    Line("zeropp", "zeropp: ZeRO++", "#0b6eff", "#6aa8ff"),
)
UNCOMPRESSED = "strongest uncompressed setting = 1"


def leads(measured: Sequence[Measured]) -> list[Lead]:
    """Return each arm's lead at each named speed of the links, in the table's order.

    ValueError for several models or shapes, and for a call without HSDP or without a twin.
    """
    if len({m.setting for m in measured}) != 1:
        raise ValueError("the folders have several models or shapes: name those of one")
    named = [m for m in measured if m.link != MAX and m.engine in ("fsdp", BASE)]
    if lacking := [*without_hsdp(named), *without_twin(named)]:
        raise ValueError(
            f"{lacking[0].text}: a call lacks HSDP or a raw twin, so its strongest uncompressed "
            "arm is not known: measure again without --no-twins"
        )
    twins(named)  # ValueError for one that the table names and lacks
    best: dict[tuple[Setting, str, str], float] = {}
    for m in (m for m in named if m.plain or not m.coded):
        best[m.cell] = max(m.tokens_per_s, best.get(m.cell, 0.0))
    ratios: dict[tuple[str, float], list[float]] = {}
    for m in named:
        ratios.setdefault((m.arm, float(m.link)), []).append(m.tokens_per_s / best[m.cell])
    return [Lead(*key, min(own), max(own), len(own)) for key, own in ratios.items()]


def as_csv(found: Sequence[Lead]) -> str:
    """Return `found` as headline.csv holds it."""
    rows = ["arm,link_gbps,low,high,calls,how"]
    for one in found:
        ends = f"{one.low:.4g},{one.high:.4g}"
        rows.append(f"{one.arm},{one.link_gbps:g},{ends},{one.calls},{one.how}")
    return "\n".join([*rows, ""])


def read() -> list[Lead]:
    rows = csv.DictReader(TABLE.open(newline=""))
    return [
        Lead(
            r["arm"],
            float(r["link_gbps"]),
            float(r["low"]),
            float(r["high"]),
            int(r["calls"]),
            r["how"],
        )
        for r in rows
    ]


def with_speeds(page: str, found: Sequence[Lead]) -> str:
    """Return the page with the table's cells of speed as `found` has them.

    Columns are known by their head, `speed at N Gb/s`, rows by their arm's name in backquotes.
    """
    by_cell = {(one.arm, f"{one.link_gbps:g}"): one.text for one in found}
    lines, links = page.split("\n"), {}
    for i, line in enumerate(lines):
        cells = line.split(" | ")
        if at := {
            n: m[1] for n, c in enumerate(cells) if (m := re.fullmatch(r"speed at (\S+) Gb/s", c))
        }:
            links = at
        elif not line.startswith("|"):
            links = {}
        elif arm := re.match(r"\| `(\w+)`", line):
            for n, link in links.items():
                cells[n] = by_cell.get((arm[1], link), "not timed")
            lines[i] = " | ".join(cells)
    return "\n".join(lines)


# ---------------------------------------------------------------------- the figure

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 420, 56, 16, 92, 352
STYLE = """
text { font: 19px system-ui, sans-serif; fill: #374151 }
.title { font-weight: 600; font-size: 21px; fill: #101828 }
.value { font-weight: 600 }
.thick { stroke-width: 3 }
.page { fill: #ffffff } .grid { stroke: #e5e7eb } .base { stroke: #6b7280 }
"""
DARK = """
text { fill: #c9d1d9 } .title { fill: #f0f3f6 }
.page { fill: #0d1117 } .grid { stroke: #262c36 } .base { stroke: #9aa4b2 }
"""


def draw(found: Sequence[Lead]) -> str:
    """Return the figure as SVG, which is dark where the reader's screen is."""
    found = [one for one in found if one.arm in {line.arm for line in LINES}]
    links = sorted({one.link_gbps for one in found})
    top = math.ceil(max(one.high for one in found) + 0.5)
    x = {
        link: LEFT
        + 60
        + (WIDTH - LEFT - RIGHT - 120)
        * (math.log(link / links[0]) / math.log(links[-1] / links[0]) if len(links) > 1 else 0.5)
        for link in links
    }

    def y(lead: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * lead / top

    bound, several = any(one.how == BOUND for one in found), max(one.calls for one in found) > 1
    note = "bounds of two calls" if bound else "lowest and highest call" if several else "one call"
    parts = [
        text(16, 32, "Training speed, times the strongest", "title"),
        text(16, 58, "uncompressed setting", "title"),
        text(16, HEIGHT - 12, f"Gb/s between two emulated nodes; {note}"),
    ]
    for tick in range(top + 1):
        parts.append(rule("grid", (LEFT, y(tick)), (WIDTH - RIGHT, y(tick))))
        parts.append(text(LEFT - 10, y(tick) + 6, f"{tick}×", anchor="end"))
    parts += [text(x[link], BOTTOM + 24, f"{link:g}", anchor="middle") for link in links]
    parts.append(rule("base thick", (LEFT, y(1)), (WIDTH - RIGHT, y(1))))
    parts.append(text(LEFT + 16, y(1) + 24, UNCOMPRESSED))
    labels: dict[float, tuple[float, str]] = {}  # by x: the height and text of the one drawn last
    for line in LINES:
        own = sorted((o for o in found if o.arm == line.arm), key=lambda o: o.link_gbps)
        parts += drawn(line, own, x, y, labels)
    light, dark = (
        "".join(
            f".{line.arm} {{ fill: {c}; stroke: {c} }} text.{line.arm} {{ stroke: none }}\n"
            for line, c in colors
        )
        for colors in ([(one, one.light) for one in LINES], [(one, one.dark) for one in LINES])
    )
    style = f"<style>{STYLE}{light}@media (prefers-color-scheme: dark) {{{DARK}{dark}}}</style>"
    frame = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    )
    return "\n".join([head, style, frame, *parts, "</svg>", ""])


def drawn(
    line: Line,
    own: Sequence[Lead],
    x: Mapping[float, float],
    y: Callable[[float], float],
    labels: dict[float, tuple[float, str]],
) -> list[str]:
    """Return the elements of one arm: its line, a point and its ends at each link, its labels. One
    that would cover another arm's stands above the point, and is left out where both are equal."""
    middles = [(x[one.link_gbps], y(math.sqrt(one.low * one.high))) for one in own]
    joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in middles)
    parts = [f'<polyline class="{line.arm} thick" style="fill: none" points="{joined}"/>']
    for one, (a, b) in zip(own, middles, strict=True):
        parts.append(rule(f"{line.arm} thick", (a, y(one.low)), (a, y(one.high))))
        parts.append(f'<circle class="{line.arm}" cx="{a:.1f}" cy="{b:.1f}" r="5"/>')
        at, (height, other) = y(one.low) + 26, labels.get(a, (0.0, ""))
        covers = abs(at - height) < 22
        if not (covers and other == one.text):
            at = y(one.high) - 14 if covers else at
            parts.append(text(a, at, f"{one.text}×", f"{line.arm} value", "middle"))
        labels[a] = at, one.text
    (left, first), (_, last) = middles[0], middles[-1]
    parts.append(text(left + 20, min(first, last) - 14, line.label, line.arm))
    return parts


def rule(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    (a, b), (c, d) = start, end
    return f'<line class="{kind}" x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def main() -> int:
    if folders := sys.argv[1:]:
        try:
            measured = [m for folder in folders for m in read_speeds(Path(folder))]
            write_atomic(TABLE, as_csv(leads(measured)))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    found = read()
    write_atomic(FIGURE, draw(found))
    write_atomic(README, with_speeds(README.read_text(), found))
    for one in found:
        print(f"{one.arm} at {one.link_gbps:g} Gb/s: {one.text} times, {one.calls} calls {one.how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
