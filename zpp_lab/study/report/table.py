"""The results as text: results.csv, the verdict table's cells and sentences, a console's table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zpp_lab.config.wires import WIRES, Wire, kinds_among, shares, wires_among
from zpp_lab.files import text_table
from zpp_lab.runs.reader import READOUTS, Run
from zpp_lab.study.judge.claims import EXPECTED, MARK, ON_PAR_MARKED
from zpp_lab.study.judge.families import look_sizes
from zpp_lab.study.judge.noise import band_gap, noise_bands, one_seed
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.words import (
    NOTHING,
    gap_cell,
    gap_text,
    in_unit,
    margin_nats,
    nats,
    number,
    percent,
    task_of,
)

_HOPS = ("intra", "inter")
_NOTES = 20  # on runs that have not finished, for a terminal
_FIELDS = (
    "arm",
    "seed",
    "recipe",
    "outcome",
    "steps",
    "last_step",
    "planned_steps",
    "tokens",
    "heldout_loss",
    "heldout_loss_master",
    "gap",
    *(f"bytes_{wire}_{hop}" for wire in wires_among() for hop in _HOPS),
    *(f"quantized_{wire}" for wire in wires_among()),
)
COLUMNS = (
    "Arm",
    "Verdict",
    "Gap (nats)",
    "Held-out loss",
    "Perplexity",
    "Bytes",
    "Bytes between nodes",
    "Seeds",
)
BAND_COLUMN = "Noise band"  # of a study with one seed: where each gap lies
READOUT = "Training gap (nats)"  # over the last steps, where runs have `train.readout_steps`
QUANTIZED = "Quantized"  # of the bytes of each kind, where runs tell it
SENT = {"Bytes": "over all links", "Bytes between nodes": "between nodes"}


def results_csv(result: StudyResult) -> str:
    """Return one line a run, arms in the study's order, then seeds. The same runs give the same
    bytes: no column holds wall-clock values, so a killed study's equals an undisturbed one's.

    `steps` is a finished run's; `last_step` how far any run came.
    Losses and gap in nats per token, bytes_WIRE_HOP the run's total over all ranks,
    quantized_WIRE the part of a step's bytes there that codecs made (0 to 1). readout_loss, where
    runs have one: the mean training loss of the last `train.readout_steps`. READOUTS, where runs
    have them: the share of held-out tokens predicted, and the held-out loss in bits a byte.
    A wire that not every recipe has comes last, where a run has it.
    """
    text = io.StringIO()
    second = ["readout_loss"] if any(run.readout for run in result.runs) else []
    second += [key for key in READOUTS if any(key in (run.summary or {}) for run in result.runs)]
    there = wires_among(run.quantized for run in result.runs)
    own = [name for wire in there if WIRES[wire].needs for name in _columns(wire)]
    fields = [*_FIELDS, *own, *second]
    writer = csv.DictWriter(text, fields, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for arm in result.arms:
        for seed, run in sorted(arm.runs.items()):
            writer.writerow(_csv_row(arm, seed, run))
    return text.getvalue()


def _columns(wire: Wire) -> list[str]:
    return [*(f"bytes_{wire}_{hop}" for hop in _HOPS), f"quantized_{wire}"]


def _csv_row(arm: ArmResult, seed: int, run: Run) -> dict[str, Any]:
    summary = run.summary or {}
    wires = summary.get("bytes") or {}
    row = {key: summary.get(key) for key in ("steps", "tokens", "heldout_loss")}
    row |= {"arm": arm.name, "seed": seed, "recipe": run.recipe, "outcome": run.outcome}
    row |= {"last_step": run.step, "planned_steps": run.steps}
    row |= {"heldout_loss_master": summary.get("heldout_loss_master"), "gap": arm.gaps.get(seed)}
    row |= {"readout_loss": run.readout[1]} if run.readout else {}
    row |= {key: summary.get(key) for key in READOUTS}
    if wires:
        row |= {f"bytes_{w}_{h}": wires.get(w, {}).get(h, 0) for w in WIRES for h in _HOPS}
    return row | {f"quantized_{wire}": run.quantized.get(wire) for wire in WIRES}


def verdict_rows(result: StudyResult) -> list[dict[str, str]]:
    """Return the verdict table's cells as text, one row an arm, as `ranked`. The keys are COLUMNS,
    with one seed BAND_COLUMN after the gap, READOUT after it where runs have one, and QUANTIZED
    after the bytes where runs tell it (older ones do not). Only text has a perplexity."""
    rows = [dict(zip(COLUMNS, _cells(result, arm), strict=True)) for arm in result.ranked]
    if task_of(result) != "text":
        rows = [{k: v for k, v in row.items() if k != "Perplexity"} for row in rows]
    readouts = [gap_cell(result.readout_gap(arm)) for arm in result.ranked]
    if any(cell != NOTHING for cell in readouts):
        pairs = zip(rows, readouts, strict=True)
        rows = [_with(row, "Gap (nats)", READOUT, cell) for row, cell in pairs]
    kinds = kinds_among(run.quantized or () for run in result.runs)
    quantized = [_quantized(arm, kinds) for arm in result.ranked]
    if any(cell != NOTHING for cell in quantized):
        pairs = zip(rows, quantized, strict=True)
        column = f"{QUANTIZED} ({', '.join(kinds)})"
        rows = [_with(row, "Bytes between nodes", column, cell) for row, cell in pairs]
    bands = noise_bands(result) if one_seed(result) else {}
    if not bands:
        return rows
    placed = [band_cell(result, arm, bands) for arm in result.ranked]
    pairs = zip(rows, placed, strict=True)
    return [_with(row, "Gap (nats)", BAND_COLUMN, cell) for row, cell in pairs]


def _with(row: dict[str, str], before: str, column: str, cell: str) -> dict[str, str]:
    """`row` with one cell more, in the column after `before`."""
    place = list(row).index(before) + 1
    items = list(row.items())
    return dict([*items[:place], (column, cell), *items[place:]])


def _quantized(arm: ArmResult, kinds: Sequence[str]) -> str:
    """Return the part that codecs made of an arm's bytes of each kind."""
    share = next((run.quantized for run in arm.runs.values() if run.quantized), None)
    return NOTHING if share is None else ", ".join(shares(share, kinds).values())


def band_cell(result: StudyResult, arm: ArmResult, bands: Mapping[str, float]) -> str:
    """Compare an arm's gap with its baseline's noise band, such as "below, 1.5×"."""
    at = band_gap(result, arm, bands)
    if at is None:
        return NOTHING
    return "sets it" if arm.arm.role == "order_control" else at.text


def _cells(result: StudyResult, arm: ArmResult) -> list[str]:
    loss = number(arm.heldout_loss, ".4f")
    done = len(arm.finished) or len(arm.gaps)  # a composite has no runs of its own
    seeds = f"{done} of {max(len(result.study.seeds), len(arm.runs), done)}"
    sent = [percent(arm.bytes_total), percent(arm.bytes_inter)]
    return [arm.name, arm.text, gap_text(arm), loss, perplexity(arm.heldout_loss), *sent, seeds]


def perplexity(loss: float | None) -> str:
    """Return exp of a loss in nats a token: of a mean over seeds, the geometric mean."""
    if loss is None:
        return NOTHING
    return f"{math.exp(loss):#.4g}".rstrip(".") if loss < 700 else "∞"


def correction_line(result: StudyResult) -> str:
    """Return one sentence on what the corrected p-values stand for."""
    study, looks = result.study, len(look_sizes(result.study))
    arms = sum(a.verdict != "baseline" and a.arm.role not in EXPECTED for a in result.every)
    text = f"p-values are corrected for {arms} {'arm' if arms == 1 else 'arms'} (Holm's method, "
    text += "without controls)"
    if looks > 1:
        text += f" and up to {looks} looks at the data"
    return (
        f"{text}. The chance of any false claim is at most {1 - study.confidence:.0%} for each of "
        "the three: differs from 0, inside the margin, beyond it."
    )


def p_value_line(result: StudyResult) -> str:
    """Return what the columns of the p-values are."""
    looked = " Looks: how often an arm has been tested so far, as seeds were added."
    return (
        "p (differs): how probable so large a gap is if there is none. p (inside): how probable so "
        "small a gap is if the true one lies outside the margin. p (beyond): how probable so large "
        "a gap is if the true one lies inside. Verdicts go by the corrected "
        f"ones.{looked if len(look_sizes(result.study)) > 1 else ''}"
    )


def console_table(result: StudyResult) -> str:
    """Return the verdicts for a terminal, with the rule below them and what could not be used.

    Few columns, so that a row stays on its line; the report has all.
    """
    sent = sent_column(result)
    chosen = ["Arm", "Verdict", "Gap (nats)", BAND_COLUMN, READOUT, sent, "Seeds"]
    rows = [{key: row[key] for key in chosen if key in row} for row in verdict_rows(result)]
    heads = [in_unit(result, "Bytes" if key == sent else key) for key in rows[0]]
    parts = [text_table(heads, [list(row.values()) for row in rows], left=2)]
    parts.append(margin_line(result))
    parts[-1] += f" Bytes: a step's {SENT[sent]}, as a share of the baseline's."
    notes = [*result.notes[:_NOTES]]
    if len(result.notes) > _NOTES:
        notes.append(f"and {len(result.notes) - _NOTES} notes more, in report.html")
    return "\n\n".join([*parts, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def sent_column(result: StudyResult) -> str:
    """Return the column of the bytes that a reader asks for first."""
    inter = any(arm.bytes_inter is not None for arm in result.arms)
    return "Bytes between nodes" if inter else "Bytes"


def margin_line(result: StudyResult) -> str:
    """Return what the verdicts mean, in a few sentences."""
    study = result.study
    if result.margin is None:
        return f"No finished run of the baseline {study.baseline}: nothing to compare with yet."
    if one_seed(result):
        return f"{_one_seed_line(result)}{_readout_line(result)}"
    marked = any(arm.verdict == ON_PAR_MARKED for arm in result.every)
    mark = f" {MARK}: the gap is also shown to differ from 0." if marked else ""
    return (
        f"Gap: held-out loss minus that of {result.compared_with} with the same seed, in nats a "
        f"token; mean ± half of the interval {interval_line(result)}, at the level of the test "
        f"behind the verdict. Margin: {margin_nats(result)} ({study.margin_text}). "
        f"On par: shown to be inside the margin.{mark} {correction_line(result)}"
        f"{_readout_line(result)}"
    )


def interval_line(result: StudyResult) -> str:
    """Say what the intervals of the gaps cover; arms without documents are named."""
    arms = [arm for arm in result.every if arm.verdict != "baseline"]
    tested = [arm for arm in arms if arm.gap is not None and arm.gap.interval is not None]
    alone = [arm.name for arm in tested if arm.gap and arm.gap.documents is None]
    texts = sorted({len(arm.documents.tokens) for arm in tested if arm.documents})
    if not texts:
        return "over seeds alone (no two runs recorded losses of at least two shared documents)"
    over = f"over seeds and {' or '.join(map(str, texts))} held-out documents"
    without = f" (over seeds alone without documents: {', '.join(alone)})" if alone else ""
    return f"{over}{without}"


def _readout_line(result: StudyResult) -> str:
    """What the column READOUT is; "" without it."""
    steps = {run.readout[0] for run in result.runs if run.readout}
    if not steps:
        return ""
    last = " or ".join(map(str, sorted(steps)))
    return (
        f" Training gap: the same for the mean training loss of the last {last} steps, a number "
        "chosen before the study. No verdict uses it."
    )


def _one_seed_line(result: StudyResult) -> str:
    text = (
        f"Gap: held-out loss minus that of {result.compared_with} with the same seed, in nats a "
        "token; below 0 the loss is lower. With one seed an arm there is no interval and no test, "
        "so finished arms are undecided."
    )
    widths = band_widths(result)
    if not widths:
        return text
    return (
        f"{text} Noise band: {widths}, how far another order of sums alone moved the loss (one "
        "draw). A loss above it is higher than that explains, one below it lower; ×: the gap in "
        "units of the band."
    )


def band_widths(result: StudyResult) -> str:
    """Return the width of each baseline's noise band; "" without one."""
    bands = noise_bands(result)
    return ", ".join(
        f"±{nats(noise)} nats" + (f" around {base}" if len(bands) > 1 else "")
        for base, noise in bands.items()
    )
