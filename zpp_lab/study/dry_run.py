"""Prints what a study would do: at once what follows from its settings, then seconds.

Seconds are measured where nothing tells them: announced, in processes that end at a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zpp_lab.config import Config, StudyConfig
from zpp_lab.locks import held
from zpp_lab.machine import memory_bytes
from zpp_lab.study import attempts, calibration
from zpp_lab.study.calibration import STEPS, Cost, Limits, Tick, Unknown
from zpp_lab.study.cost import Estimate, Forecast, forecast, known, predicted, side_by_side
from zpp_lab.study.foreseen import Needed
from zpp_lab.study.launch import ENTRY, check_time
from zpp_lab.study.memory import shape
from zpp_lab.study.plan import Compose, PlannedRun, check_runs, notes, plan_runs, to_do
from zpp_lab.study.progress import duration
from zpp_lab.study.queue import Stop, stop_on_signals
from zpp_lab.study.sharing import ADDED, AS_THEY_RAN
from zpp_lab.study.slots import Places, check_jobs, make_places

LIMIT = 60.0  # seconds of one measurement
LEAST = "≥: weights, optimizer and gradients; activations come on top."
FLOOR = "≥: training steps without evaluation{more}."
ALONE = ", and of engine=virtual what the ranks compute, without codecs and waiting"


@dataclass(frozen=True)
class Asked:
    """How seconds are found: measured here for at most `limit` seconds each (0: not at all), or
    predicted for a `machine` whose nodes have links of `link_gbps` (None: as inside a node)."""

    limit: float = LIMIT
    machine: str | None = None
    link_gbps: float | None = None


def dry_run(
    study: StudyConfig,
    root: Path,
    jobs: int = 0,
    asked: Asked | None = None,
    *,
    launcher: str | None = None,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    until: float | None = None,
    compose: Compose | None = None,
    entry: str = ENTRY,
    console: Console | None = None,
) -> Estimate:
    """Compose every run, print its bytes and memory, find its seconds, and print the forecast.

    launcher, arms, seeds, until: as of `run_study`. Raises what that raises before its first run,
    but looks for the files that runs read only where they would run here; starts no run of the
    study. SIGINT and SIGTERM end the measuring and not the forecast.
    """
    if compose is None:
        from zpp_lab.compose import compose as hydra_compose

        compose = hydra_compose
    console, asked = console or Console(), asked or Asked()
    runs = plan_runs(study, root, compose, arms, seeds)
    _check_place(study, root, runs, launcher, until, asked)
    check_jobs(jobs)
    ended = sum(run.finished for run in runs)
    console.print(
        f"Study {study.name}, {root}: {_several(len(runs), 'run')}, {ended} finished.",
        soft_wrap=True,
    )
    for note in notes(to_do(runs)):
        console.print(note, soft_wrap=True)
    found = forecast(runs)
    console.print(_plan_table(study, found))
    if any(f.foreseen.memory and f.foreseen.memory.at_least for f in found):
        console.print(LEAST)
    if asked.machine is not None:
        costs = predicted(runs, asked.machine, asked.link_gbps)
        by_arm = [replace(f, cost=costs[f.run.arm, f.run.prepares]) for f in found]
        result = Estimate(by_arm, max(1, jobs), per_gpu=max(1, study.runs_per_gpu))
    else:
        with stop_on_signals() as stop:
            result = _Measuring(study, root, found, entry, asked.limit, stop, console).run(jobs)
    _print_times(study, result, asked, console)
    if study.max_seeds > len(study.seeds) and not (arms or seeds):
        console.print(f"Undecided arms get more seeds, up to {study.max_seeds} each.")
    return result


def _check_place(
    study: StudyConfig,
    root: Path,
    runs: Sequence[PlannedRun],
    launcher: str | None,
    until: float | None,
    asked: Asked,
) -> None:
    """ValueError for what the runs could not start with."""
    check_time(until, launcher)
    if launcher is not None:
        from zpp_lab.study.batch import check_launcher  # Hydra is slow to import

        check_launcher(launcher, root)
    elif asked.machine is None:  # elsewhere other folders may be there
        check_runs(study, runs)


class _Measuring:
    """Finds the costs of a study's shapes, one after the other, and says what it does."""

    def __init__(
        self,
        study: StudyConfig,
        root: Path,
        runs: Sequence[Forecast],
        entry: str,
        limit: float,
        stop: Stop,
        console: Console,
    ) -> None:
        self.study, self.root, self.forecast, self.entry = study, root, runs, entry
        self.runs = [f.run for f in runs]
        self.limits, self.console = Limits(limit, stop), console
        self.costs = known(root, self.runs, limit)
        self.tokens: dict[str, Unknown | None] = {}  # by data settings
        self.needs = {shape(f.run.config): f.foreseen.memory for f in runs}

    def run(self, jobs: int) -> Estimate:
        configs = [run.config for run in self.runs]
        places = make_places(jobs or self.study.jobs, self.study.runs_per_gpu, configs)
        wanted = {shape(f.run.config): f.run for f in reversed(self.forecast) if not f.ended}
        wanted = {key: run for key, run in wanted.items() if key not in self.costs}
        reason = self._not_now()
        if reason:
            self.costs |= {key: Unknown(reason) for key in wanted}
        elif wanted:
            self._measure(dict(reversed(wanted.items())), places)
        found = [replace(f, cost=self.costs.get(shape(f.run.config))) for f in self.forecast]
        side = side_by_side(self.study, places, self.costs, self.runs)
        return Estimate(found, side, self.limits.stop.requested, len(places.gpus) or None)

    def _not_now(self) -> str | None:
        if self.limits.seconds <= 0:
            return "--limit 0 measures nothing"
        if held(self.root):
            return "the study is running, which measuring would slow; see --watch"
        return None

    def _measure(self, wanted: dict[str, PlannedRun], places: Places) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.console.print(
            f"Measuring {_several(len(wanted), 'shape')} of run, {STEPS} steps each, for at most "
            f"{self.limits.seconds:g} s each (--limit; --limit 0 measures nothing, --machine "
            "predicts). Ctrl-C ends it.",
            soft_wrap=True,
        )
        for key, run in wanted.items():
            self.costs[key] = self._one(run, places)
            self.console.print(f"  {run.arm}: {_said(self.costs[key])}", soft_wrap=True)

    def _one(self, run: PlannedRun, places: Places) -> Cost | Unknown:
        if self.limits.stop.requested:
            return Unknown("stopped before its turn")
        need = self.needs[shape(run.config)]
        if need is not None and not places.gpus and _all(need, run.config) > memory_bytes():
            return Unknown(
                f"needs {amount(_all(need, run.config))} of memory, and this machine has "
                f"{amount(memory_bytes())}"
            )
        lacking = self._tokens(run, places)
        if lacking is not None:
            return lacking
        with self._ticking(f"{run.arm}: ") as tick:
            return calibration.calibrate(self.root, run, self.entry, places, self.limits, tick)

    def _tokens(self, run: PlannedRun, places: Places) -> Unknown | None:
        """Make the token files of `run` if they are not there; a word when that took too long."""
        key = repr(run.config.data)
        if key not in self.tokens:
            self.tokens[key] = self._make_tokens(run, places)
        return self.tokens[key]

    def _make_tokens(self, run: PlannedRun, places: Places) -> Unknown | None:
        if calibration.tokens_are_ready(run.config):
            return None
        data = run.config.data
        learnt = f", with a BPE of {data.vocab_size:,}" if data.tokenizer == "bpe" else ""
        self.console.print(
            f"  data={data.name} has no token files yet: they are made first{learnt}, for at most "
            f"{self.limits.seconds:g} s.",
            soft_wrap=True,
        )
        with self._ticking("token files: ") as tick:
            lacking = calibration.prepare_tokens(self.root, run, places, self.limits, tick)
        if lacking is None or lacking.fault or self.limits.stop.requested:
            return lacking
        return Unknown(
            f"{lacking.reason}; make them once with `zpp-lab prepare {self.study.name}` and the "
            "same settings, or give a larger --limit"
        )

    @contextmanager
    def _ticking(self, lead: str) -> Iterator[Tick]:
        """A live line on a terminal, nothing elsewhere."""
        with self.console.status(lead) as status:

            def tick(seconds: float, steps: int) -> None:
                done = f", step {steps} of {STEPS}" if steps else ""
                status.update(f"{lead}{seconds:.0f} s of at most {self.limits.seconds:g}{done}")

            yield tick


def _all(need: Needed, config: Config) -> int:
    return need.nbytes * (config.cluster.world if need.each else 1)


def _said(found: Cost | Unknown) -> str:
    if isinstance(found, Unknown):
        return "not measured, as said below"
    part = " from the steps that were whole; evaluation is not in it" if found.floor else ""
    return f"{found.step_seconds:.3g} s a step{part}"


# ---------------------------------------------------------------------- shown


def _plan_table(study: StudyConfig, runs: Sequence[Forecast]) -> Table:
    def cells(own: Sequence[Forecast]) -> list[str]:
        begun = sum(f.step > 0 and f.state == "unfinished" for f in own)
        sent = "?" if own[0].bytes is None else amount(own[0].bytes)
        return [str(len(own)), _ended(study, own), str(begun), sent, _memory(own[0])]

    return _table(study, runs, ("Runs", "Ended", "Begun", "Sent in a run", "Memory"), cells)


def _print_times(study: StudyConfig, found: Estimate, asked: Asked, console: Console) -> None:
    def cells(own: Sequence[Forecast]) -> list[str]:
        mark = "≥ " if own[0].floor else ""
        open_runs = [f for f in own if not f.ended]
        left = [f.seconds for f in open_runs if f.seconds is not None]
        whole = next((f.whole_seconds for f in own if f.whole_seconds is not None), None)
        return [
            "?" if whole is None else mark + duration(whole),
            ("" if not open_runs else mark) + duration(sum(left))
            if len(left) == len(open_runs)
            else "?",
        ]

    timed = any(f.whole_seconds is not None or f.ended for f in found.runs)
    if timed:
        console.print(_table(study, found.runs, ("Time of a run", "Time left"), cells))
    if any(f.floor for f in found.runs):
        virtual = any(isinstance(f.cost, Cost) and f.cost.at_least for f in found.runs)
        console.print(FLOOR.format(more=ALONE if virtual else ""), soft_wrap=True)
    for told in [ADDED] * found.added + [AS_THEY_RAN] * found.as_they_ran:
        console.print(told, soft_wrap=True)
    for fault in found.faults:
        console.print(f"no cost for the shape of {fault}", soft_wrap=True)
    for reason in found.unmeasured:
        console.print(f"?: {reason}" if timed else f"No times of {reason}", soft_wrap=True)
    console.print(_summary(found, asked), soft_wrap=True)


def _summary(found: Estimate, asked: Asked) -> str:
    ended = sum(f.ended for f in found.runs)
    sent = [f.bytes for f in found.runs]
    unknown = sum(f.seconds is None for f in found.runs)
    about = "at least" if any(f.floor for f in found.runs) else "about"
    left = f"{about} {duration(found.seconds)} left"
    if unknown:
        left = f"{left} without the {_several(unknown, 'run')} marked ?"
    if unknown == len(found.runs) - ended and unknown:
        left = "time left unknown"
    where = f" on {asked.machine}" if asked.machine else ""
    total = amount(sum(n for n in sent if n is not None))
    return (
        f"{_several(len(found.runs), 'run')}, {ended} ended already; {left}{where} with "
        f"{found.side_by_side} side by side, without start-up; the ranks send {total} in all"
        f"{'' if None not in sent else ', those marked ? not counted'}."
    )


def _table(
    study: StudyConfig,
    runs: Sequence[Forecast],
    names: Sequence[str],
    cells: Callable[[Sequence[Forecast]], list[str]],
) -> Table:
    """A row for each run before the arms and for each arm."""
    table = Table(box=None, pad_edge=False)
    for name in ("Arm", *names):
        table.add_column(name, justify="left" if name == "Arm" else "right")
    for one in study.prepare:
        own = [f for f in runs if f.run.prepares and f.run.arm == one.name]
        table.add_row(str(own[0].run), *cells(own))
    for arm in study.arms:
        own = [f for f in runs if not f.run.prepares and f.run.arm == arm.name]
        if own:  # the other arms are left alone
            table.add_row(arm.name, *cells(own))
    return table


def _ended(study: StudyConfig, own: Sequence[Forecast]) -> str:
    ended = Counter(f.state for f in own if f.state != "unfinished")
    lost = sum(bool(attempts.given_up(f.run.dir, study.retries)) for f in own)
    words = [f"{n} {state.replace('_', ' ')}" for state, n in ended.items()]
    return ", ".join(words) + (f" ({lost} for good)" if lost else "") or "0"


def _memory(one: Forecast) -> str:
    need = one.foreseen.memory
    if need is None:
        return "?"
    text = f"{amount(need.nbytes)}{' a GPU' if need.each else ''}"
    return f"≥ {text}" if need.at_least else text


def amount(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
