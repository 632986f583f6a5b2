"""The forecast of `zpp-lab study NAME --dry-run`: each run's state, bytes, memory and seconds.

Bytes and memory are the plan's, in closed form. Seconds come from runs that have finished, from
a few real steps of each shape (`calibration.py`: model, cluster, batch, dtypes, with codecs or
without), or from the figures of a named machine (`foreseen.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.config import StudyConfig
from zpp_lab.study.calibration import Cost, Unknown, known_costs
from zpp_lab.study.foreseen import Foreseen, foresee, predicted_seconds
from zpp_lab.study.memory import Memory, shape
from zpp_lab.study.plan import PlannedRun
from zpp_lab.study.runs import last_step, read_run
from zpp_lab.study.sharing import has_shared
from zpp_lab.study.slots import Places, gpus_needed

Who = tuple[str, bool]  # an arm's name, or that of a run before the arms
ENDED = ("finished", "diverged")


@dataclass(frozen=True)
class Forecast:
    """One run of a study: its state, and what is left to pay for it."""

    run: PlannedRun
    state: str  # as its folder says: finished, unfinished, diverged, …
    step: int  # steps done
    foreseen: Foreseen
    cost: Cost | Unknown | None = None  # None: not asked yet

    @property
    def bytes(self) -> int | None:
        """Of all steps, over all ranks."""
        each = self.foreseen.step_bytes
        return None if each is None else self.run.config.train.steps * each

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def seconds(self) -> float | None:
        """Left; None where nothing tells."""
        if self.ended:
            return 0.0
        left = max(0, self.run.config.train.steps - self.step)
        return self.cost.seconds(left) if isinstance(self.cost, Cost) else None

    @property
    def whole_seconds(self) -> float | None:
        """From the first step on."""
        steps = self.run.config.train.steps
        return self.cost.seconds(steps) if isinstance(self.cost, Cost) else None

    @property
    def floor(self) -> bool:
        """Whether its seconds are less than it will take."""
        return isinstance(self.cost, Cost) and self.cost.floor


@dataclass(frozen=True)
class Estimate:
    """A study's forecast, with so many runs side by side. stopped: by Ctrl-C or SIGTERM.

    gpus: of this machine, None where there are none or another machine is asked about; then
    per_gpu says how many of those side by side share each GPU.
    """

    runs: Sequence[Forecast]
    side_by_side: int
    stopped: bool = False
    gpus: int | None = None
    per_gpu: int = 1

    @property
    def seconds(self) -> float:
        """Until the last run ends, if the places are always busy; of the runs that have a cost."""
        work = [f.seconds or 0.0 for f in self.runs]
        spread = sum(s / self._at_once(f) for s, f in zip(work, self.runs, strict=True))
        return max(spread, max(work, default=0.0))

    def _at_once(self, one: Forecast) -> float:
        """How many such runs' seconds pass in one second. GPU time adds up, so of runs that share
        GPUs no more than these could take apart, unless their seconds are such of sharing."""
        if isinstance(one.cost, Cost) and one.cost.shared:
            return self.side_by_side
        if self.gpus:
            apart = self.gpus / gpus_needed(one.run.config)
        else:
            apart = self.side_by_side / self.per_gpu
        return min(self.side_by_side, max(1.0, apart))

    @property
    def added(self) -> bool:
        """Whether runs share GPUs whose time was added up."""
        timed = [f for f in self.runs if not f.ended and isinstance(f.cost, Cost)]
        return any(f.cost and self._at_once(f) < self.side_by_side for f in timed)

    @property
    def as_they_ran(self) -> bool:
        """Whether times of runs that shared GPUs are in it."""
        costs = [f.cost for f in self.runs if not f.ended]
        return any(isinstance(cost, Cost) and cost.shared for cost in costs)

    @property
    def faults(self) -> list[str]:
        """Arms whose measurement failed, and why."""
        return [f"{who}: {c.reason}" for who, c in self._unknown() if c.fault]

    @property
    def unmeasured(self) -> list[str]:
        """Arms that have no cost for another reason, and which."""
        return [f"{who}: {c.reason}" for who, c in self._unknown() if not c.fault]

    def _unknown(self) -> list[tuple[str, Unknown]]:
        """By reason, the arms that share it named together."""
        found: dict[Unknown, dict[str, None]] = {}
        for f in self.runs:
            if isinstance(f.cost, Unknown) and not f.ended:
                found.setdefault(f.cost, {})[f.run.arm] = None
        return [(", ".join(arms), cost) for cost, arms in found.items()]


def forecast(runs: Sequence[PlannedRun]) -> list[Forecast]:
    """What needs no measuring: an arm's plan is made once."""
    seen: dict[Who, Foreseen] = {}
    for run in runs:
        who = (run.arm, run.prepares)
        if who not in seen:
            seen[who] = foresee(run.config)
    return [_forecast(run, seen[run.arm, run.prepares]) for run in runs]


def _forecast(run: PlannedRun, foreseen: Foreseen) -> Forecast:
    state = read_run(run.dir).outcome if (run.dir / "config.yaml").exists() else "unfinished"
    return Forecast(run, state, last_step(run.dir), foreseen)


def known(root: Path, runs: Sequence[PlannedRun], limit: float) -> dict[str, Cost | Unknown]:
    """Costs by shape: from finished runs, else from earlier calibrations. A whole time of a GPU
    alone counts before those of runs that shared one."""
    found: dict[str, Cost | Unknown] = {**known_costs(root, limit)}
    for run in runs:
        if run.finished:
            cost, before = _finished_cost(run), found.get(shape(run.config))
            alone = isinstance(before, Cost) and not (before.shared or before.floor)
            if not (cost.shared and alone):
                found[shape(run.config)] = cost
    return found


def _finished_cost(run: PlannedRun) -> Cost:
    summary = read_run(run.dir).summary or {}
    seconds, steps = float(summary["seconds"]), int(summary["steps"])
    peak = summary.get("peak_memory_bytes")
    return Cost(seconds / max(1, steps), 0.0, peak, shared=has_shared(run.dir))


def predicted(
    runs: Sequence[PlannedRun], machine: str, link_gbps: float | None
) -> dict[Who, Cost | Unknown]:
    """By arm, on a machine that need not be this one. ValueError for an unknown machine."""
    from zpp_lab.cost.machine import load_machine

    load_machine(machine)
    found: dict[Who, Cost | Unknown] = {}
    for run in {(run.arm, run.prepares): run for run in runs}.values():
        try:
            seconds, floor = predicted_seconds(run.config, machine, link_gbps)
            found[run.arm, run.prepares] = Cost(seconds, None, at_least=floor)
        except ValueError as error:
            found[run.arm, run.prepares] = Unknown(str(error))
    return found


def side_by_side(
    study: StudyConfig,
    places: Places,
    costs: Mapping[str, Cost | Unknown],
    runs: Sequence[PlannedRun],
) -> int:
    """How many runs the places take at once, with the measured memory where it decides."""
    memory = Memory(study.runs_per_gpu if places.gpus else 1)
    for key, cost in costs.items():
        if isinstance(cost, Cost):
            memory.know(key, cost.peak_memory_bytes)
    count = 0
    for run in runs:
        if places.take(memory.need(run)) is None:
            break
        count += 1
    return max(1, count)
