"""The report's words: how the question is decided, whether the controls hold, what was left out.

The template and the Markdown text both read these.
"""

from __future__ import annotations

from collections.abc import Sequence

from zpp_lab.config import LEAST_HELDOUT
from zpp_lab.study.band import one_seed
from zpp_lab.study.effects import MainEffect
from zpp_lab.study.levels import level_text
from zpp_lab.study.table import band_widths, margin_nats
from zpp_lab.study.verdict import StudyResult

LONE = "With one seed an arm nothing is tested. Inside the noise band a gap shows nothing; without "
LONE += "a band, nothing says how large a gap noise makes."


def opening(result: StudyResult) -> list[tuple[str, str]]:
    """(what, sentence) for the page's first lines: baseline, margin, stopping rule, controls; with
    one seed also what it shows, and the noise band."""
    study = result.study
    margin = f"±{study.margin:.2%} of the baseline's held-out loss"
    if result.margin is not None:
        margin += f", here {margin_nats(result)}"
    controls = [control.text for control in result.controls]
    lone = one_seed(result)
    told = [
        ("What it shows", LONE if lone else ""),
        ("Baseline", _baseline(result)),
        ("Margin", f"{margin}. A gap inside it does not matter to this study."),
        ("Noise band", band_widths(result) if lone else ""),
        ("Stopping rule", _stopping(result)),
        ("Controls", " ".join(controls) or "None: nothing shows that this study can see a gap."),
    ]
    return [(what, text) for what, text in told if text]


def controls_hold(result: StudyResult) -> bool:
    """Whether each came out as it must, as far as there are seeds to tell."""
    return all(c.ok or c.untested or c.unanswered for c in result.controls)


def _baseline(result: StudyResult) -> str:
    describe, others = result.baseline.arm.describe, result.other_baselines
    text = f"{result.study.baseline}{f' ({describe})' if describe else ''}"
    return f"{text}; other levels have their own: {', '.join(others)}." if others else f"{text}."


def _stopping(result: StudyResult) -> str:
    study = result.study
    seeds = ", ".join(map(str, study.seeds))
    if study.max_seeds <= len(study.seeds):
        return f"fixed beforehand, {_count(len(study.seeds))} an arm ({seeds})."
    return (
        f"{_count(len(study.seeds))} an arm ({seeds}), then {study.seeds_per_look} more at a time "
        f"for the arms that are undecided, {study.max_seeds} at most; tests and intervals are "
        "corrected for the looks in between."
    )


def decision(result: StudyResult) -> list[str]:
    """How the question is decided, as sentences."""
    lone = "These tests need two seeds or more. With one, as here, all that has run is undecided."
    return [
        f"{_seed(result)} The gap of a seed is an arm's held-out loss after the last step minus "
        "that of its baseline with the same seed.",
        "On par: two one-sided paired t tests show that the mean gap lies within the margin. Worse "
        "or better: not on par, and the two-sided paired t test shows a gap above or below 0. "
        "Undecided: neither; more seeds would tell. Intervals are not corrected for the number of "
        "arms; the tests are.",
        *([lone] if one_seed(result) else []),
        f"An arm whose losses are means over fewer than {LEAST_HELDOUT:,} held-out tokens is not "
        "judged: all seeds share them, so no test over seeds knows what other text would say.",
        "Only finished runs count. One that was stopped or failed enters no verdict, gap or mean, "
        "however far it came; curves over training show what it has.",
    ]


def _seed(result: StudyResult) -> str:
    """What differs between two seeds: where all runs are given their weights, not these."""
    models = [run.config.get("model") or {} for run in result.runs]
    if models and all(one.get("start") or one.get("weights") == "pretrained" for one in models):
        return (
            "The first weights are given, alike for all seeds; a seed fixes every batch and what "
            "else is drawn."
        )
    return "A seed fixes the initialization and every batch."


def speed_method() -> list[str]:
    """How speed-ups and break-evens are worked out, as sentences."""
    return [
        "Speed-up: an arm's tokens/s over those of plain FSDP2 with the same model, batch, cluster "
        "and link; both by the median step, its spread by the arm's slowest and fastest step.",
        "Break-even: where the speed-up crosses 1. Between two measured links the logarithm of the "
        "speed-up is taken as linear in that of the bandwidth; beyond them nothing is said. "
        "It goes by the medians: near 1 the spread of the steps tells how far it can be trusted.",
        "Floor: the larger one of two times, that of the link for the bytes of a step and that of "
        "a step without communication. A share of it is the floor over the step.",
    ]


def effect_notes(effects: Sequence[MainEffect]) -> list[str]:
    """What a main effect could not use, one sentence a factor."""
    return [
        f"{effect.factor}: no comparison of like with like for {_levels(effect)}; these are only "
        "dots."
        for effect in effects
        if effect.left_out
    ]


def _levels(effect: MainEffect) -> str:
    return ", ".join(level_text(level, effect.factor) for level in effect.left_out)


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"
