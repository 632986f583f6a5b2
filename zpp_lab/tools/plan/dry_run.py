"""Prints what a study would do: each run's state, bytes and memory, and seconds on a machine.

Bytes and memory follow from the settings; seconds are predicted where a machine's figures are
named (`train/memory/forecast.py`). Nothing is trained or measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from zpp_lab.config.flat import arm_of, carried, differing, flat_config
from zpp_lab.config.load import written
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.config.study import StudyConfig
from zpp_lab.config.wires import kinds_among, shares
from zpp_lab.files import CONFIG, amount
from zpp_lab.runs.reader import last_step, read_run
from zpp_lab.study.run import attempts
from zpp_lab.study.run.launch import Launch, hydra_compose
from zpp_lab.study.run.plan import Compose, PlannedRun, Planner, check_runs, notes, to_do
from zpp_lab.study.run.progress import duration
from zpp_lab.train.inputs import check_recipe
from zpp_lab.train.memory.forecast import Foreseen, foresee

if TYPE_CHECKING:
    from zpp_lab.study.run.multirun import Sweep

ENDED = ("finished", "diverged")
USUAL = "h200"  # whose figures give GPU-hours where no machine is named
_SHAPE = (  # settings on which the time of a step depends most
    *("model.", "cluster.", "engine.", "data.seq_len", "train.batch_size", "train.micro_steps"),
    *("train.accumulate", "train.param_dtype", "train.optimizer_"),
)
BITS = "Quantized: of a step's bytes of weights and of gradients; a/b: of their two wires."
LEAST = "≥: weights, optimizer and gradients; activations come on top."
FLOOR = "≥: training steps without evaluation{more}."
ALONE = ", and of engine=virtual what the ranks compute, without codecs and waiting"


@dataclass(frozen=True)
class Machine:
    """A machine's file or name, which predicts seconds; link_gbps None: as inside a node."""

    name: str
    link_gbps: float | None = None


@dataclass(frozen=True)
class Forecast:
    """One run of a study: its state, and what it needs. step_seconds None: unknown, `reason` says
    why; else a floor, as evaluations are not in it."""

    run: PlannedRun
    state: str  # as its folder says: finished, unfinished, diverged, …
    step: int  # steps done
    foreseen: Foreseen
    step_seconds: float | None = None
    reason: str = ""

    @property
    def bytes(self) -> int | None:
        """Of all steps, over all ranks."""
        each = self.foreseen.step_bytes
        return None if each is None else round(self.run.config.train.steps * each)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def whole_seconds(self) -> float | None:
        """From the first step on."""
        each = self.step_seconds
        return None if each is None else self.run.config.train.steps * each

    @property
    def steps_left(self) -> int:
        return 0 if self.ended else max(0, self.run.config.train.steps - self.step)

    @property
    def seconds(self) -> float | None:
        """Left."""
        if self.ended:
            return 0.0
        return None if self.step_seconds is None else self.steps_left * self.step_seconds

    @property
    def gpus(self) -> int:
        """Those that are busy for `seconds`."""
        config = self.run.config
        return config.cluster.world if config.engine.ranked else 1


def dry_run(
    study: StudyConfig,
    root: Path,
    launch: Launch | None = None,
    machine: Machine | None = None,
    *,
    compose: Compose | None = None,
    console: Console | None = None,
) -> list[Forecast]:
    """Compose every run, print its bytes and memory, with `machine` its seconds, and a summary.

    launch, compose: as of `run_study`. Raises what that raises before its first run, but looks for
    the files that runs read only where they would run here.
    """
    launch, console = launch or Launch(), console or Console()
    runs = Planner(study, root, compose or hydra_compose()).first(launch.arms, launch.seeds)
    headers: list[tuple[list[str], str]] = []
    if launch.launcher is not None:
        from zpp_lab.study.run.batch import check_launcher  # Hydra is slow to import

        headers = check_launcher(launch.launcher, root, launch.settings, to_do(runs))
    check_runs(study, runs, here=launch.launcher is None and machine is None)
    ended = sum(run.finished for run in runs)
    console.print(
        f"Study {study.name}, {root}: {_several(len(runs), 'run')}, {ended} finished.",
        soft_wrap=True,
    )
    for note in notes(to_do(runs)):
        console.print(note, soft_wrap=True)
    found = forecast(runs, machine)
    console.print(_plan_table(study, found))
    if any(f.foreseen.quantized for f in found):
        console.print(BITS)
    if any(f.foreseen.memory and f.foreseen.memory.at_least for f in found):
        console.print(LEAST)
    if machine is not None:
        _print_times(study, found, console)
    for arm in study.arms:
        config = next((f.run.config for f in found if f.run.arm == arm.name), None)
        if config is not None and (text := carried(config)):
            console.print(f"{arm.name}: {text}", soft_wrap=True, markup=False, highlight=False)
    for whose, header in headers:
        line = f"Slurm's jobs of {', '.join(whose)}:\n{header}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(_summary(study, found, launch.jobs, machine), soft_wrap=True)
    if study.max_seeds > len(study.seeds) and not (launch.arms or launch.seeds):
        console.print(f"Arms whose gap is undecided get more seeds, up to {study.max_seeds} each.")
    return found


def dry_sweep(sweep: Sweep, machine: Machine | None = None, console: Console | None = None) -> None:
    """Print every run of a sweep: its folder, what it sets apart from the others and what its wires
    carry, with bytes, memory and, of `machine`, seconds. Nothing is started or written."""
    console = console or Console()
    runs = [PlannedRun(arm_of(asdict(c)), c.seed, Path(c.run.dir or ""), c) for c in sweep.runs]
    headers: list[tuple[list[str], str]] = []
    if sweep.launcher is not None:
        from zpp_lab.study.run.batch import check_launcher  # Hydra is slow to import

        headers = check_launcher(sweep.launcher, sweep.folder, sweep.settings, runs)
    for run in runs:
        check_recipe(run.config)
    flat = [flat_config(run.config) for run in runs]
    varying = sorted({key for other in flat for key in differing(flat[0], other)})
    usual, own_place = flat_config(Config()), (*varying, "run.dir", "run.arm")
    shared = {k: v for k, v in flat[0].items() if k not in own_place and v != usual.get(k)}
    console.print(
        f"Sweep {sweep.folder}: {_several(len(runs), 'run')}"
        + (f", as an example: {sweep.drawn} are drawn during the sweep." if sweep.drawn else "."),
        soft_wrap=True,
    )
    line = " ".join(f"{key}={written(value)}" for key, value in shared.items())
    line = f"All runs, apart from defaults: {line}"
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    for one, own in zip(forecast(runs, machine), flat, strict=True):
        config = one.run.config
        apart = " ".join(f"{key}={written(own.get(key))}" for key in varying)
        lines = [f"{one.run.dir}, {one.state}: {apart or 'the settings above'}"]
        lines += [f"carries {text}" for text in [carried(config)] if text]
        lines.append(_summary_line(config, one.foreseen, one.step_seconds, one.reason))
        console.print("\n  ".join(lines), soft_wrap=True, markup=False, highlight=False)
    for whose, header in headers:
        line = f"Slurm's jobs of {', '.join(whose)}:\n{header}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def summary_line(config: Config, machine: Machine | None = None) -> str:
    """Return bytes, memory and, of `machine`, seconds of one run, in a line."""
    (one,) = forecast([PlannedRun("", config.seed, Path(config.run.dir or "."), config)], machine)
    return _summary_line(config, one.foreseen, one.step_seconds, one.reason)


def _summary_line(config: Config, need: Foreseen, step_seconds: float | None, reason: str) -> str:
    steps, sent = config.train.steps, need.step_bytes
    each = "unknown" if sent is None else amount(sent)
    whole = "" if sent is None else f", {amount(steps * sent)} in {_several(steps, 'step')}"
    parts = [f"the ranks send {each} a step{whole}"]
    if need.memory is not None:
        least = "≥ " if need.memory.at_least else ""
        who = "each GPU holds" if need.memory.each else "the process holds"
        parts.append(f"{who} {least}{amount(need.memory.nbytes)} at its peak")
    parts.append(f"{config.tokens_per_step:,} tokens a step")
    if step_seconds is not None:
        parts.append(f"≥ {duration(steps * step_seconds)} of {step_seconds:.3g} s a step")
    elif reason:
        parts.append(f"time unknown: {reason}")
    return "; ".join([*parts, *_placed(config)])


def _placed(config: Config) -> list[str]:
    """Say what engine.place=auto will mean, by engine.gpu_gib and host_gib or this machine, and
    where state in host memory does not fit into engine.host_gib or this machine."""
    engine, said = config.engine, list[str]()
    residence = Residence.of(config) if engine.place != "auto" else None
    stays = residence is not None and not (residence.passes or residence.offloads)
    if engine.name != "fsdp" or stays:
        return said
    from zpp_lab.runs.provenance import memory_bytes
    from zpp_lab.train.memory.buffers import GIB
    from zpp_lab.train.memory.outlook import expected, host_part

    found = expected(config)
    if engine.place == "auto":
        place = written(found.config.engine.place)
        said.append(
            f"engine.place=auto: {place if found.fits else 'does not fit (`zpp-lab plan`)'}"
        )
    need = max(one.estimate.host for one in found.phases or (found,))
    each_host = engine.host_gib * GIB if engine.host_gib else memory_bytes()
    there = host_part(config, each_host, planned=True)
    if need > there:
        whose = "engine.host_gib" if engine.host_gib else "this machine's memory"
        said.append(
            f"WARNING: each rank needs {amount(need)} of host memory, and its part of {whose} is "
            f"{amount(there)}: place less by engine.place, or set engine.host_gib to what the "
            "host has"
        )
    return said


def forecast(runs: Sequence[PlannedRun], machine: Machine | None = None) -> list[Forecast]:
    """Return what each run needs; an arm's plan is made once. ValueError for an unknown machine."""
    if machine is not None:
        from zpp_lab.tools.plan.cost.machine import load_machine

        load_machine(machine.name)
    seen: dict[tuple[str, bool], tuple[Foreseen, float | None, str]] = {}
    found = []
    for run in runs:
        who = (run.arm, run.prepares)  # runs of an arm differ in their seed alone
        if who not in seen:
            seen[who] = (foresee(run.config), *_predicted(run, machine))
        state = read_run(run.dir).outcome if (run.dir / CONFIG).exists() else "unfinished"
        found.append(Forecast(run, state, last_step(run.dir), *seen[who]))
    return found


def _predicted(run: PlannedRun, machine: Machine | None) -> tuple[float | None, str]:
    """Seconds of a step, or None and why."""
    if machine is None:
        return None, ""
    try:
        return predicted_seconds(run.config, machine.name, machine.link_gbps), ""
    except ValueError as error:
        return None, str(error)


# ---------------------------------------------------------------------- shown


def _plan_table(study: StudyConfig, runs: Sequence[Forecast]) -> Table:
    kinds = kinds_among(f.foreseen.quantized or () for f in runs)

    def cells(own: Sequence[Forecast]) -> list[str]:
        begun = sum(f.step > 0 and f.state == "unfinished" for f in own)
        sent = "?" if own[0].bytes is None else amount(own[0].bytes)
        share = own[0].foreseen.quantized
        bits = "?" if share is None else ", ".join(shares(share, kinds).values())
        return [str(len(own)), _ended(study, own), str(begun), sent, bits, _memory(own[0])]

    made = f"Quantized {', '.join(kind[0] for kind in kinds)}"
    names = ("Runs", "Ended", "Begun", "Sent in a run", made, "Memory")
    return _table(study, runs, names, cells)


def _print_times(study: StudyConfig, found: Sequence[Forecast], console: Console) -> None:
    def cells(own: Sequence[Forecast]) -> list[str]:
        whole, left = own[0].whole_seconds, sum(f.seconds or 0.0 for f in own)
        known = all(f.seconds is not None for f in own)
        return [
            "?" if whole is None else f"≥ {duration(whole)}",
            f"{'' if all(f.ended for f in own) else '≥ '}{duration(left)}" if known else "?",
        ]

    console.print(_table(study, found, ("Time of a run", "Time left"), cells))
    if any(f.step_seconds is not None for f in found):
        virtual = any(f.run.config.engine.name == "virtual" for f in found)
        console.print(FLOOR.format(more=ALONE if virtual else ""), soft_wrap=True)
    reasons: dict[str, dict[str, None]] = {}
    for f in found:
        if f.seconds is None:
            reasons.setdefault(f.reason, {})[f.run.arm] = None
    for reason, names in reasons.items():
        console.print(f"?: {', '.join(names)}: {reason}", soft_wrap=True)


def _summary(
    study: StudyConfig, found: Sequence[Forecast], jobs: int, machine: Machine | None
) -> str:
    ended = sum(f.ended for f in found)
    sent = [f.bytes for f in found]
    left = "" if machine is None else f"; {_left(study, found, jobs, machine)}"
    left += _gpu_hours(found, machine)
    total = amount(sum(n for n in sent if n is not None))
    return (
        f"{_several(len(found), 'run')}, {ended} ended already{left}; the ranks send {total} "
        f"in all{'' if None not in sent else ', those marked ? not counted'}."
    )


def _left(study: StudyConfig, found: Sequence[Forecast], jobs: int, machine: Machine) -> str:
    """Time of all runs, if the places are always busy. GPU time adds up, so runs that share a
    GPU take as long as one after the other."""
    unknown = sum(f.seconds is None for f in found)
    if unknown and unknown == sum(not f.ended for f in found):
        return "time left unknown"
    work = [f.seconds or 0.0 for f in found]
    at_once = max(1.0, jobs / max(1, study.runs_per_gpu))
    left = f"at least {duration(max(sum(work) / at_once, *work))} left on {machine.name}"
    without = f" without the {_several(unknown, 'run')} marked ?" if unknown else ""
    return f"{left}{without} with {max(1, jobs)} in parallel, without start-up"


def _gpu_hours(found: Sequence[Forecast], machine: Machine | None) -> str:
    """What is left in GPU-hours; "" where nothing of it runs on GPUs, or is known. Without a
    machine runs of one shape are all taken to last as long as the first of them on USUAL."""
    if machine is not None:
        known = [f.seconds * f.gpus for f in found if f.seconds]
        return f", {_hours(sum(known))} GPU-hours" if known else ""
    step_seconds: dict[str, float | None] = {}
    total, unknown, first = 0.0, 0, ""
    for f in found:
        config = f.run.config
        if f.ended or not config.engine.ranked or config.engine.device == "cpu":
            continue
        flat = flat_config(config).items()
        shape = str([kv for kv in flat if kv[0].startswith(_SHAPE) and kv[0] != "model.start"])
        if shape not in step_seconds:
            step_seconds[shape], _ = _predicted(f.run, Machine(USUAL))
        each = step_seconds[shape]
        first = first or (f.run.arm if each else "")
        unknown += each is None
        total += (each or 0.0) * f.steps_left * f.gpus
    if not total:
        return ""
    who = f"{first}'s" if len(step_seconds) == 1 else "the first of their size"
    without = f" without {_several(unknown, 'run')} that cannot be predicted" if unknown else ""
    return (
        f"; about {_hours(total)} GPU-hours left on {USUAL}{without}, all runs taken to last as "
        f"long as {who} (--machine {USUAL} predicts each)"
    )


def _hours(seconds: float) -> str:
    return f"{float(f'{seconds / 3600:.3g}'):,g}"


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


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def predicted_seconds(config: Config, machine: str, link_gbps: float | None) -> float:
    """Return seconds of a step on `machine`, the mean of its phases. ValueError where its file has
    no figures for `config`.

    engine=fsdp is predicted, one GPU a rank. Of engine=virtual on one GPU it is a floor, what all
    ranks compute; codecs, and the gaps between a small model's kernels, come on top.
    """
    from zpp_lab.tools.plan.cost.machine import load_machine
    from zpp_lab.tools.plan.cost.step import predict
    from zpp_lab.train.memory.outlook import expected

    figures = load_machine(machine)
    if config.engine.place == "auto":
        config = expected(config).config
    if config.engine.name != "virtual":
        each = [(p.steps, predict(p.config, figures, link_gbps).step_s) for p in config.phases]
        return sum(steps * seconds for steps, seconds in each) / config.train.steps
    alone = replace(config, engine=replace(config.engine, name="fsdp"))
    one = predict(alone, figures)
    return config.cluster.world * (one.compute_s + one.optimizer_s)
