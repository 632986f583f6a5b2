"""The report's tables as plain rows; the template gives them captions, scopes and sorting."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from zpp_lab.runs.reader import Run, cause, state
from zpp_lab.study.judge.certainty import COLUMNS as CERTAINTY_COLUMNS
from zpp_lab.study.judge.certainty import Certainty
from zpp_lab.study.judge.effects import Estimate, Interaction, MainEffect, level_text
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.report.curves import MEASURES
from zpp_lab.study.report.curves import Row as CurveRow
from zpp_lab.study.report.page import Appendix, facts
from zpp_lab.study.report.table import NOTHING, perplexity, signed, verdict_rows

_MIB = 2**20
WHAT = "What it does"


@dataclass(frozen=True)
class Line:
    """One row: its cells as text; `arm` for the page's filter, `look` a verdict for its colour."""

    cells: Sequence[str]
    arm: str = ""
    look: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows. numbers, code: columns set that way."""

    id: str
    caption: str
    columns: Sequence[str]
    lines: Sequence[Line]
    numbers: Collection[int] = field(default_factory=frozenset)
    code: Collection[int] = field(default_factory=frozenset)
    looked: int = -1  # the column that has the row's colour
    sortable: bool = True


def verdict_table(result: StudyResult) -> Table:
    """One row an arm. What it does comes last, so that a narrow screen shows the verdict."""
    rows = verdict_rows(result)
    columns = list(rows[0])
    place = columns.index("Verdict")
    numbers = range(place + 1, len(columns))
    if any(arm.arm.describe for arm in result.arms):
        columns.append(WHAT)
        for row, arm in zip(rows, result.arms, strict=True):
            row[WHAT] = arm.arm.describe or NOTHING
    lines = [
        Line(list(row.values()), arm.name, arm.verdict)
        for arm, row in zip(result.arms, rows, strict=True)
    ]
    caption = f"Every arm against {result.compared_with}"
    return Table("verdicts", caption, columns, lines, numbers, looked=place)


def effects_table(effects: Sequence[MainEffect]) -> Table:
    """The numbers of the main effects figure."""
    lines = [
        Line([effect.factor, level_text(level, effect.factor), *_estimate(e), str(effect.groups)])
        for effect in effects
        for level, e in effect.levels.items()
    ]
    columns = ("Factor", "Level", "Mean gap (nats)", "From", "To", "Seeds", "Groups")
    return Table("effects", "Mean gap by level", columns, lines, range(2, 7))


def interactions_table(found: Sequence[Interaction]) -> Table:
    """How far each pair of factors is from additive, at its worst cell."""
    lines = []
    for one in found:
        at = ", ".join(f"{f}={level_text(v, f)}" for f, v in zip(one.factors, one.at, strict=True))
        numbers = [*_estimate(one.departure), str(one.groups)]
        lines.append(Line([" × ".join(one.factors), at, *numbers]))
    columns = ("Factors", "At", "Departure (nats)", "From", "To", "Seeds", "Groups")
    return Table("interactions", "Largest departure from additivity", columns, lines, range(2, 7))


def telemetry_table(rows: Sequence[CurveRow]) -> Table:
    """Each arm, wire and parameter class: its measures averaged over steps and seeds."""
    lines = [
        Line(
            [row["arm"], row["wire"], row["param_class"]]
            + [_measure(row.get(name), name) for name in MEASURES],
            row["arm"],
        )
        for row in rows
        if row["step"] == 0
    ]
    columns = ("Arm", "Wire", "Parameters", *MEASURES)
    caption = "Codec errors, mean over training and seeds"
    return Table("telemetry", caption, columns, lines, range(3, 3 + len(MEASURES)))


def differences_table(result: StudyResult, appendix: Appendix) -> Table:
    """What an arm's config has that its baseline's has not."""
    lines = []
    for arm in result.arms:
        changed = appendix.differences(arm)
        texts = [f"{key}: {value} (baseline: {base})" for key, value, base in changed]
        if texts:
            lines.append(Line([arm.name, "\n".join(texts)], arm.name))
    columns = ("Arm", "Settings that differ from its baseline's")
    return Table("differences", "Configs, arm by arm", columns, lines, code={1}, sortable=False)


def commands_table(result: StudyResult, appendix: Appendix) -> Table:
    """How to run one seed of each arm again, after the runs that the arms start from."""
    told = [(arm.name, appendix.command(arm)) for arm in result.arms]
    lines = [Line([f"prepare {name}", line]) for name, line in appendix.prepared().items()]
    lines += [Line([name, command], name) for name, command in told if command]
    columns = ("Arm", "Command")
    return Table("commands", "One seed of an arm", columns, lines, code={1}, sortable=False)


def certainty_table(certainty: Certainty) -> Table:
    """p-values and intervals over documents, one row an arm; no column without a value."""
    rows = certainty.rows()
    told = [i for i in range(len(CERTAINTY_COLUMNS)) if any(row[i] != NOTHING for row in rows)]
    if not any(CERTAINTY_COLUMNS[i].startswith("p ") for i in told):  # looks are those of tests
        told = [i for i in told if CERTAINTY_COLUMNS[i] != "Looks"]
    columns = [CERTAINTY_COLUMNS[i] for i in told]
    lines = [Line([row[i] for i in told], row[0]) for row in rows]
    return Table("certainty", "How sure each gap is", columns, lines, range(1, len(told)))


def facts_table(result: StudyResult) -> Table:
    lines = [Line(fact) for fact in facts(result)]
    return Table("facts", "Of the finished runs", ("What", "Value"), lines, sortable=False)


def runs_table(result: StudyResult) -> Table:
    """One row a run of the study, begun or not."""
    columns = ["Arm", "Seed", "State", "Steps", "Held-out loss", "Perplexity"]
    columns += ["Loss of the fp32 masters", "Gap (nats)", "MiB per step", "Seconds", "Cause"]
    lines = [
        Line(_run_cells(arm, seed, arm.runs.get(seed)), arm.name)
        for arm in result.arms
        for seed in sorted({*result.study.seeds, *arm.runs})
    ]
    if not any(line.cells[-1] for line in lines):  # nothing failed
        columns, lines = columns[:-1], [replace(one, cells=one.cells[:-1]) for one in lines]
    return Table("runs", "Every run", columns, lines, {1, *range(3, 10)})


def _estimate(e: Estimate) -> list[str]:
    return [signed(e.mean), signed(e.low), signed(e.high), str(e.seeds)]


def _run_cells(arm: ArmResult, seed: int, run: Run | None) -> list[str]:
    summary = (run.summary if run else None) or {}
    sent, loss = (run.bytes_per_step(), run.heldout_loss) if run else (None, None)
    gap = arm.gaps.get(seed)
    return [
        arm.name,
        str(seed),
        state(run),
        _steps(run),
        _number(loss, ".4f"),
        perplexity(loss),
        _number(summary.get("heldout_loss_master"), ".4f"),
        NOTHING if gap is None or arm.verdict == "baseline" else signed(gap),
        _number(None if sent is None else sent / _MIB, ".2f"),
        _number(summary.get("seconds"), ".0f"),
        cause(run),
    ]


def _steps(run: Run | None) -> str:
    """Those done, and of how many where it has not finished."""
    if run is None:
        return NOTHING
    whole = run.summary is not None or run.steps is None
    return str(run.step) if whole else f"{run.step} of {run.steps}"


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else format(value, spec)


def _measure(value: float | None, name: str) -> str:
    return _number(value, ".6f" if name == "cosine" else ".3g")
