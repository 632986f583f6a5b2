"""The law of what bits cost (zpp_lab/tools/plan/law.py), from the reference runs.

    python experiments/reference/law.py fit STUDY...        → conf/law/reference.json;
                                                            STUDY/ARM: of that study one arm
    python experiments/reference/law.py predict STUDY...    → predicted.json: arms that never ran;
                                                            STUDY/ARM: that one alone
    python experiments/reference/law.py compare             predictions beside what was measured,
                                                            and both as predicted.svg
    python experiments/reference/law.py gaps STUDY...       LOSS.md's tables and loss.svg
    python experiments/reference/law.py scatter STUDY...    its table of gaps' scatter
    python experiments/reference/law.py tokens STUDY...     its tables of what more tokens do
    python experiments/reference/law.py steps STUDY STUDY [ARM/ARM...] [FIRST:LAST]
                                                            gaps after few and after many steps, and
                                                            each arm's exponent on steps; of all
                                                            seeds, or of those from FIRST to LAST
    python experiments/reference/law.py published           gaps that SDP4Bit's authors report

Runs are those of experiments/reference/NAME.tar.xz. `fit` takes arms with two seeds or more; both
controls stay out. `predict` keeps what predicted.json has already: a prediction is committed before
its runs, and the history shows it. `compare` has a row for each predicted arm that has run since.
`gaps` shows single codecs by wire and bits in the first study, all studies in that order, and
the law as it was fitted last.
"""

from __future__ import annotations

import json
import math
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import altair as alt
import vl_convert
from fit_law import fit

from zpp_lab.codecs import BlockCodec
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.engines.build import build_plan
from zpp_lab.files import conf_dir, write_atomic
from zpp_lab.models import build_model
from zpp_lab.runs.provenance import commit
from zpp_lab.runs.reader import read_metrics
from zpp_lab.study.judge.noise import PAIRED, taken_off
from zpp_lab.study.judge.stats import ratio_interval, t_interval
from zpp_lab.study.judge.verdict import StudyResult, read_result
from zpp_lab.study.report.figures.draw import vegalite_version
from zpp_lab.study.report.style import FONT
from zpp_lab.study.run.plan import Planner
from zpp_lab.study.words import signed
from zpp_lab.tools.plan import law

HERE = Path(__file__).parent
PREDICTED = HERE / "predicted.json"
PAGE = HERE / "LOSS.md"
WIRES = "wire, gap in nats a token"  # the page's tables, by how they begin: of single codecs,
ARMS = "arm, gap in nats a token (seeds)"  # of the others,
SCATTER = "arm | standard deviation of its gaps"  # of how far gaps scatter,
READ = "arm, gap on held-out and on training text"  # after more tokens,
ERRORS = "NMSE of gradients between nodes"  # and of why
END = 0.1  # of a run: its last steps, whose training loss is taken together
BITS = (8, 6, 4, 3, 2)
CODECS = {  # rows of WIRES and their arms
    **{f"weights, blocks of {n:,}": f"w{{}}_{n}_symmetric" for n in (32, 64, 256, 2048)},
    **{f"the same with a zero point, {n:,}": f"w{{}}_{n}_asymmetric" for n in (32, 64, 256, 2048)},
    "weights, blocks of 256, stochastic": "w{}_stochastic",
    "gradients, one hop": "g{}_one_hop_plain",
    "gradients, one hop, rotated": "g{}_one_hop_hadamard",
    "gradients, two hops": "g{}_two_hops_plain",
    "gradients, two hops, rotated": "g{}_two_hops_hadamard",
}
BY_BITS = {  # lines of loss.svg: rows of CODECS, then arms; what they are called there, colours
    "weights, blocks of 256": ("weights, blocks of 256", "#0b6eff", "#6aa8ff"),
    "the same with a zero point, 32": (
        "weights, zero point, blocks of 32",
        "#117733",
        "#5ad87e",
    ),
    "gradients, two hops": ("gradients, two hops", "#b45309", "#f5a524"),
    "gradients, one hop": ("gradients, one hop", "#aa4499", "#e59bd9"),
}
BY_SIZE = {
    "w2_256_symmetric": ("2-bit weights", "#332288", "#9d8cf0"),  # no colour of BY_BITS
    "g2_one_hop_plain": ("2-bit gradients", "#882255", "#e07aa8"),
    "w3_256_symmetric": ("3-bit weights", "#0f766e", "#5eead4"),
    "w4_256_symmetric": ("4-bit weights", "#8a6d00", "#e3c44f"),
    "zeropp": ("ZeRO++", "#c21b0d", "#ff8a7a"),
    "g8_4_hadamard": ("8- and 4-bit gradients", "#6b7280", "#9aa4b2"),
}
GAP = "loss gap (nats a token)"
SIZE_AXIS = alt.Axis(values=[3, 10, 30, 100, 300], format="~g", grid=False)
SHOWN = {  # studies in predicted.svg: what they are called, their colour, and it on a dark screen
    "reference_10m": ("13.8M", "#0b6eff", "#6aa8ff"),
    "reference_10m_12m": ("13.8M, 12M tokens", "#6b7280", "#9aa4b2"),
    "reference_10m_200m": ("13.8M, 197M tokens", "#aa4499", "#e59bd9"),
    "reference_30m": ("32.7M", "#c21b0d", "#ff8a7a"),
    "reference_134m": ("133M", "#117733", "#5ad87e"),
    "reference_368m": ("367M", "#b45309", "#f5a524"),
    "reference_10m_prose": ("13.8M, prose", "#0f766e", "#5eead4"),
    "normal": ("13.8M, normal levels", "#7c3aed", "#c4b5fd"),
}
VOCABULARY = 4096  # of tokenizer.json: the data need not be there
# Jia et al. 2024, arXiv 2410.15526: gaps after 41.9e9 tokens of the Pile by GPT's size, one run
DIRECT, GRADS, ROTATED = (0.279, 0.187, 0.118), (0.0109, 0.0083, 0.0230), (0.0014, 0.0019, 0.0036)
GPT = {"125M": 12 * 12 * 768**2, "350M": 24 * 12 * 1024**2, "1.3B": 24 * 12 * 2048**2}  # in blocks

FIGURE = {
    "font": FONT,
    "background": "#ffffff",
    "padding": {"left": 12, "right": 20, "top": 12, "bottom": 12},
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 15,
        "titleFontSize": 15,
        "titleFontWeight": "normal",
        "titlePadding": 10,
        "labelColor": "#374151",
        "titleColor": "#374151",
        "gridColor": "#e8eaee",
        "domainColor": "#9ca3af",
        "tickColor": "#9ca3af",
    },
    "title": {
        "anchor": "start",
        "frame": "group",
        "fontSize": 18,
        "color": "#101828",
        "subtitleFontSize": 15,
        "subtitleColor": "#374151",
        "offset": 12,
    },
}
DARK = {  # what the figure's colours are on a dark screen
    "#ffffff": "#0d1117",
    "#101828": "#f0f3f6",
    "#374151": "#c9d1d9",
    "#e8eaee": "#262c36",
    "#9ca3af": "#6e7681",
}


def main() -> int:
    command, *studies = sys.argv[1:]
    if command == "fit":
        found = fit(cells_of(studies))
        path = conf_dir() / "law" / "reference.json"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(asdict(found), indent=1) + "\n")
        for i, (name, value) in enumerate(zip(law.NAMES, found.values, strict=True)):
            print(f"{name:6} {value:+.3f} ± {math.sqrt(found.covariance[i][i]):.3f}")
        print(f"misfit {found.misfit:.1%} of a gap, {found.cells} cells")
        for study in studies:
            show(found, cells_of([study]))
    elif command == "predict":
        predict(studies)
    elif command == "compare":
        compare()
    elif command == "gaps":
        gaps(studies)
    elif command == "scatter":
        scatter(studies)
    elif command == "tokens":
        tokens(studies)
    elif command == "steps":
        pairs = [word.split("/") for word in studies[2:] if "/" in word]
        ends = [tuple(map(int, word.split(":"))) for word in studies[2:] if ":" in word]
        seeds = range(ends[0][0], ends[0][1] + 1) if ends else None
        print(by_steps(studies[0], studies[1], pairs, seeds))
    elif command == "published":
        beside_published()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def cells(study: StudyConfig) -> Iterator[law.Cell]:
    """Of every arm that is no control and of which the law says something, without a gap."""
    arms = {arm.name: study.seeds[:1] for arm in study.arms if arm.role == "arm"}
    with tempfile.TemporaryDirectory() as nowhere:
        for run in Planner(study, Path(nowhere), compose).plan(arms):
            model = build_model(run.config.model, VOCABULARY, "meta")
            plan = build_plan(model, run.config)
            if not law.covers(run.config, plan):
                continue
            yield law.Cell(run.arm, law.Errors.of(plan), *law.extent(run.config, plan), 0.0, 1.0)


def cells_of(words: Iterable[str]) -> list[law.Cell]:
    """The measured cells of STUDY, or of STUDY/ARM that one alone."""
    return [
        cell
        for study, _, arm in (word.partition("/") for word in words)
        for cell in measured(study)
        if arm in ("", cell.name.split("/")[1])
    ]


def measured(name: str) -> list[law.Cell]:
    """Arms with two seeds or more. A gap's scatter over few seeds may be small by chance: none
    counts as smaller than that of half of the arms."""
    gaps = {arm: values for arm, values in kept_gaps(name).items() if len(values) >= 2}
    if not any(any(values) for values in gaps.values()):  # the baseline alone, or nothing
        return []
    usual = median(stdev(values) for values in gaps.values() if any(values))
    return [
        law.Cell(
            f"{name}/{cell.name}",
            cell.errors,
            cell.parameters,
            cell.tokens,
            cell.steps,
            fmean(gaps[cell.name]),
            max(stdev(gaps[cell.name]), usual) / math.sqrt(len(gaps[cell.name])),
        )
        for cell in cells(load_study(name))
        if cell.name in gaps
    ]


@cache
def kept(name: str) -> StudyResult | None:
    """A study's kept runs, judged; None where it has not run. Their folders are gone."""
    if not (HERE / f"{name}.tar.xz").is_file():
        return None
    with unpacked(name) as folder:
        return read_result(folder)


@contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """The folder of a study's kept runs, for as long as it is used."""
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(HERE / f"{name}.tar.xz") as tar:
            tar.extractall(temporary, filter="data")
        yield Path(temporary, name)


def kept_gaps(name: str) -> dict[str, list[float]]:
    """Of each arm that has run, seed by seed, nats a token; {} where the study has not run."""
    result = kept(name)
    return {a.name: list(a.gaps.values()) for a in result.arms if a.gaps} if result else {}


def gaps(studies: list[str]) -> None:
    """Mean, 95 % interval over seeds alone (Student's t) and seeds; arms with one seed are left
    out. A table of single codecs in the first study, with the report's verdicts, one of all arms
    that are none or ran in another study, by the gap in the first that has them, and the figure."""
    first = kept(studies[0])
    if first is None:
        raise ValueError(f"{studies[0]} has not run")
    singles = {
        arm.name: f"{interval(list(arm.gaps.values()))}, {arm.verdict}"
        for arm in first.arms
        if len(arm.gaps) > 1
    }
    rows = {
        wire: {f"{bits} bits": singles.get(name.format(bits), "") for bits in BITS}
        for wire, name in CODECS.items()
    }
    show_table(WIRES, rows)

    every = [kept_gaps(study) for study in studies]
    roles = {arm.name: arm.role for study in studies for arm in load_study(study).arms}
    told: dict[str, float] = {}
    for found in every:
        told = {arm: fmean(values) for arm, values in found.items() if len(values) > 1} | told
    rows = {}
    shown = {name.format(bits) for name in CODECS.values() for bits in BITS}
    for arm, _ in sorted(told.items(), key=lambda item: item[1]):
        elsewhere = any(len(found.get(arm, [])) > 1 for found in every[1:])
        if roles[arm] == "baseline" or (arm in shown and not elsewhere):
            continue
        role = "" if roles[arm] == "arm" else f" ({roles[arm].replace('_', ' ')})"
        cells = [interval(found.get(arm, [])) for found in every]
        rows[f"{arm}{role}"] = dict(zip(studies, cells, strict=True))
    show_table(ARMS, rows)
    write_atomic(HERE / "loss.svg", draw_gaps(dict(zip(studies, every, strict=True))))


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = t_interval(values, 0.95)
    return f"{signed(fmean(values))} ± {(high - low) / 2:.4f} ({len(values)})"


def scatter(studies: list[str]) -> None:
    """How far gaps scatter over seeds, and how much of the noise pairing by seed takes off, of arms
    with eight seeds or more, by their scatter. Runs that two studies share have one row."""
    rows: dict[str, str] = {}
    base = None  # the first study's baseline of seed 1; arms with another are called by their study
    for study in studies:
        result = kept(study)
        if result is None:
            raise ValueError(f"{study} has not run")
        own = next(run.heldout_loss for run in result.baseline.finished if run.seed == 1)
        base = base or own
        for arm in result.arms:
            values = list(arm.gaps.values())
            if len(values) >= PAIRED and arm.arm.role not in ("baseline", "negative_control"):
                off = f"{100 * taken_off(result, arm):.0f} %".replace("-", "−")
                told = f"{stdev(values):.5f} | {off} | {interval(values)}"
                rows[arm.name if base == own else f"{study}/{arm.name}"] = told
    lines = [f"| {SCATTER} | noise that pairing takes off | gap (seeds) |", "|---|---|---|---|"]
    by_scatter = sorted(rows.items(), key=lambda row: float(row[1].split()[0]))
    made = "\n".join([*lines, *(f"| {name} | {told} |" for name, told in by_scatter)])
    renew(PAGE, SCATTER, made)
    print(made)


def tokens(studies: list[str]) -> None:
    """Of the last study's arms but its negative control, in each study: the mean gap on held-out
    text and that of the training loss's last steps, with their 95 % interval over seeds alone; how
    much larger the first is in the last study than in the first, paired by seed; and the error that
    bits make in gradients between nodes, by class, as telemetry saw it last: mean over seeds."""
    arms = [arm.name for arm in load_study(studies[-1]).arms if arm.role != "negative_control"]
    found: dict[str, dict[str, str]] = {arm: {} for arm in arms}
    errors: dict[str, dict[str, str]] = {arm: {} for arm in arms}
    for study in studies:
        with unpacked(study) as folder:
            result = read_result(folder)
            text = " of prose" if study.endswith("_prose") else ""
            name = f"{result.baseline.finished[0].summary['tokens'] / 1e6:.0f}M{text}"
            base = {run.seed: trained(run.dir) for run in result.baseline.finished}
            held = fmean(run.heldout_loss for run in result.baseline.finished)
            print(f"plain after {name}: {fmean(base.values()):.2f}, held out {held:.2f}")
            for arm in (a for a in result.arms if a.name in arms and a.gaps):
                ends = [trained(r.dir) - base[r.seed] for r in arm.finished if r.seed in base]
                found[arm.name][f"{name}, held out"] = interval(list(arm.gaps.values()))
                found[arm.name][f"{name}, trained on"] = interval(ends)
                seen = [last_errors(run.dir) for run in arm.finished]
                if all(seen):
                    errors[arm.name] |= {
                        f"{name}, {c}": f"{fmean(one[c] for one in seen):.3f}" for c in seen[0]
                    }
    first, last = (
        {a.name: a.gaps for a in r.arms} for s in (studies[0], studies[-1]) if (r := kept(s))
    )
    for arm in arms:
        both = first[arm].keys() & last[arm].keys()
        found[arm]["growth, held out"] = interval([last[arm][s] - first[arm][s] for s in both])
    show_table(READ, {arm: found[arm] for arm in arms if arm != result.baseline.name})
    show_table(ERRORS, {arm: row for arm, row in errors.items() if row})


def by_steps(
    first: str, last: str, pairs: Sequence[Sequence[str]] = (), seeds: range | None = None
) -> str:
    """A table of two studies that differ in their steps: of each arm of both the mean gap with its
    95 % interval over seeds alone (Student's t) and n, the growth paired by seed, and the exponent
    on steps. Then a row for each pair of arms, the first less the second, paired by seed. With
    `seeds` of these alone: a prediction that rests on some seeds is tested by the others."""
    found = [gaps_by_seed(name) for name in (first, last)]
    if not all(found):
        raise ValueError(f"{first} and {last}: one has no kept gaps; keep.py puts runs there")
    steps = [steps_of(name) for name in (first, last)]
    rows = {arm: [gaps[arm] for gaps in found] for arm in found[1] if arm in found[0]}
    if seeds is not None:
        rows = {
            arm: [{seed: gap for seed, gap in gaps.items() if seed in seeds} for gaps in own]
            for arm, own in rows.items()
        }
    for one, other in pairs:
        rows[f"{one} less {other}"] = [paired(rows[one][i], rows[other][i]) for i in (0, 1)]
    head = ["arm", *(f"{n:,} steps" for n in steps), "growth, paired", "exponent on steps, 95 %"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---|' * (len(head) - 1)}"]
    for name, (few, many) in rows.items():
        cells = [interval(list(gaps.values())) for gaps in (few, many, paired(many, few))]
        lines.append(f"| {' | '.join([name, *cells, exponent(few, many, steps[1] / steps[0])])} |")
    return "\n".join(lines)


def gaps_by_seed(name: str) -> dict[str, Mapping[int, float]]:
    """Of each arm but the baseline that has run; {} where the study has not run."""
    result = kept(name)
    arms = result.arms if result else []
    return {arm.name: arm.gaps for arm in arms if arm.gaps and arm.arm.role != "baseline"}


def steps_of(name: str) -> int:
    study = load_study(name)
    return compose(study.overrides).train.steps


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The first less the second, of the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def exponent(few: Mapping[int, float], many: Mapping[int, float], times: float) -> str:
    """Of steps in a gap: log(many / few) / log(times), with the 95 % interval of the ratio of both
    means over the seeds that they share. Empty where fewer than three are shared, or where a mean
    or an end of the interval is not positive, so that it has no logarithm."""
    seeds = sorted(few.keys() & many.keys())
    if len(seeds) < 3:
        return ""
    before, after = ([gaps[seed] for seed in seeds] for gaps in (few, many))
    try:
        low, high = ratio_interval(after, before)
    except ValueError:
        return ""
    middle = fmean(after) / fmean(before)
    if min(low, middle) <= 0:
        return ""
    ends = [math.log(x) / math.log(times) for x in (middle, low, high)]
    return "{:+.2f} ({:+.2f} to {:+.2f})".format(*ends).replace("-", "−")


def trained(folder: Path) -> float:
    """Mean training loss of a run's last steps, of those that were kept."""
    rows = [row for row in read_metrics(folder) if "loss" in row]
    last = rows[-1]["step"]
    return fmean(row["loss"] for row in rows if row["step"] > (1 - END) * last)


def last_errors(folder: Path) -> dict[str, float]:
    """NMSE of gradients between nodes by class; {} where they travel whole."""
    seen = [row["telemetry"] for row in read_metrics(folder) if "telemetry" in row]
    found = seen[-1].get("grads_inter", {}) if seen else {}
    return {name: values["nmse"] for name, values in found.items()}


def show_table(head: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| {head} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |")
    made = "\n".join(lines)
    renew(PAGE, head, made)
    print(made)


def renew(page: Path, head: str, made: str) -> None:
    """Puts a table in the place of the page's that begins with the column `head`. ValueError
    unless there is one."""
    lines = page.read_text().split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(f"| {head} |")]
    if len(starts) != 1:
        raise ValueError(f"{page}: {len(starts)} tables begin with '| {head} |', where one should")
    end = next(i for i in range(starts[0], len(lines)) if not lines[i].startswith("|"))
    write_atomic(page, "\n".join([*lines[: starts[0]], made, *lines[end:]]))


def predict(words: list[str]) -> None:
    known = json.loads(PREDICTED.read_text()) if PREDICTED.is_file() else {}
    published = law.load_law()
    for study, _, arm in (word.partition("/") for word in words):
        there = {c.name for c in measured(study)}
        for cell in cells(load_study(study)):
            name = f"{study}/{cell.name}"
            if arm in ("", cell.name) and name not in there and name not in known:
                told = published.predict(cell.errors, cell.parameters, cell.tokens, cell.steps)
                known[name] = asdict(told) | {"commit": commit()}
                print(f"{name:36} {told.gap:+.4f}  {told.low:+.4f} to {told.high:+.4f}")
    write_atomic(PREDICTED, json.dumps(known, indent=1) + "\n")


@dataclass(frozen=True)
class Hit:
    """A prediction and the gaps that were measured since, seed by seed. A right prediction of a
    true gap is missed by what was measured of it, which scatters: so hits are counted twice."""

    cell: law.Cell
    told: Mapping[str, Any]
    seeds: Sequence[float]

    @property
    def plain(self) -> bool:
        """Whether the gap lies inside the predicted interval."""
        return bool(self.told["low"] <= self.cell.gap <= self.told["high"])

    @property
    def widened(self) -> bool:
        """Whether it does once the interval is widened by the measured gap's own error."""
        side = "high" if self.cell.gap > self.told["gap"] else "low"
        return self._near(self.told["gap"], self.told[side] - self.told["gap"])

    @property
    def zero(self) -> bool:
        """Whether 0, give or take what the order of sums moves, would have been right too."""
        return self._near(0.0, law.QUANTILE * law.FLOOR)

    def _near(self, gap: float, reach: float) -> bool:
        return abs(self.cell.gap - gap) <= math.hypot(reach, law.QUANTILE * self.cell.error)

    @property
    def distinguishable(self) -> bool:
        """Whether the 95 % interval over seeds (Student's t) leaves out 0."""
        low, high = t_interval(self.seeds, 0.95)
        return low > 0 or high < 0

    @property
    def fitted_text(self) -> bool:
        """Whether it ran on the text that the formula is fitted to, on no more tokens."""
        return "_prose/" not in self.cell.name and self.cell.tokens < 1.1 * law.TOKENS


def compare() -> None:
    """Print each prediction and the hit rates. Arms that are distinguishable from 0 are counted
    apart: where they are not, a prediction of 0 is right as well, so a hit says little."""
    known = json.loads(PREDICTED.read_text())
    studies = sorted({name.split("/")[0] for name in known})
    hits = [
        Hit(cell, known[cell.name], kept_gaps(study)[cell.name.split("/")[1]])
        for study in studies
        for cell in measured(study)
        if cell.name in known
    ]
    for hit in hits:
        cell, told = hit.cell, hit.told
        print(
            f"{cell.name:36} predicted {told['gap']:+.4f}, {told['low']:+.4f} to "
            f"{told['high']:+.4f}; measured {cell.gap:+.4f} ± {cell.error:.4f}"
            f"{'' if hit.widened else '  OUTSIDE'}"
        )
    if not hits:
        print("none of the predicted arms has run")
        return
    for name, some in by_split(hits).items():
        print(f"{name}: {hit_rates(some)}")
    write_atomic(HERE / "predicted.svg", draw([(hit.cell, hit.told) for hit in hits]))


def by_split(hits: Sequence[Hit]) -> dict[str, list[Hit]]:
    fitted = [hit for hit in hits if hit.fitted_text]
    return {
        "Python source, up to 49M tokens, not distinguishable from 0": [
            hit for hit in fitted if not hit.distinguishable
        ],
        "Python source, up to 49M tokens, distinguishable from 0": [
            hit for hit in fitted if hit.distinguishable
        ],
        "Other text or more tokens": [hit for hit in hits if not hit.fitted_text],
        "All": list(hits),
    }


def hit_rates(hits: Sequence[Hit]) -> str:
    if not hits:
        return "no arms"
    off = [abs(hit.told["gap"] - hit.cell.gap) / abs(hit.cell.gap) for hit in hits]
    above = sum(hit.cell.gap > hit.told["gap"] for hit in hits)
    return (
        f"{sum(hit.widened for hit in hits)} of {len(hits)} inside 90 % intervals and the measured "
        f"gaps' own error, {sum(hit.plain for hit in hits)} without that; a prediction of 0 scores "
        f"{sum(hit.zero for hit in hits)}; median error {median(off):.0%}, {above} above the "
        "prediction"
    )


def beside_published() -> None:
    """What SDP4Bit's authors report, and what the law says of it. Their direct weights have groups
    of 2,048; whether they round stochastically, as their differences do, is not known, so both are
    said. Blocks and rotations of gradients are those of reference_10m."""
    ours, published = {c.name: c.errors for c in cells(load_study("reference_10m"))}, law.load_law()
    random = law.nmse(BlockCodec(bits=4, block_size=2048, rounding="stochastic"), False)
    rows = (
        ("direct 4-bit weights, if stochastic", DIRECT, law.Errors(random, 0.0, 1.0)),
        ("direct 4-bit weights, if to nearest", DIRECT, ours["w4_2048_symmetric"]),
        ("8- and 4-bit gradients", GRADS, ours["g8_4_plain"]),
        ("the same, rotated", ROTATED, ours["g8_4_hadamard"]),
    )
    print(f"| after 41.9e9 tokens, reported; the law, 90 % | {' | '.join(GPT)} |")
    print("|---|---|---|---|")
    for arm, reported, errors in rows:
        row = []
        for parameters, gap in zip(GPT.values(), reported, strict=True):
            told = published.predict(errors, parameters, 41.9e9, 80_000)  # 524,288 tokens a step
            ends = f"{signed(told.low)} to {signed(told.high)}"
            row.append(f"{signed(gap)}; {signed(told.gap)} ({ends})")
        print(f"| {arm} | {' | '.join(row)} |")


def draw(rows: Sequence[tuple[law.Cell, Mapping[str, Any]]]) -> str:
    """Measured over predicted gaps, with both 90 % intervals, as SVG."""
    points = [
        {"study": SHOWN[cell.name.split("/")[0]][0], "x": told["gap"], "y": cell.gap}
        | {"left": told["low"], "right": told["high"]}
        | {
            "low": cell.gap - law.QUANTILE * cell.error,
            "high": cell.gap + law.QUANTILE * cell.error,
        }
        for cell, told in rows
    ]
    looks = [look for look in SHOWN.values() if any(p["study"] == look[0] for p in points)]
    ticks = [-0.1, -0.03, -0.01, -0.003, 0, 0.003, 0.01, 0.03, 0.1, 0.3]
    scale = {"type": "symlog", "constant": 0.003, "nice": False}
    x = alt.X(
        "x:Q",
        title=f"predicted {GAP}",
        scale=alt.Scale(domain=[-0.002, 1.1], **scale),
        axis=alt.Axis(values=[t for t in ticks if t >= 0], format="~g", grid=False),
    )
    y = alt.Y(
        "y:Q",
        title=f"measured {GAP}",
        scale=alt.Scale(domain=[-0.12, 1.1], **scale),
        axis=alt.Axis(values=ticks, format="~g"),
    )
    color = alt.Color(
        "study:N",
        scale=alt.Scale(domain=[look[0] for look in looks], range=[look[1] for look in looks]),
        legend=alt.Legend(
            title=None, orient="bottom", columns=3, labelFontSize=14, labelColor="#374151"
        ),
    )
    every = alt.Chart(alt.Data(values=points)).encode(x=x, y=y, color=color)
    ends = [{"x": v, "y": v} for v in (-0.002, *(0.001 * 1.3**i for i in range(27)))]
    equal = alt.Chart(alt.Data(values=ends)).mark_line(color="#9ca3af", strokeDash=[4, 4])
    layers = [
        equal.encode(x=x, y=y),
        every.mark_rule(opacity=0.45).encode(
            x=alt.X("left:Q", title=f"predicted {GAP}"), x2="right:Q"
        ),
        every.mark_rule(opacity=0.45).encode(
            y=alt.Y("low:Q", title=f"measured {GAP}"), y2="high:Q"
        ),
        every.mark_point(size=60, filled=True, opacity=1),
    ]
    title = {
        "text": "Predicted and measured loss gaps",
        "subtitle": "bars: 90 % intervals; dashed: equal",
    }
    chart = alt.layer(*layers).properties(width=450, height=390, title=title)
    return figure(chart, {light: dark for _, light, dark in looks})


def draw_gaps(every: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Gaps of studies, by seed: by bits in the first of them, and by size beside the published law
    in all with as many tokens, as SVG."""
    first, published = next(iter(every)), law.load_law()
    sizes = {cell.name: cell for study in every for cell in measured(study)}
    bits, points, lines = [], [], []
    for wire, (name, *_) in BY_BITS.items():
        for n in BITS:
            if len(values := every[first].get(CODECS[wire].format(n), [])) > 1:
                bits.append({"name": name, "x": n} | spread(values))
    for arm, (name, *_) in BY_SIZE.items():
        like = sizes[f"{first}/{arm}"]
        for study, found in every.items():
            cell = sizes.get(f"{study}/{arm}")
            if cell and cell.tokens == like.tokens:
                points.append({"name": name, "x": cell.parameters / 1e6} | spread(found[arm]))
        for x in (2.5 * 1.25**i for i in range(24)):
            y = published.predict(like.errors, x * 1e6, like.tokens, like.steps).gap
            lines.append({"name": name, "x": x, "y": y})
    by_bits = panel(
        alt.X("x:O", title="bits a number", sort=[*BITS], axis=alt.Axis(labelAngle=0)),
        BY_BITS.values(),
        [("line", bits), ("rule", bits), ("point", bits)],
    ).properties(title=headed("By bits", "13.8M parameters; one wire alone"))
    size = alt.Scale(type="log", domain=[2.3, 460], nice=False)
    by_size = panel(
        alt.X("x:Q", title="million parameters in blocks", scale=size, axis=SIZE_AXIS),
        BY_SIZE.values(),
        [("line", lines), ("rule", points), ("point", points)],
    ).properties(title=headed("By size", "lines: the fitted formula"))
    dark = {light: dark for _, light, dark in (*BY_BITS.values(), *BY_SIZE.values())}
    return figure((by_bits & by_size).resolve_scale(color="independent"), dark)


def headed(title: str, more: str) -> dict[str, Any]:
    return {"text": title, "subtitle": [more, "upright lines: 95 % intervals"]}


def spread(values: list[float]) -> dict[str, float]:
    low, high = t_interval(values, 0.95)
    return {"y": fmean(values), "low": low, "high": high}


def panel(
    x: alt.X, looks: Iterable[tuple[str, str, str]], layers: list[tuple[str, list[dict[str, Any]]]]
) -> alt.LayerChart:
    """Gaps over `x`, a colour for each name; linear up to 0.002 nats, logarithmic beyond."""
    names, colors, _ = zip(*looks, strict=True)
    scale = alt.Scale(type="symlog", constant=0.002, domain=[-0.005, 1], nice=False)
    ticks = [0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
    axis = alt.Axis(values=ticks, format="~g")
    low = alt.Y("low:Q", title=GAP, scale=scale, axis=axis)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=2,
        columnPadding=40,
        labelFontSize=14,
        labelLimit=260,
        labelColor="#374151",
    )
    color = alt.Color(
        "name:N",
        scale=alt.Scale(domain=names, range=colors),
        legend=legend,
    )
    marks = {
        "line": {"opacity": 0.6},
        "rule": {"opacity": 0.5, "clip": True},  # two seeds leave wide intervals
        "point": {"filled": True},
    }
    charts = []
    for mark, values in layers:
        chart = alt.Chart(alt.Data(values=values)).encode(x=x, color=color)
        chart = (
            chart.encode(y=low, y2="high:Q")
            if mark == "rule"
            else chart.encode(y=alt.Y("y:Q", title=GAP, scale=scale, axis=axis))
        )
        charts.append(getattr(chart, f"mark_{mark}")(**marks[mark]))
    return alt.layer(*charts).properties(width=450, height=320)


def figure(chart: alt.LayerChart | alt.VConcatChart, colors: Mapping[str, str]) -> str:
    """As SVG, dark where the screen is. colors: the chart's own, and what they are then."""
    svg = vl_convert.vegalite_to_svg(
        chart.to_dict() | {"config": FIGURE}, vl_version=vegalite_version()
    )
    rules = "".join(
        f'[{kind}="{light}"]{{{kind}:{dark}}}'
        for light, dark in {**DARK, **colors}.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    head, tail = svg.split(">", 1)
    return f"{head}>{style}{tail}\n"


def show(found: law.Law, of: list[law.Cell]) -> None:
    for cell in of:
        told = found.predict(cell.errors, cell.parameters, cell.tokens, cell.steps)
        print(
            f"{cell.name:36} NMSE {cell.errors.weights:.2e} {cell.errors.grads:.2e}  measured "
            f"{cell.gap:+.4f} ± {cell.error:.4f}  law {told.gap:+.4f}"
        )


if __name__ == "__main__":
    sys.exit(main())
