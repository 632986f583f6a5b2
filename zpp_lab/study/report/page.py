"""The report's words: how the question is decided, whether the controls hold, what was left out.

The template and the Markdown text both read these.

The report's appendix: how arms differ, the baseline's whole config, and how to rerun a row.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zpp_lab.config.compose import differing, flat_config
from zpp_lab.config.load import written
from zpp_lab.config.schema import LEAST_HELDOUT
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.effects import MainEffect, level_text
from zpp_lab.study.judge.noise import one_seed
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.report.table import NOTHING, band_widths, margin_nats
from zpp_lab.study.run.plan import PREPARE

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


_HIDDEN = ("seed", "recipe.name")
_UNKNOWN = "not recorded"


class Appendix:
    """Reads every config once; a study of a hundred arms asks for them many times."""

    def __init__(self, result: StudyResult) -> None:
        self.result = result
        runs = {arm.name: arm.first_run for arm in result.arms}
        self._runs = {name: run for name, run in runs.items() if run is not None}
        self._flat = {name: flat_config(run.config) for name, run in self._runs.items()}
        self._standard: dict[str, Any] | None = None

    def differences(self, arm: ArmResult) -> list[tuple[str, str, str]]:
        """(setting, the arm's value, its baseline's) for the settings in which they differ."""
        base = self._flat.get(self.result.baseline_of(arm).name)
        own = self._flat.get(arm.name)
        if own is None or base is None:
            return []
        return [
            (key, value_text(own.get(key)), value_text(base.get(key)))
            for key in differing(own, base)
            if key not in _HIDDEN
        ]

    def baseline_config(self) -> str:
        """The whole config of the baseline's first run as YAML, where it ran left out; or ""."""
        run = self._runs.get(self.result.study.baseline)
        if run is None:
            return ""
        kept = {key: value for key, value in run.config.items() if key != "run"}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)

    def command(self, arm: ArmResult) -> str | None:
        """The shell command that runs one seed of an arm again; None when no run tells."""
        words = self.overrides(arm)
        return None if words is None else shlex.join(["zpp-lab", "train", *words])

    def overrides(self, arm: ArmResult) -> list[str] | None:
        """The Hydra overrides of the arm's first seed: the study's, or those its config shows."""
        study = self.result.study
        run = self._runs.get(arm.name)
        seed = run.seed if run else study.seeds[0]
        if arm.arm.overrides or study.overrides:
            start = _start(run)
            begin = [f"model.start={written(start)}"] if start and study.prepare else []
            return [*study.overrides, *begin, *arm.arm.overrides, f"seed={seed}"]
        return None if run is None else self._from_config(run, arm.name)

    def prepared(self) -> dict[str, str]:
        """The commands of the runs that arms start from, by name, in the folders that the arms'
        commands take; without those that no arm has started from yet."""
        study = self.result.study
        starts = {start for run in self._runs.values() if (start := _start(run))}
        made_first = [start for start in sorted(starts) if Path(start).parent.name == PREPARE]
        folders = {Path(start).name: start for start in made_first}
        made: dict[str, str] = {}
        for one in study.prepare:
            if one.name in folders:
                place = f"run.dir={written(folders[one.name])}"
                words = [*study.overrides, *one.overrides, f"seed={one.seed}", place]
                made[one.name] = shlex.join(["zpp-lab", "train", *words])
        return made

    def _from_config(self, run: Run, name: str) -> list[str]:
        """What changes the project's standard config into the run's."""
        from zpp_lab.config.compose import (
            compose,  # Hydra is slow to import, and a study needs none
        )

        if self._standard is None:
            self._standard = flat_config(compose([]))
        keys = [k for k in differing(self._flat[name], self._standard) if k != "seed"]
        changed = [f"{key}={written(self._flat[name].get(key))}" for key in keys]
        return [*changed, f"seed={run.seed}"]


def _start(run: Run | None) -> str | None:
    """The folder of the run whose weights a run started from."""
    return ((run.config if run else {}).get("model") or {}).get("start")


def value_text(value: Any) -> str:
    """A setting's value as config files write it, on one line."""
    if value is None:
        return NOTHING
    return str(value).lower() if isinstance(value, bool) else str(value)


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

    grid = {_cluster(summary.get("cluster") or {}): None for summary in summaries}
    return [
        ("Data", values("data", "name")),
        ("Data hash", values("data", "hash")),
        ("Tokens in the data", values("data", "tokens")),
        ("Model parameters", values("model_parameters")),
        ("Cluster", "; ".join(grid) or NOTHING),
        ("Steps", values("steps")),
        ("Tokens of a run", values("tokens")),
        ("Commit", _commits(summaries)),
        ("Machine", values("machine")),
        ("Versions", values("versions")),
    ]


def _commits(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The commit of all runs, or each one with the number of its runs; runs without one too."""
    counts = Counter(_commit(summary) for summary in summaries)
    if len(counts) < 2:
        return "".join(counts) or NOTHING
    return "; ".join(f"{one} ({n} run{'' if n == 1 else 's'})" for one, n in counts.items())


def _commit(summary: Mapping[str, Any]) -> str:
    """Of one run; those of its pieces where they differ."""
    first, *more = summary.get("commits") or [summary]
    told = [f"after step {one['after']} {one['commit'] or _UNKNOWN}" for one in more]
    return ", ".join([first.get("commit") or _UNKNOWN, *told])


def _cluster(grid: dict[str, Any]) -> str:
    nodes, gpus = grid.get("nodes"), grid.get("gpus_per_node")
    return f"{nodes} node{'s' * (nodes != 1)} × {gpus} GPU{'s' * (gpus != 1)}"


def _named(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {value / 2**30:.0f} GiB"
    return f"{key} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_named(k, v) for k, v in value.items() if v is not None)
    if isinstance(value, list):  # two GPUs of a kind are "2 × NVIDIA H200"
        counts = {_words(one): value.count(one) for one in value}
        return ", ".join(f"{n} × {one}" if n > 1 else one for one, n in counts.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\u202f")  # narrow spaces part the thousands
    return NOTHING if value is None else str(value)
