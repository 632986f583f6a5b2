"""Everything on the report's page that is neither a figure nor the verdict table, as plain values.

The template and the Markdown text both read these.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from zpp_lab.study import stats
from zpp_lab.study.runs import Run
from zpp_lab.study.settings import differences, flat_config
from zpp_lab.study.table import NOTHING
from zpp_lab.study.verdict import ArmResult, StudyResult

FIGURES = {
    "gap": (
        "Held-out loss gap",
        "Point: mean over the seeds. Thin line: {confidence} interval. Thick line: {inner} "
        "interval, which the equivalence test compares with the margin (shaded). Ticks: single "
        "seeds. The axis is linear around 0 and logarithmic beyond the margin.",
    ),
    "loss": (
        "Loss over training",
        "Lines: mean over the seeds; bands: lowest to highest seed. The training loss is smoothed "
        "(moving average) for display only. The axis ends where the baseline starts.",
    ),
    "gap_curves": (
        "Loss gap over training",
        "Held-out loss minus that of {baseline} with the same seed, at every evaluation; bands: "
        "{confidence} interval of the mean. Shaded: the margin.",
    ),
    "gap_vs_bytes": (
        "Loss gap against bytes sent",
        "Bytes of a training step over all ranks, as a share of what {baseline} sends. "
        "Lines: {confidence} interval; shaded: the margin.",
    ),
    "telemetry": (
        "Codec error by wire and parameter class",
        "Normalized mean squared error (NMSE) between what was encoded and what was decoded, mean "
        "over the seeds. An arm appears on the wires that it quantizes.",
    ),
}


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    caption: str


@dataclass(frozen=True)
class Setting:
    """One setting of an arm; `baseline` is the baseline's value where it differs."""

    key: str
    value: str
    baseline: str | None = None


def figures(names: Sequence[str], result: StudyResult) -> list[Figure]:
    """Titles and captions of the figures that were made, in the page's order."""
    confidence = result.study.confidence
    words = {
        "baseline": result.study.baseline,
        "confidence": f"{confidence:.0%}",
        "inner": f"{2 * confidence - 1:.0%}",
    }
    shown = [name for name in FIGURES if name in names]
    return [Figure(n, FIGURES[n][0], FIGURES[n][1].format(**words)) for n in shown]


def decision(result: StudyResult) -> list[str]:
    """How the question is decided, as sentences."""
    study, base = result.study, result.study.baseline
    seeds = ", ".join(map(str, study.seeds))
    alpha = f"{1 - study.confidence:.2g}"
    margin = f"{study.margin:.2%} of the loss of {base}"
    if result.margin is not None:
        margin += f", here ±{result.margin:.4f} nats"
    sentences = [
        f"Every arm runs with the same seeds ({seeds}); a seed fixes the initialization and every "
        f"batch. The gap of a seed is the arm's held-out loss after the last step minus that of "
        f"{base} with the same seed.",
        f"On par: two one-sided paired t tests (alpha {alpha} each) show that the mean gap lies "
        f"within the margin ({margin}). Worse or better: not on par, and the whole "
        f"{study.confidence:.0%} interval lies above or below 0. Undecided: neither; more seeds "
        f"would tell.",
    ]
    return [*sentences, *_planning(result)]


def _planning(result: StudyResult) -> list[str]:
    near = [arm for arm in result.arms if arm.verdict in ("on par", "undecided")]
    spreads = [arm.gap.sd for arm in near if arm.gap and arm.gap.sd]
    if not spreads or result.margin is None:
        return []
    spread = median(spreads)
    needed = stats.seeds_for_equivalence(spread, result.margin, result.study.confidence)
    return [
        f"The gaps of an arm spread by {spread:.4f} nats (standard deviation, median of the "
        f"arms that are on par or undecided). At that spread an arm without any true gap is "
        f"found on par with 80% probability with {needed or f'more than {stats.MAX_SEEDS}'} seeds."
    ]


def settings_of(result: StudyResult, arm: ArmResult) -> list[Setting]:
    """All settings of an arm; those that differ from the baseline are marked."""
    run, base = first_run(arm), first_run(result.baseline)
    if run is None:
        return []
    changed = differences(run.config, base.config) if base and base is not run else {}
    return [
        Setting(key, _value(value), _value(changed[key][1]) if key in changed else None)
        for key, value in flat_config(run.config).items()
        if key not in ("seed", "recipe.name") and not key.startswith("run.")
    ]


def changed_keys(result: StudyResult) -> list[str]:
    """Settings in which an arm differs from the baseline, for the comparison table."""
    keys = [s.key for a in result.arms for s in settings_of(result, a) if s.baseline is not None]
    return sorted(set(keys))


def command(result: StudyResult, arm: ArmResult) -> str | None:
    """The shell command that runs one seed of an arm; None for a folder of plain runs."""
    study = result.study
    if not arm.arm.overrides and not study.overrides:
        return None
    words = [*study.overrides, *arm.arm.overrides, f"seed={study.seeds[0]}"]
    return shlex.join(["zpp-lab", "train", *words])


def facts(result: StudyResult) -> list[tuple[str, str]]:
    """Machine, commit, data and sizes, from the finished runs; several values are listed."""
    summaries = [run.summary for run in result.runs if run.summary is not None]

    def values(*path: str) -> str:
        found: dict[str, None] = {}
        for summary in summaries:
            value: Any = summary
            for key in path:
                value = (value or {}).get(key)
            found[_words(value)] = None
        return "; ".join(found) or NOTHING

    grid = {
        f"{c.get('nodes')} nodes × {c.get('gpus_per_node')} GPUs": None
        for c in (s.get("cluster") or {} for s in summaries)
    }
    return [
        ("Data", values("data", "name")),
        ("Data hash", values("data", "hash")),
        ("Tokens in the data", values("data", "tokens")),
        ("Model parameters", values("model_parameters")),
        ("Cluster", "; ".join(grid) or NOTHING),
        ("Steps", values("steps")),
        ("Tokens of a run", values("tokens")),
        ("Commit", values("commit")),
        ("Machine", values("machine")),
        ("Versions", values("versions")),
    ]


def first_run(arm: ArmResult) -> Run | None:
    """The run of the lowest seed that has a config."""
    return next((run for _, run in sorted(arm.runs.items()) if run.config), None)


def _value(value: Any) -> str:
    return (
        NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\u202f")  # narrow spaces part the thousands
    return NOTHING if value is None else str(value)
