"""`zpp-lab study NAME --dry-run`: the runs, what they will cost, and what is done already.

Bytes are the plan's, in closed form. Seconds come from runs that have finished, else from a few
real steps of each shape (model, cluster, batch, dtypes, with codecs or without), which are kept
in the study's folder and not measured again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from zpp_lab.config import Config, StudyConfig
from zpp_lab.files import write_atomic
from zpp_lab.study.locks import held
from zpp_lab.study.memory import Memory, shape
from zpp_lab.study.outcome import ended_run
from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.pool import Pool
from zpp_lab.study.runs import last_step, read_metrics, read_run
from zpp_lab.study.slots import Places, make_places

FOLDER = ".calibration"  # hidden: no run of the study
_STEPS = 6  # of a calibration; the first two warm up, the last one evaluates


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds a step, seconds of everything else, GPU bytes at the peak."""

    step_seconds: float
    other_seconds: float  # evaluations; start and compilation are not in it
    peak_memory_bytes: int | None = None

    def seconds(self, steps: int) -> float:
        return steps * self.step_seconds + self.other_seconds


@dataclass(frozen=True)
class Forecast:
    """One run of a study: its state, and what is left to pay for it."""

    run: PlannedRun
    state: str  # as its folder says: finished, unfinished, diverged, …
    step: int  # steps done
    bytes: int  # of all steps, over all ranks
    seconds: float | None  # left; None where its shape could not be measured
    whole_seconds: float | None  # from the first step on


@dataclass(frozen=True)
class Estimate:
    """A study's forecast on this machine, with so many runs side by side."""

    runs: Sequence[Forecast]
    side_by_side: int
    faults: Sequence[str]  # shapes that could not be measured, and why

    @property
    def seconds(self) -> float:
        """Until the last run ends, if the places are always busy."""
        work = [f.seconds or 0.0 for f in self.runs]
        return max(sum(work) / self.side_by_side, max(work, default=0.0))


def estimate(
    study: StudyConfig, root: Path, runs: Sequence[PlannedRun], jobs: int, entry: str
) -> Estimate:
    """What is left of `runs`. Trains a few steps of each shape that was never measured."""
    root.mkdir(parents=True, exist_ok=True)
    places = make_places(jobs or study.jobs, study.runs_per_gpu, [run.config for run in runs])
    costs = _known(root, runs)
    samples = {shape(r.config): r for r in reversed(runs) if not r.finished}
    faults = []
    for key, sample in samples.items():
        if key not in costs and not held(root):  # else it would slow the study and itself
            measured = _calibrate(root, sample, entry, places)
            if isinstance(measured, str):
                faults.append(f"{sample.arm}: {measured}")
            else:
                costs[key] = measured
    volumes = {_who(run): step_bytes(run.config) for run in _one_an_arm(runs)}
    forecast = [_forecast(run, costs.get(shape(run.config)), volumes[_who(run)]) for run in runs]
    return Estimate(forecast, _side_by_side(study, places, costs, forecast), faults)


def step_bytes(config: Config) -> int:
    """Bytes that all ranks together send in one step, from the plan; nothing is trained.

    0 with engine=deepspeed, which follows no plan of ours.
    """
    if config.engine.name == "deepspeed":
        return 0
    from zpp_lab.data import open_data  # torch comes with these
    from zpp_lab.engines.build import build_plan
    from zpp_lab.models import build_model

    vocabulary = open_data(config.data).vocab_size
    plan = build_plan(build_model(config.model, vocabulary, device="meta"), config)
    return sum(sum(traffic) for traffic in plan.step_bytes().values())


def _one_an_arm(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return list({_who(run): run for run in runs}.values())


def _who(run: PlannedRun) -> tuple[str, bool]:
    return run.arm, run.prepares


def _forecast(run: PlannedRun, cost: Cost | None, volume: int) -> Forecast:
    steps, done = run.config.train.steps, last_step(run.dir)
    state = read_run(run.dir).outcome if (run.dir / "config.yaml").exists() else "unfinished"
    seconds = None if cost is None else cost.seconds(max(0, steps - done))
    seconds = 0.0 if state in ("finished", "diverged") else seconds
    whole = None if cost is None else cost.seconds(steps)
    return Forecast(run, state, done, steps * volume, seconds, whole)


def _side_by_side(
    study: StudyConfig, places: Places, costs: Mapping[str, Cost], runs: Sequence[Forecast]
) -> int:
    """How many runs the places take at once, with the measured memory where it decides."""
    memory = Memory(study.runs_per_gpu if places.gpus else 1)
    for key, cost in costs.items():
        memory.know(key, cost.peak_memory_bytes)
    count = 0
    for forecast in runs:
        if places.take(memory.need(forecast.run)) is None:
            break
        count += 1
    return max(1, count)


def _known(root: Path, runs: Sequence[PlannedRun]) -> dict[str, Cost]:
    """Costs by shape: from finished runs, else from earlier calibrations."""
    found: dict[str, Cost] = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found[stored["shape"]] = Cost(**stored["cost"])
    for run in runs:
        if run.finished:
            summary = read_run(run.dir).summary or {}
            seconds, steps = float(summary["seconds"]), int(summary["steps"])
            peak = summary.get("peak_memory_bytes")
            found[shape(run.config)] = Cost(seconds / max(1, steps), 0.0, peak)
    return found


def _calibrate(root: Path, run: PlannedRun, entry: str, places: Places) -> Cost | str:
    """Train a few steps in a process of their own; a text says why it did not work."""
    key = shape(run.config)
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = root / FOLDER / name
    train = replace(run.config.train, steps=_STEPS, eval_every=_STEPS, checkpoint_every=0)
    quiet = replace(run.config.tracking, wandb="off", telemetry_every=0)
    place = replace(run.config.run, dir=str(folder), study=None, resume=False)
    model = replace(run.config.model, start=None)  # it may not be there yet, and costs no step
    config = replace(run.config, train=train, tracking=quiet, run=place, model=model)
    sample = PlannedRun(run.arm, run.seed, folder, config)
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    code = _run_alone(sample, entry, places)
    result = ended_run(sample, code)
    if result.summary is None:
        return f"{result.outcome}: {(result.failure or {}).get('error')}"
    cost = _cost(read_metrics(folder), run.config, result.summary.get("peak_memory_bytes"))
    text = json.dumps({"shape": key, "cost": asdict(cost)}, indent=1)
    write_atomic(root / FOLDER / f"{name}.json", text + "\n")
    return cost


def _run_alone(sample: PlannedRun, entry: str, places: Places) -> int:
    from zpp_lab.study.slots import Need, gpus_needed

    slot = places.take(Need(gpus_needed(sample.config)))
    assert slot is not None, "the places are empty before the study"
    pool = Pool(entry)
    try:
        pool.start(sample, slot)
        while True:
            for ended in pool.wait(1.0):
                return ended.code
    finally:
        pool.stop()
        places.give(slot)


def _cost(rows: Sequence[Mapping[str, Any]], config: Config, peak: int | None) -> Cost:
    """From the cumulative seconds of a calibration's steps."""
    times = [float(row["seconds"]) for row in rows]
    steps = [b - a for a, b in pairwise(times[1:])]
    step = median(steps[:-1])
    evaluation = max(0.0, steps[-1] - step)
    return Cost(step, evaluation * (config.train.steps // config.train.eval_every + 2), peak)
