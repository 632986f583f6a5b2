"""The report of trials: runs of one recipe that differ in other settings, such as Optuna's.

They have no baseline to compare with. The question is which settings end at the lowest loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import altair as alt

from zpp_lab.config.flat import differing, flat_config, within
from zpp_lab.files import text_table
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.report.appendix import Appendix, scope
from zpp_lab.study.report.contents import facts_table, run_links
from zpp_lab.study.report.figures.gap import Spec
from zpp_lab.study.report.sections import (
    Column,
    Document,
    Figure,
    Row,
    Section,
    Table,
    Text,
    numbers,
    words,
)
from zpp_lab.study.report.style import GREY, MEANING, chart, concat_panels, finish
from zpp_lab.study.report.table import perplexity
from zpp_lab.study.words import NOTHING, number, signed, task_of

NAME = "trials"
_LOG = 20.0  # a setting's largest over its smallest value from which its axis is logarithmic
_PANEL = 250
_LABEL = 36  # characters of a trial in a legend
_BEST = MEANING["better"]
_CAPTION = (
    "Each point is a trial, over all of its seeds; the best one is marked. A panel shows one "
    "setting, while the others vary too. Lower is better."
)


@dataclass(frozen=True)
class Trial:
    """One choice of settings. loss: held-out, nats a token, mean over its finished runs."""

    arm: ArmResult
    settings: dict[str, Any]
    loss: float | None

    @property
    def state(self) -> str:
        """Return "finished", or why it has no loss."""
        if self.loss is not None:
            return "finished"
        return ", ".join(sorted({run.outcome for run in self.arm.runs.values()}))


@dataclass(frozen=True)
class Trials:
    """Trials from the lowest loss up; those without one come last. keys: the settings that vary."""

    result: StudyResult
    recipe: str
    keys: Sequence[str]
    ranked: Sequence[Trial]

    @property
    def best(self) -> Trial | None:
        first = self.ranked[0]
        return None if first.loss is None else first

    @property
    def of_text(self) -> bool:
        """Whether losses are of tokens, and have a perplexity."""
        return task_of(self.result) == "text"

    @property
    def labelled(self) -> StudyResult:
        """The result with its arms named by rank and settings, for legends."""
        arms = [_labelled(rank, trial) for rank, trial in enumerate(self.ranked, 1)]
        others = [arm for arm in self.result.arms if arm.first_run is None]
        study = replace(self.result.study, arms=[arm.arm for arm in (*others, *arms)])
        return replace(self.result, study=study, arms=[*others, *arms])

    @property
    def answer(self) -> list[str]:
        """The best trial's settings and loss, and how much that says."""
        best, known = self.best, [trial for trial in self.ranked if trial.loss is not None]
        if best is None:
            return ["No answer yet: no trial has finished."]
        assert best.loss is not None
        lines = [
            f"{_settings(best)} ended at the lowest held-out loss of {len(known)} trials of "
            f"{self.recipe}: {best.loss:.4f} nats a token."
        ]
        if len(known) > 1:
            second = known[1]
            assert second.loss is not None
            lines.append(
                f"The next one is {signed(second.loss - best.loss)} nats above it "
                f"({_settings(second)})."
            )
        lines.append(
            "The best of several trials is partly luck: run the best settings again with other "
            "seeds before relying on them."
        )
        return lines


def find_trials(result: StudyResult) -> Trials | None:
    """Return the trials that the runs are; None where recipes differ or a baseline has run.

    Runs of a study are never trials: its arms were planned.
    """
    arms = [arm for arm in result.arms if arm.first_run is not None]
    planned = any(arm.arm.overrides for arm in result.arms)
    if len(arms) < 2 or planned or result.margin is not None:
        return None
    flat = {arm.name: flat_config(arm.first_run.config) for arm in arms if arm.first_run}
    first = next(iter(flat.values()))
    varying = {key for other in flat.values() for key in differing(first, other)} - {"seed"}
    if not varying or any(key.startswith("recipe.") for key in varying):
        return None
    keys = sorted(varying)
    trials = [
        Trial(arm, {key: flat[arm.name].get(key) for key in keys}, arm.heldout_loss) for arm in arms
    ]
    ranked = sorted(trials, key=lambda trial: math.inf if trial.loss is None else trial.loss)
    return Trials(result, str(first["recipe.name"]), keys, ranked)


def trials_document(found: Trials, figures: Sequence[Figure], root: Path) -> Document:
    """Return the whole report; figures: those of the runs, such as the loss over training."""
    first, *more = found.answer
    known = [trial for trial in found.ranked if trial.loss is not None]
    drawn = [Figure(NAME, "Settings and loss", _CAPTION, trials_figure(found))] if known else []
    command = found.best and Appendix(found.result).command(found.best.arm)
    again = Text([command] if command else [], "code")
    text = " ".join([*more, scope(found.result)])
    sections = [
        Section("Answer", "answer", [Text([first]), *drawn, Text([text])]),
        Section("Trials", "trials", [trials_table(found, root)]),
        Section("Run the best one again", "again", [again]),
        Section("Figures", "figures", figures),
        Section("Notes", "notes", [Text(_notes(found), "list")]),
        Section("Machine, data and versions", "machine", [facts_table(found.result)], folded=True),
    ]
    name = found.result.study.name
    question = f"Which {' and '.join(found.keys)} should {found.recipe} train with?"
    return Document("zpp_lab trials", name, question, sections)


def trials_table(found: Trials, root: Path) -> Table:
    """Return one row a trial, as `ranked`."""
    rank, *measured, state = _heads(found)
    columns = [*words(rank), *numbers(*measured), *words(state), Column("Runs", "links")]
    rows = [
        Row([*cells, run_links(root, trial.arm.runs)], trial.arm.name)
        for cells, trial in zip(_cells(found), found.ranked, strict=True)
    ]
    return Table("ranked", "Every trial, the best first", columns, rows)


def trials_console(found: Trials) -> str:
    """Return the answer and the trials for a terminal."""
    parts = [text_table(_heads(found), _cells(found), left=1), " ".join(found.answer)]
    notes = _notes(found)
    return "\n\n".join([*parts, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def _heads(found: Trials) -> list[str]:
    more = ["Perplexity"] * found.of_text
    return ["Rank", *found.keys, "Held-out loss", "Above the best", *more, "Seeds", "State"]


def _cells(found: Trials) -> list[list[str]]:
    best = found.best
    rows = []
    for rank, trial in enumerate(found.ranked, 1):
        above = NOTHING
        if trial.loss is not None and best is not None and best.loss is not None:
            above = signed(trial.loss - best.loss)
        rows.append(
            [
                NOTHING if trial.loss is None else str(rank),
                *(_value(value) for value in trial.settings.values()),
                number(trial.loss, ".4f"),
                above,
                *[perplexity(trial.loss)] * found.of_text,
                f"{len(trial.arm.finished)} of {len(trial.arm.runs)}",
                trial.state,
            ]
        )
    return rows


def _notes(found: Trials) -> list[str]:
    """The result's notes without those on a baseline, which trials do not need."""
    base = found.result.study.baseline
    alone = base not in {trial.arm.name for trial in found.ranked}
    return [
        n for n in found.result.notes if not (alone and (f" {base} " in n or n.startswith(base)))
    ]


def trials_figure(found: Trials) -> Spec:
    """Return loss over each setting that varies, a panel a setting."""
    known = [trial for trial in found.ranked if trial.loss is not None]
    rows = [
        {
            "arm": trial.arm.name,
            "loss": trial.loss,
            "settings": _settings(trial),
            "rank": rank,
            "best": "best" if rank == 1 else "other",
            **{f"key{i}": _point(value) for i, value in enumerate(trial.settings.values())},
        }
        for rank, trial in enumerate(known, 1)
    ]
    panels = []
    for i, key in enumerate(found.keys):
        panels.append(_panel(i, key, [row[f"key{i}"] for row in rows]))
    return finish(concat_panels(panels, 3), {NAME: rows[::-1]}, side=62)


def _panel(number: int, key: str, values: Sequence[Any]) -> Any:
    measured = all(isinstance(value, int | float) for value in values)
    few = len(set(values)) <= 6
    x: alt.X
    if measured and not few:
        log = min(values) > 0 and max(values) / min(values) >= _LOG
        scale = alt.Scale(type="log", nice=True) if log else alt.Scale(zero=False)
        axis = alt.Axis(format="~g", tickCount=4, labelOverlap="greedy")
        x = alt.X(f"key{number}:Q", title=f"{key} (log)" if log else key, scale=scale, axis=axis)
    else:
        axis = alt.Axis(labelAngle=0, labelLimit=80)
        x = alt.X(f"key{number}:O", title=key, axis=axis)
    color = alt.Color(
        "best:N", legend=None, scale=alt.Scale(domain=["best", "other"], range=[_BEST, GREY])
    )
    tooltip = [
        alt.Tooltip("settings:N"),
        alt.Tooltip("loss:Q", title="held-out loss", format=".4f"),
        alt.Tooltip("rank:Q"),
    ]
    y = alt.Y("loss:Q", title="Held-out loss (nats per token)", scale=alt.Scale(zero=False))
    points = chart(NAME).mark_point(filled=True, size=70, opacity=0.85)
    marked = points.encode(x=x, y=y, color=color, tooltip=tooltip)
    return alt.layer(marked).properties(width=_PANEL, height=_PANEL)


def _labelled(rank: int, trial: Trial) -> ArmResult:
    short = [f"{key.rsplit('.', 1)[-1]}={_value(v)}" for key, v in trial.settings.items()]
    name = within(_LABEL, f"{rank}: {' '.join(short)}")
    return replace(trial.arm, arm=replace(trial.arm.arm, name=name))


def _settings(trial: Trial) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in trial.settings.items())


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _point(value: Any) -> Any:
    """A setting's value for an axis."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
