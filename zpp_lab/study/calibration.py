"""Seconds a step of a shape of run, from a few real steps in a process with a time limit.

What is measured is kept in the study's folder, so that nothing is measured twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from zpp_lab.config import Config
from zpp_lab.files import write_atomic
from zpp_lab.study.memory import shape
from zpp_lab.study.outcome import ended_run, log_tail
from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.pool import Pool
from zpp_lab.study.queue import Stop
from zpp_lab.study.runs import LOG, last_step, read_metrics
from zpp_lab.study.slots import Need, Places, gpus_needed

FOLDER = ".calibration"  # hidden: no run of the study
STEPS = 6  # of a calibration; the first two warm up, the last one evaluates
TOKENS = "zpp_lab.study.calibration:make_tokens"
_POLL = 0.2  # seconds between looks at the process

Tick = Callable[[float, int], None]  # seconds so far, steps so far


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds a step, seconds of everything else, GPU bytes at the peak.

    other_seconds: evaluations; start and compilation are not in it. None: unknown, so that
    `seconds` is a floor. at_least: step_seconds is a floor too. shared: of a run beside others on
    its GPU; else it had its GPUs for itself.
    """

    step_seconds: float
    other_seconds: float | None
    peak_memory_bytes: int | None = None
    limit: float | None = None  # seconds after which its measurement was ended
    at_least: bool = False
    shared: bool = False

    @property
    def floor(self) -> bool:
        return self.at_least or self.other_seconds is None

    def seconds(self, steps: int) -> float:
        return steps * self.step_seconds + (self.other_seconds or 0.0)


@dataclass(frozen=True)
class Unknown:
    """Why a shape has no cost. fault: its run failed, so the study's would."""

    reason: str
    fault: bool = False


@dataclass(frozen=True)
class Limits:
    """seconds: of one measurement, or of making token files; stop: whether a signal came."""

    seconds: float
    stop: Stop


def calibrate(
    root: Path, run: PlannedRun, entry: str, places: Places, limits: Limits, tick: Tick
) -> Cost | Unknown:
    """Train a few steps of `run`'s shape in a process, which has ended when this returns.

    Past the limit the cost comes from the whole steps so far, the first one left out: it warms
    up. Without a second one there is none.
    """
    sample = _sample(root, run)
    shutil.rmtree(sample.dir, ignore_errors=True)  # of an attempt that failed
    code, passed = run_alone(sample, entry, places, limits, tick)
    if code is None:
        found = _cut_short(read_metrics(sample.dir), passed, limits)
    else:
        result = ended_run(sample, code)
        if result.summary is None:
            error = (result.failure or {}).get("error")
            return Unknown(f"{result.outcome}: {error} (in {sample.dir})", fault=True)
        peak = result.summary.get("peak_memory_bytes")
        found = whole_cost(read_metrics(sample.dir), run.config, peak)
    shutil.rmtree(sample.dir, ignore_errors=True)
    if isinstance(found, Cost) and not limits.stop.requested:
        text = json.dumps({"shape": shape(run.config), "cost": asdict(found)}, indent=1)
        write_atomic(sample.dir.with_suffix(".json"), text + "\n")
    return found


def known_costs(root: Path, limit: float) -> dict[str, Cost]:
    """Of earlier calibrations, by shape. One that was cut short is measured again under a
    longer limit; a file that cannot be read is one less."""
    found: dict[str, Cost] = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            cost = Cost(**stored["cost"])
        except (ValueError, KeyError, TypeError):
            continue
        if cost.limit is None or limit <= cost.limit:
            found[stored["shape"]] = cost
    return found


def tokens_are_ready(config: Config) -> bool:
    from zpp_lab.data.corpus import open_corpus
    from zpp_lab.data.prepare import is_prepared

    return is_prepared(open_corpus(config.data), config.data)


def make_tokens(config: Config) -> None:
    """The body of a process: its token files, as a run would make them."""
    from zpp_lab.data import open_data

    open_data(config.data)


def prepare_tokens(
    root: Path, run: PlannedRun, places: Places, limits: Limits, tick: Tick
) -> Unknown | None:
    """Make the token files of `run` in a process; a word when they are not there afterwards."""
    sample = _sample(root, run)
    code, passed = run_alone(sample, TOKENS, places, limits, tick)
    said = log_tail(sample.dir / LOG).splitlines() or ["no word"]
    shutil.rmtree(sample.dir, ignore_errors=True)
    if code is None:
        return Unknown(f"its token files were not made in {passed:.0f} s")
    return Unknown(f"its token files: {said[-1]}", fault=True) if code else None


def run_alone(
    sample: PlannedRun, entry: str, places: Places, limits: Limits, tick: Tick
) -> tuple[int | None, float]:
    """(exit code, seconds); None: ended by us, at the limit or after a signal."""
    slot = places.take(Need(gpus_needed(sample.config)))
    assert slot is not None, "the places are empty before the study"
    pool, began = Pool(entry), time.monotonic()
    try:
        pool.start(sample, slot)
        while True:
            for ended in pool.wait(_POLL):
                return ended.code, time.monotonic() - began
            passed = time.monotonic() - began
            if passed >= limits.seconds or limits.stop.requested:
                return None, passed
            tick(passed, last_step(sample.dir))
    finally:
        pool.stop()
        places.give(slot)


def _sample(root: Path, run: PlannedRun) -> PlannedRun:
    """`run` with few steps, in a hidden folder of its shape."""
    name = hashlib.sha256(shape(run.config).encode()).hexdigest()[:12]
    folder = root / FOLDER / name
    train = replace(run.config.train, steps=STEPS, eval_every=STEPS, checkpoint_every=0)
    train = replace(train, keep_checkpoints=0)
    quiet = replace(run.config.tracking, wandb="off", telemetry_every=0)
    place = replace(run.config.run, dir=str(folder), study=None, resume=False)
    model = replace(run.config.model, start=None)  # it may not be there yet, and costs no step
    config = replace(run.config, train=train, tracking=quiet, run=place, model=model)
    return PlannedRun(run.arm, run.seed, folder, config)


def whole_cost(rows: Sequence[Mapping[str, Any]], config: Config, peak: int | None) -> Cost:
    """From the cumulative seconds of a calibration's steps."""
    times = [float(row["seconds"]) for row in rows]
    steps = [b - a for a, b in pairwise(times[1:])]
    step = median(steps[:-1])
    evaluation = max(0.0, steps[-1] - step)
    return Cost(step, evaluation * (config.train.steps // config.train.eval_every + 2), peak)


def _cut_short(rows: Sequence[Mapping[str, Any]], passed: float, limits: Limits) -> Cost | Unknown:
    """From the steps that were whole. The one that evaluates is never among them."""
    times = [float(row["seconds"]) for row in rows[: STEPS - 1]]
    if len(times) < 2:
        ended = f"one step ended, its first ({times[0]:.1f} s)" if times else "no step ended"
        way = "a larger --limit measures longer, --machine predicts for a machine"
        way = "stopped by a signal" if limits.stop.requested else way
        return Unknown(f"{ended}, in {passed:.0f} s; {way}")
    steps = [b - a for a, b in pairwise(times[1:] if len(times) > 2 else times)]
    return Cost(median(steps), None, limit=limits.seconds)
