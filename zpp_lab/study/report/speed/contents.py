"""What a report says of measured speeds: sections, tables and sentences, and the same as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from zpp_lab.study.report.sections import (
    Document,
    Figure,
    Row,
    Section,
    Table,
    Terms,
    Text,
    numbers,
    words,
)
from zpp_lab.study.speed.results import BASE, Measured, Predict, Predicted, Setting, labels
from zpp_lab.study.speed.speeds import (
    FASTER,
    BreakEven,
    SpeedUp,
    StudySpeeds,
    break_evens,
    gbps_text,
    speed_ups,
    without_base,
    without_hsdp,
    without_twin,
)
from zpp_lab.study.words import NOTHING, number, percent

TITLE = "Speed on links between nodes"
QUESTION = "On this network, which recipe is faster, and by how much?"
_PLACE = ("model", "nodes", "gpus_per_node", "ranks_per_gpu")
_CSV = (
    *_PLACE,
    "link_gbps",
    "bandwidth_gbps",
    "arm",
    "engine",
    "recipe",
    "tokens_per_s",
    "speedup",
    "speedup_slowest_step",
    "speedup_fastest_step",
    "floor_s",
    "share_of_floor",
    "over_deepspeed",
    "predicted_tokens_per_s",
    "base",
    "twin",
    "over_twin",
    "twin_over_base",
)
_BREAKS = (*_PLACE, "arm", "from_gbps", "to_gbps", "break_even_gbps", "faster")
_Peers = dict[tuple[Setting, str], float]
_Speeds = dict[tuple[Setting, str, float | None], float]


@dataclass(frozen=True)
class SpeedFindings:
    """All that a page on speed shows, worked out once."""

    measured: Sequence[Measured]
    ups: Sequence[SpeedUp]
    breaks: Sequence[BreakEven]
    names: dict[Setting, str]
    alone: Sequence[Setting]  # without a plain arm
    predicted: Sequence[Predicted] = ()
    faults: Sequence[str] = ()  # why an arm has no prediction

    @property
    def arms(self) -> list[str]:
        """The base first, then in the table's order."""
        names = dict.fromkeys(m.arm for m in self.measured)
        return sorted(names, key=lambda arm: arm != BASE)


def find_speeds(measured: Sequence[Measured], predict: Predict | None = None) -> SpeedFindings:
    """Return speed-ups, break-even bandwidths and names of settings of what was measured."""
    ups, names = speed_ups(measured), labels(measured)
    predicted, faults = predict(measured) if predict else ([], [])
    alone = without_base(measured)
    return SpeedFindings(measured, ups, break_evens(ups), names, alone, predicted, faults)


def speed_document(found: SpeedFindings, figures: Sequence[Figure]) -> Document:
    """Return the whole page."""
    files = "The same numbers are in `speedup.csv` and `break_even.csv`."
    sections = [
        Section("", "opening", [opening(found.measured)]),
        Section("What is fastest", "fastest", [Text(headlines(found), "list")]),
        Section("Notes", "notes", [Text(notes(found), "list")]),
        Section("Figures", "figures", figures),
        Section("Break-even", "break-even", [break_even_table(found)]),
        Section("Speeds", "every-speed", [speed_table(found), Text([files], soft=True)]),
        Section("How it is worked out", "method", [Text(speed_method())]),
    ]
    return Document("zpp_lab bench step", TITLE, QUESTION, sections)


def opening(measured: Sequence[Measured]) -> Terms:
    """Return the page's first lines."""
    machines = dict.fromkeys(m.machine for m in measured if m.machine)
    batches = dict.fromkeys(
        f"{m.setting.batch_size} × {m.setting.seq_len} tokens"
        for m in measured
        if m.setting.seq_len
    )
    pairs = [
        ("Machine", "; ".join(machines) or "not in the table"),
        ("Models", ", ".join(dict.fromkeys(m.setting.model for m in measured)) or "unknown"),
        ("Batch of a GPU", "; ".join(batches) or "not in the table"),
        (
            "Compared with",
            "the strongest plain arm of the same call (FSDP2 with its defaults, resharded to the "
            "node, or with copies across nodes), and each arm's raw twin.",
        ),
    ]
    return Terms(pairs)


def speed_table(found: SpeedFindings) -> Table:
    """Return one row a measurement."""
    ups, shown = _by_point(found), _predictions(found.predicted)
    peers = _peers(found.measured)
    columns = ["Tokens/s", "Speed-up", "Of single steps"]
    paired = any(one.twin for one in found.ups)
    columns += ["Over twin", "Twin over plain"] if paired else []
    columns += [*(["Over DeepSpeed"] if peers else []), "Floor (s)", "Of the floor"]
    waited = any(m.waiting_s is not None for m in found.measured)
    columns += ["Step (s)", *(["Host waits (s)"] if waited else []), "Peak (GiB)"]
    columns += ["Predicted tokens/s", "Off by"] if shown else []
    rows = []
    for m in found.measured:
        cells = [m.arm, found.names[m.setting], m.place, f"{m.tokens_per_s:,.0f}"]
        cells += _up_cells(ups.get(id(m)))
        cells += _twin_cells(ups.get(id(m))) if paired else []
        over = _over(m, peers)
        cells += [NOTHING if over is None else f"{over:.2f}×"] if peers else []
        cells += [number(m.floor_s, ".4g"), percent(m.share_of_floor)]
        cells += [number(m.step_s, ".4g"), *([number(m.waiting_s, ".3g")] if waited else [])]
        cells += [number(m.peak_gib, ".2f")]
        cells += _predicted_cells(_predicted(shown, m), m) if shown else []
        rows.append(Row(cells, m.arm))
    every = [*words("Arm", "Measured", "Link"), *numbers(*columns)]
    return Table("speeds", "Every measured speed", every, rows)


def break_even_table(found: SpeedFindings) -> Table:
    """Show for which bandwidths each arm is faster than the strongest plain arm."""
    rows = [
        Row([b.arm, found.names[b.setting], f"{_range(b.slowest, b.fastest)} Gb/s", b.text], b.arm)
        for b in found.breaks
    ]
    columns = words("Arm", "Measured", "At", "Against the strongest plain arm")
    return Table("breaks", "Break-even bandwidth", columns, rows)


def match_table(speeds: StudySpeeds, order: Sequence[str]) -> Table:
    """Return which measurement an arm of the study has, and why another has none."""
    rows = []
    for arm in order:
        if arm in speeds.matches:
            rows.append(Row([arm, ", ".join(speeds.matches[arm])], arm))
        elif arm in speeds.missing:
            rows.append(Row([arm, f"no measurement: {speeds.missing[arm]}"], arm))
    return Table("matches", "Arms and their measured speeds", words("Arm", "Measured as"), rows)


def headlines(found: SpeedFindings) -> list[str]:
    """Return the fastest arm at every link, in the table's order, one sentence each."""
    groups: dict[str, list[SpeedUp]] = {}
    for one in found.ups:
        groups.setdefault(f"{one.at.place} ({found.names[one.at.setting]})", []).append(one)
    return [_headline(place[0].upper() + place[1:], ups) for place, ups in groups.items()]


def notes(found: SpeedFindings) -> list[str]:
    """Return what the figures could not use, and what a column means that not all tables have."""
    lines = [
        f"{found.names[setting]}: plain FSDP2 was not measured, so nothing is known of speed-ups; "
        f"add the arm {BASE}."
        for setting in found.alone
    ]
    bare = {m.link for m in found.measured if m.setting.nodes > 1 and m.gbps is None}
    if bare:
        lines.append(
            "Links without a limit whose own speed was not measured have no place on the axis of "
            "bandwidths and no part in the break-even."
        )
    if any(m.waiting_s is not None for m in found.measured):
        lines.append(
            "Host waits: how much of a step the host, with everything asked for, waited for the "
            "device; near 0 the host was what bounded the step."
        )
    return [*lines, *_unpaired(found), *_calls(found), *_shared(found), *found.faults]


def _unpaired(found: SpeedFindings) -> list[str]:
    """Arms without a twin, and calls without HSDP: what their speed-ups do not tell."""
    lines = [
        f"{found.names[setting]}: timed without a raw twin: {', '.join(arms)}. What their bits "
        "bring cannot be distinguished from what their partition brings."
        for setting, arms in without_twin(found.measured).items()
    ]
    alone = [found.names[setting] for setting in without_hsdp(found.measured)]
    if alone:
        lines.append(
            f"{'; '.join(alone)}: HSDP was not timed in every call, so a stronger plain arm may be "
            "missing there."
        )
    return lines


def _calls(found: SpeedFindings) -> list[str]:
    """Which settings were measured in several calls, so perhaps on several machines."""
    lines = []
    for setting, name in found.names.items():
        arms: dict[str, list[str]] = {}
        for m in found.measured:
            if m.setting == setting and m.commit and m.arm not in arms.setdefault(m.commit, []):
                arms[m.commit].append(m.arm)
        if len(arms) > 1:
            each = "; ".join(f"{commit[:7]} {', '.join(own)}" for commit, own in arms.items())
            lines.append(
                f"{name}: measured at several commits, so in several calls, whose machines may "
                f"differ ({each})."
            )
    return lines


def _shared(found: SpeedFindings) -> list[str]:
    """What it means for the figures that nodes shared GPUs."""
    return [
        f"{name}: each GPU served {setting.ranks_per_gpu} ranks of different nodes, so a rank "
        "computed, encoded and moved bytes inside its node about as many times slower than on a "
        "GPU of its own, while links between nodes had their full speed. Floors are those of the "
        "shared GPUs. Where the link bounds plain FSDP2, speed-ups over it are lower bounds of "
        "what a GPU for each rank would show; tokens/s always are."
        for setting, name in found.names.items()
        if setting.ranks_per_gpu > 1
    ]


def speed_method() -> list[str]:
    """Return how speed-ups and break-evens are worked out, as sentences."""
    return [
        "Speed-up: an arm's tokens/s over those of the strongest plain arm of the same call, with "
        "the same model, batch, cluster and link; both by the median step, its spread by the arm's "
        "slowest and fastest step. Plain is what FSDP2 does by itself: its defaults, weights "
        "resharded to the node, or copies across nodes (HSDP).",
        "Twin: the same sharding, secondary partition, hops and units, and no codec. A speed-up is "
        "what bits bring (over twin) times what the partition brings (twin over plain).",
        "Break-even: where the speed-up crosses 1. Between two measured links the logarithm of the "
        "speed-up is taken as linear in that of the bandwidth; beyond them nothing is predicted. "
        "It goes by the medians: near 1 the spread of the steps tells how far it can be trusted.",
        "Floor: the larger one of two times, that of the link for the bytes of a step and that of "
        "a step without communication. A share of it is the floor over the step.",
    ]


def speed_csv(found: SpeedFindings) -> str:
    """Write speedup.csv: a line a measurement."""
    ups, shown = _by_point(found), _predictions(found.predicted)
    peers, lines = _peers(found.measured), []
    for m in found.measured:
        s, up = m.setting, ups.get(id(m))
        line = [s.model, s.nodes, s.gpus_per_node, s.ranks_per_gpu, m.link, _text(m.gbps)]
        line += [m.arm, m.engine, m.recipe, _text(m.tokens_per_s)]
        line += [_text(v) for v in ((up.value, up.low, up.high) if up else (None, None, None))]
        line += [_text(m.floor_s), _text(m.share_of_floor), _text(_over(m, peers))]
        line.append(_text(_predicted(shown, m)))
        line += [up.base.arm, m.twin, _text(up.bits), _text(up.partition)] if up else [""] * 4
        lines.append(line)
    return _csv(_CSV, lines)


def break_even_csv(found: SpeedFindings) -> str:
    """Write break_even.csv: a line an arm; several crossings are parted by spaces."""
    lines = []
    for b in found.breaks:
        s, ends = b.setting, (_text(b.slowest), _text(b.fastest))
        crossings = " ".join(map(_text, b.crossings))
        place = [s.model, s.nodes, s.gpus_per_node, s.ranks_per_gpu]
        lines.append([*place, b.arm, *ends, crossings, b.text])
    return _csv(_BREAKS, lines)


def _headline(place: str, ups: Sequence[SpeedUp]) -> str:
    best = max(ups, key=lambda one: one.at.tokens_per_s)
    plain = best.base.arm
    if best.value <= 1 + FASTER:
        return (
            f"{place}: no arm is more than {FASTER:.0%} faster than the strongest plain, {plain}."
        )
    reached = best.at.share_of_floor
    floor = "" if reached is None else f", at {percent(reached)} of its floor"
    apart = ""
    if best.twin:
        apart = f" Bits bring {best.bits:.2f}× (over {best.twin.arm}), the partition "
        apart += f"{best.partition:.2f}×."
    return (
        f"{place}: {best.at.arm} is fastest, {best.at.tokens_per_s:,.0f} tokens/s, "
        f"{best.value:.2f}× the strongest plain arm, {plain}{floor}.{apart}"
    )


def _by_point(found: SpeedFindings) -> dict[int, SpeedUp]:
    return {id(one.at): one for one in found.ups}


def _up_cells(up: SpeedUp | None) -> list[str]:
    if up is None:
        return [NOTHING, NOTHING]
    spread = NOTHING if up.low == up.high else f"{up.low:.2f}–{up.high:.2f}"
    return [f"{up.value:.2f}×", spread]


def _twin_cells(up: SpeedUp | None) -> list[str]:
    if up is None or up.bits is None or up.partition is None:
        return [NOTHING, NOTHING]
    return [f"{up.bits:.2f}×", f"{up.partition:.2f}×"]


def _peers(measured: Sequence[Measured]) -> _Peers:
    """Tokens/s of the fastest arm of DeepSpeed, by setting and link."""
    found: _Peers = {}
    for m in measured:
        if m.engine == "deepspeed":
            at = m.setting, m.link
            found[at] = max(m.tokens_per_s, found.get(at, 0.0))
    return found


def _over(m: Measured, peers: _Peers) -> float | None:
    peer = peers.get((m.setting, m.link))
    return m.tokens_per_s / peer if peer else None


def _predictions(predicted: Sequence[Predicted]) -> _Speeds:
    return {(p.setting, p.arm, p.gbps): p.tokens_per_s for p in predicted}


def _predicted(speeds: _Speeds, m: Measured) -> float | None:
    if m.gbps is None and m.setting.nodes > 1:
        return None
    return speeds.get((m.setting, m.arm, m.gbps))


def _predicted_cells(speed: float | None, m: Measured) -> list[str]:
    if speed is None:
        return [NOTHING, NOTHING]
    return [f"{speed:,.0f}", f"{speed / m.tokens_per_s - 1:+.1%}".replace("-", "−")]


def _range(low: float, high: float) -> str:
    return gbps_text(low) if low == high else f"{gbps_text(low)} to {gbps_text(high)}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _csv(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue()
