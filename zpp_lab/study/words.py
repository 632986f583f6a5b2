"""Gaps, margins, shares and p-values as the text of cells and sentences."""

from __future__ import annotations

from zpp_lab.study.judge.stats import Gap
from zpp_lab.study.judge.verdict import ArmResult, StudyResult

NOTHING = "–"


def gap_text(arm: ArmResult) -> str:
    """Return mean gap ± half of the interval that decides, in nats."""
    return gap_cell(None if arm.verdict == "baseline" else arm.gap)


def gap_cell(gap: Gap | None) -> str:
    """Return the same of a gap that need not be an arm's."""
    if gap is None:
        return NOTHING
    if gap.shown is None:
        return signed(gap.mean)
    half = (gap.shown[1] - gap.shown[0]) / 2
    return f"{signed(gap.mean)} ± {half:.4f}"


def margin_nats(result: StudyResult) -> str:
    """Return the margin in nats; the smallest and the largest where baselines differ."""
    margins = sorted(f"{arm.margin:.4f}" for arm in result.arms if arm.margin is not None)
    ends = dict.fromkeys((margins[0], margins[-1]))
    return " to ".join(f"±{end}" for end in ends) + " nats"


def task_of(result: StudyResult) -> str:
    """Return the task of all runs, "text" where they differ. Only text has a perplexity."""
    if result.study.points is not None:
        return "rl"
    runs = [run for arm in result.arms for run in arm.runs.values()]
    tasks = {str((run.config or {}).get("task", "text")) for run in runs}
    return tasks.pop() if len(tasks) == 1 else "text"


def in_unit(result: StudyResult, text: str) -> str:
    """Return a text with the study's unit in place of nats a token. With rewards numbers are shares
    of failures, 0.01 for a point of success, and with reward models nats a pair."""
    for nats, unit in _UNITS.get(task_of(result), {}).items():
        text = text.replace(nats, unit)
    return text


_PAIRS = {
    "nats per token": "nats per pair",
    "nats a token": "nats a pair",
    "held-out tokens": "texts of held-out pairs",
    "held-out documents": "held-out pairs",
    "losses by document": "losses by pair",
    "from the documents": "from the pairs",
}
_FAILURES = {  # in this order
    "in nats a token": "in failures a completion (0.01: a point of success)",
    "Loss (nats per token)": "Failures per completion",
    "nats per token": "0.01: a point",
    "nats a token of the loss": "of the failures",
    "nats a token": "failures a completion",
    "(nats)": "(failures)",
    " nats": "",
    "loss minus that": "failures minus those",
    "eld-out loss": "eld-out failures",
    "raining loss is": "raining failures are",
    "raining loss": "raining failures",
    "Loss over": "Failures over",
    "one's loss is higher": "one fails more often",
    "its loss is lower than": "it fails less often than",
    "losses over fewer than": "fewer than",
    "losses by document": "failures by prompt",
    "held-out tokens": "held-out completions",
    "held-out documents": "held-out prompts",
    "from the documents": "from the prompts",
}
_UNITS = {"rl": _FAILURES, "reward": _PAIRS}


def signed(value: float) -> str:
    """Return a gap in nats with its sign, 0 without one."""
    text = f"{value:+.4f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float | None, spec: str) -> str:
    """Format a value that may be missing."""
    return NOTHING if value is None else format(value, spec)


def percent(fraction: float | None) -> str:
    """Return 0.126 → "12.6%"; whole percents from 100 on."""
    if fraction is None:
        return NOTHING
    return f"{fraction:.0%}" if fraction >= 0.9995 else f"{fraction:.1%}"


def nats(noise: float) -> str:
    """Return the width of a noise band, which may be tiny."""
    return f"{noise:.4f}" if noise >= 1e-4 else f"{noise:.1e}"


def p_value(p: float | None) -> str:
    """Return a p-value as text."""
    if p is None:
        return NOTHING
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"
