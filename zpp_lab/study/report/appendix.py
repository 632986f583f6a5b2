"""A report's appendix: how arms differ, how to run a row again, what the finished runs share.

It has the baseline's settings that are not the defaults, and those of every arm that differ.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zpp_lab.config.compose import compose
from zpp_lab.config.flat import differing, flat_config
from zpp_lab.config.load import written
from zpp_lab.config.study import PREPARE
from zpp_lab.runs.reader import Run
from zpp_lab.study.judge.verdict import ArmResult, StudyResult
from zpp_lab.study.words import NOTHING

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
        """Return (setting, the arm's value, its baseline's) where they differ."""
        base = self._flat.get(self.result.baseline_of(arm).name)
        own = self._flat.get(arm.name)
        if own is None or base is None:
            return []
        return [
            (key, value_text(own.get(key)), value_text(base.get(key)))
            for key in differing(own, base)
            if key not in _HIDDEN
        ]

    def baseline_settings(self) -> list[str]:
        """Return the settings of the baseline's first run that are not defaults, one a line."""
        own = self._flat.get(self.result.study.baseline)
        if own is None:
            return []
        return [f"{key}={written(own.get(key))}" for key in differing(own, self._usual())]

    def command(self, arm: ArmResult) -> str | None:
        """Return the shell command that runs one seed of an arm again; None when no run tells."""
        words = self.overrides(arm)
        return None if words is None else shlex.join(["zpp-lab", "train", *words])

    def overrides(self, arm: ArmResult) -> list[str] | None:
        """Return the Hydra overrides of the arm's first seed, of the study or its config."""
        study = self.result.study
        run = self._runs.get(arm.name)
        seed = run.seed if run else study.seeds[0]
        if arm.arm.overrides or study.overrides:
            start = _start(run)
            begin = [f"model.start={written(start)}", *study.start_overrides]
            begin = begin if start and study.prepare else []
            return [*study.overrides, *begin, *arm.arm.overrides, f"seed={seed}"]
        if run is None:
            return None
        own = self._flat[arm.name]
        keys = [k for k in differing(own, self._usual()) if k != "seed"]
        return [*(f"{key}={written(own.get(key))}" for key in keys), f"seed={run.seed}"]

    def prepared(self) -> dict[str, str]:
        """Return the commands of the runs that arms start from, by name, in the folders that the
        arms' commands take; without those that no arm has started from yet."""
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

    def _usual(self) -> dict[str, Any]:
        """The settings of a run that is given none."""
        if self._standard is None:
            self._standard = flat_config(compose([]))
        return self._standard


def _start(run: Run | None) -> str | None:
    """The folder of the run whose weights a run started from."""
    return ((run.config if run else {}).get("model") or {}).get("start")


def value_text(value: Any) -> str:
    """Return a setting's value as config files write it, on one line."""
    if value is None:
        return NOTHING
    return str(value).lower() if isinstance(value, bool) else str(value)


def facts(result: StudyResult) -> list[tuple[str, str]]:
    """Return machine, commit, data and sizes, from the finished runs; several values are listed."""
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
    counts = Counter(_commit(summary) for summary in summaries)  # runs without one too
    each = [f"{one} ({n} run{'' if n == 1 else 's'})" for one, n in counts.items()]
    return [
        ("Data", values("data", "name")),
        ("Data hash", values("data", "hash")),
        ("Tokens in the data", values("data", "tokens")),
        ("Model parameters", values("model_parameters")),
        ("Cluster", "; ".join(grid) or NOTHING),
        ("Steps", values("steps")),
        ("Tokens of a run", values("tokens")),
        ("Commit", "; ".join(each if len(each) > 1 else counts) or NOTHING),
        ("Machine", values("machine")),
        ("Versions", values("versions")),
    ]


def scope(result: StudyResult) -> str:
    """Return what the answer was measured on, in one sentence; "" before any run has finished."""
    runs = [run for run in result.runs if run.summary is not None]
    if not runs:
        return ""
    sizes = _span([(run.summary or {}).get("model_parameters") for run in runs], _big)
    steps = _span([run.step for run in runs], "{:,}".format)
    tokens = _span([(run.summary or {}).get("tokens") for run in runs], _big)
    seeds = _span([len(arm.finished) for arm in result.arms if arm.finished], str)
    grid = dict.fromkeys(_cluster((run.summary or {}).get("cluster") or {}) for run in runs)
    virtual = all((run.config.get("engine") or {}).get("name") == "virtual" for run in runs)
    where = f"{' or '.join(grid)}{' (virtual: one process)' if virtual else ''}"
    weights = "given" if all(given(run) for run in runs) else "random"
    return (
        f"Measured with {sizes} parameters from {weights} weights, {steps} "
        f"steps ({tokens} tokens), {where}, {seeds} seed{'s' * (seeds != '1')} an arm. Other "
        "scales are not tested here."
    )


def given(run: Run) -> bool:
    model = run.config.get("model") or {}
    return bool(model.get("start")) or model.get("weights") == "pretrained"


def _span(values: Sequence[float | None], text: Callable[[Any], str]) -> str:
    """The values' range in words: one of them, or the first and last."""
    known = sorted(value for value in values if value is not None)
    return " to ".join(dict.fromkeys(map(text, (known[0], known[-1])))) if known else NOTHING


def _big(value: float) -> str:
    """13767552 → "13.8M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _commit(summary: Mapping[str, Any]) -> str:
    """Of one run; those of its pieces where they differ."""
    first, *more = summary.get("commits") or [summary]
    lines = [f"after step {one['after']} {one['commit'] or _UNKNOWN}" for one in more]
    return ", ".join([first.get("commit") or _UNKNOWN, *lines])


def _cluster(grid: dict[str, Any]) -> str:
    nodes, gpus = grid.get("nodes"), grid.get("gpus_per_node")
    split = [f", {axis}={grid[axis]}" for axis in ("tp", "pp") if grid.get(axis, 1) > 1]
    return f"{nodes} node{'s' * (nodes != 1)} × {gpus} GPU{'s' * (gpus != 1)}{''.join(split)}"


def _named(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {value / 2**30:.0f} GiB"
    return f"{key} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_named(k, v) for k, v in value.items() if v is not None and v != [])
    if isinstance(value, list):  # two GPUs of a kind are "2 × NVIDIA H200"
        counts = {_words(one): value.count(one) for one in value}
        return ", ".join(f"{n} × {one}" if n > 1 else one for one, n in counts.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\u202f")  # narrow spaces part the thousands
    return NOTHING if value is None else str(value)
