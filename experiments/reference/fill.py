"""Fills what is left of a call with runs of studies, several on each GPU: `fill.py STUDY ROOT OUT`

STUDY `reference`: those of PARTS whose text is there, in that order; else the one of that name.
Starts runs that have not finished, as many side by side on a GPU as PER_GPU and its memory allow,
and only one that would finish before CALL_END (a unix time): what each GPU gets done is measured.
OUT/NAME.tar.gz has what finished runs of study NAME wrote, renewed each minute. Kept runs lie in
ROOT/NAME before this starts, so nothing is trained twice. More words are settings of all runs.
Where READY is set, no run starts before that file is there.
Where GOES_ON is set, another call follows on this machine: runs stop one by one before CALL_END,
each with a checkpoint, and go on in that call.
BESIDE: a command that begins a minute after the first runs and ends with the call: OUT/beside.log.

With `--list` it says what would run, in order, and starts nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

import yaml

from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.schema import RunConfig
from zpp_lab.config.study import StudyConfig
from zpp_lab.files import CONFIG, METRICS, SUMMARY
from zpp_lab.runs.provenance import cores
from zpp_lab.runs.reader import last_step, read_metrics, write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.run.attempts import ended_run, ending
from zpp_lab.study.run.launch import ENTRY, next_seeds
from zpp_lab.study.run.places import Slot, gpu_memory, gpus_to_share
from zpp_lab.study.run.plan import PlannedRun, Planner, check_runs
from zpp_lab.study.run.queue import Ended, Pool, stop_on_signals
from zpp_lab.train.time_slice import PAUSED

MAIN = (  # of reference_10m
    "zero3", "zero3_reordered", "w4_256_symmetric", "zeropp", "w4_64_symmetric",
    "w4_256_asymmetric", "w8_256_symmetric", "w6_256_symmetric", "w2_256_symmetric",
    "g8_one_hop_plain", "g4_one_hop_plain", "g4_two_hops_plain", "g8_4_hadamard", "w4_g84h",
    "qsdp", "w4g4", "broken",
)  # fmt: skip

SECOND = (  # of reference_10m, for forty arms of eight seeds: each wire, width and block
    "g8_4_plain", "diff_g84h", "w3_256_symmetric", "w4_32_symmetric", "w4_2048_symmetric",
    "w4_64_asymmetric", "w4_stochastic", "sham_w4", "g8_two_hops_plain", "g8_one_hop_hadamard",
    "g8_two_hops_hadamard", "g4_one_hop_hadamard", "g4_two_hops_hadamard", "g2_one_hop_plain",
    "g2_two_hops_plain", "g2_one_hop_hadamard", "g2_two_hops_hadamard", "w8g8", "w8g4", "w4g8",
    "w8_stochastic", "w3_64_symmetric", "w3_2048_symmetric", "w6_64_symmetric",
    "w2_64_symmetric",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Arms of a study with some seeds; arms None: all of them."""

    study: str
    arms: tuple[str, ...] | None
    seeds: Sequence[int]


REMEMBERING = (  # of memories, those that come first
    "w4_diff", "sdp4bit", "loco", "g2_remembered", "g4_forgotten", "g4_remembered", "g2_forgotten",
)  # fmt: skip
# of memories_134m: what its claims on differences and on 2 bits rest on
DECIDING = ("zero3", "w4_256_symmetric", "w4_diff", "g2_remembered", "g4_forgotten")
FIRST_134M = ("zero3", "w4_256_symmetric", "zeropp", "zero3_reordered", "w4_g84h")
FOUR, MORE, NEXT = range(1, 5), range(5, 9), range(9, 21)
FEW = ("diff3_g83", "diff3_g83_ef", "diff2_g83", "diff2_g83_ef")  # bits between nodes
STEPS = ("diff_g84h", "w4_256_symmetric", "w8_256_symmetric")
CURVE = tuple(
    f"zero3_{budget}"
    for budget in (
        "12m_8k_2e-3", "12m_8k_1e-3", "12m_8k_4e-3", "12m_4k_1e-3", "12m_4k_2e-3",
        "24m_8k_2e-3", "24m_8k_4e-3", "24m_4k_2e-3", "98m_16k_2e-3", "98m_8k_2e-3",
    )
)  # fmt: skip
ROTATED = ("zero3", "zeropp", "zeropp_hadamard")
PARTS = (
    Part("reference_10m_6000", ROTATED, FOUR),
    Part("reference_10m_more", ("zeropp_hadamard",), (*FOUR, *MORE)),
    Part("reference_10m_6000", ROTATED, MORE),
    Part("reference_10m_6000", ("zero3_reordered",), FOUR),
    Part("reference_10m_more", FEW, FOUR),
    Part("token_curve", CURVE, (1,)),
    Part("reference_10m_more", FEW, MORE),
    Part("reference_10m_6000", ("diff_g84h", *FEW), FOUR),
    Part("token_curve", CURVE, (2,)),
    Part("reference_10m_6000", (*STEPS, "broken"), FOUR),
    Part("reference_10m_reread", (*ROTATED, "zero3_reordered", *STEPS), FOUR),
    Part("reference_10m_6000", ("zero3_reordered", *STEPS, *FEW), MORE),
    Part("reference_10m_reread", (*ROTATED, "zero3_reordered", *STEPS), MORE),
    Part("reference_10m_12000", ROTATED, FOUR),
    Part("reference_10m_more", None, (*FOUR, *MORE)),  # runs of reference_10m
    Part("reference_10m_6000", None, (*FOUR, *MORE)),
    Part("reference_10m_reread", None, (*FOUR, *MORE)),
    Part("reference_10m_12000", None, FOUR),
    Part("reference_3m_ratio", None, FOUR),
    Part("reference_10m_ratio", None, FOUR),
    Part("reference_30m_ratio", None, FOUR),
    Part("reference_10m_ratio_3750", None, FOUR),
    Part("reference_10m", MAIN, FOUR),
    Part("memories", ("zero3", "w4_256_symmetric", "zeropp", *REMEMBERING), FOUR),
    Part("reference_3m", None, FOUR),
    Part("reference_10m_12m", None, FOUR),
    Part("reference_10m_200m", ("zero3",), (1, 2)),
    Part("reference_10m", ("g8_4_plain",), FOUR),
    Part("tuned", ("zero3", "w4_256_symmetric", "tuned", "uniform"), range(1, 6)),
    Part("reference_30m", None, FOUR),
    Part("reference_134m", FIRST_134M, (1, 2)),  # after their predictions, as the next
    Part("memories_134m", ("w4_diff",), (1, 2)),
    Part("reference_10m", ("diff_g84h",), FOUR),
    Part("reference_10m", MAIN, MORE),
    Part("reference_10m", SECOND, FOUR),
    Part("memories", None, FOUR),
    Part("memories_134m", DECIDING, FOUR),
    Part("memories", None, MORE),
    Part("normal", None, range(1, 6)),
    Part("reference_10m", SECOND, MORE),
    Part("reference_134m", FIRST_134M, FOUR),
    Part("reference_134m", None, FOUR),
    Part("memories_134m", None, FOUR),
    Part("nudged", None, (*FOUR, *MORE)),
    Part("reference_368m", (*FIRST_134M, "w3_256_symmetric"), (1, 2)),  # four GPUs hold twelve
    Part("reference_10m", None, FOUR),
    Part("reference_10m", None, MORE),
    Part("reference_368m", None, FOUR),  # before shorter ones, as it takes two calls
    Part("reference_10m_200m", None, (1, 2)),  # whether gaps grow with tokens
    Part("reference_10m_prose", None, FOUR),
    Part("reference_10m_200m", None, FOUR),
    Part("reference_10m", None, NEXT),
)


@dataclass(frozen=True)
class Size:
    """What a run takes beside one of reference_10m: its share of a GPU's time; its GiB; its
    checkpoint's GB, which are seconds of a disk."""

    work: float = 1.0
    gib: float = 6.5
    gb: float = 0.2


SIZES = {  # first figures; `Measured` learns the pace of all from those that ran
    "reference_3m": Size(0.6, 5.0),
    "reference_10m_12m": Size(0.26),
    "reference_10m_200m": Size(4.0),
    "reference_10m_6000": Size(1.9),
    "reference_10m_12000": Size(2.8),
    "token_curve": Size(1.2),
    "reference_3m_ratio": Size(0.6, 5.0),
    "reference_10m_ratio": Size(2.5, 14.0),
    "reference_10m_ratio_3750": Size(2.5),
    "reference_30m_ratio": Size(12.0, 45.0, 0.4),
    "reference_30m": Size(2.0, 10.0, 0.4),
    "reference_134m": Size(6.5, 10.0, 1.6),
    "memories_134m": Size(6.5, 13.0, 2.3),
    "reference_368m": Size(17.0, 22.0, 4.4),
}
# times as long beside other runs, as they start many small kernels
SLOW = {"sham": 2.9, "topk": 3.8, "tagc_topk": 3.2}
ABREAST = 4  # of those on one GPU at most, to end within a call: one beside seven took 900 s
SPARED = 10.0  # GiB of a GPU that runs leave free
PACK_EVERY = 60.0  # seconds
THIN = 25  # of metrics.jsonl every so many steps are kept, and those with more than a training loss
KEPT = (
    "summary.json",
    "failure.json",
    "config.yaml",
    "heldout.json",
    "data.json",
    "commits.json",
    "shared.json",
)
SPARE = 26.0  # seconds before the call's end at which the last run shall have finished
STOP = 14.0  # and at which runs that have not finished after all are ended
PAUSE = 20.0  # or the last one stops to go on in another call; others stop before, one by one
LAST = 5.0  # and at which those are ended that have not written their checkpoint by then
AFTER = 60.0  # seconds after the first runs in which BESIDE begins
ENDING = 0.03  # of a run's seconds: what follows its last step
ALONE = 3.1  # how much longer a run of 10M takes with a GPU to itself than its share of a full one


@dataclass
class Pace:
    """How long runs take: seconds before the first step, and of a GPU that many share for a run of
    reference_10m. Measured from what has run; the first figures are of earlier calls."""

    start: float = 12.0
    shared: float = 22.0

    def ends(self, left: Sequence[float]) -> list[float]:
        """Seconds until each run is over, of which so much is left (1: a whole run of
        reference_10m), if none joins them and the GPU's time is shared out evenly."""
        seconds, done, found = 0.0, 0.0, [0.0] * len(left)
        in_turn = sorted(range(len(left)), key=lambda i: left[i])
        for ended, i in enumerate(in_turn):
            each = self.shared * max(ALONE, len(left) - ended)  # for as much as a whole run
            seconds += (left[i] - done) * each
            done, found[i] = left[i], seconds
        return found

    def fits(self, left: Sequence[float], more: float, seconds: float) -> bool:
        """Whether one more run is over within these seconds, its start among them, and makes none
        of the others late. One that is late already, but would be over before the call ends its
        runs, it delays by a second at most."""
        alone, joined = self.ends(left), self.ends([*left, more])
        others = zip(alone, joined, strict=False)
        in_time = all(b <= max(seconds, a + 1) for a, b in others if a <= seconds + SPARE - STOP)
        return in_time and self.start + joined[-1] <= seconds


@dataclass(frozen=True)
class Running:
    run: PlannedRun
    began: float  # unix time
    step: int  # done when it began

    @property
    def moved(self) -> bool:
        """Whether it has made a step: until then it starts."""
        return last_step(self.run.dir) > self.step


@dataclass
class Gpu:
    """One GPU and the runs on it. None: without one, on the CPU."""

    name: str | None
    room: float = math.inf  # GiB
    runs: dict[Path, Running] = field(default_factory=dict)
    apart: bool = False  # SLOW runs share it with each other alone, as beside others kernels wait

    def left(self) -> list[float]:
        """Of each run the work that is left."""
        return [left(one.run) for one in self.runs.values()]

    def has_room(self, run: PlannedRun, most: int) -> bool:
        taken = sum(size(other.run).gib for other in self.runs.values())
        return len(self.runs) < most and (not self.runs or taken + size(run).gib <= self.room)

    def suits(self, run: PlannedRun) -> bool:
        others = {slow(other.run) > 1 for other in self.runs.values()}
        fits = slow(run) == 1 or len(self.runs) < ABREAST
        return not self.apart or (fits and others <= {slow(run) > 1})


def named(run: PlannedRun) -> str:
    return f"{run.config.run.study} {run}"


def size(run: PlannedRun) -> Size:
    own = SIZES.get(str(run.config.run.study), Size())
    return replace(own, work=own.work * slow(run))


def slow(run: PlannedRun) -> float:
    return next((times for start, times in SLOW.items() if run.arm.startswith(start)), 1.0)


def left(run: PlannedRun) -> float:
    """What it has still to do, in whole runs of reference_10m."""
    return size(run).work * (1 - last_step(run.dir) / run.config.train.steps + ENDING)


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--list"]
    name, root, out, *overrides = words
    parts = PARTS if name == "reference" else (Part(name, None, range(10**6)),)
    studies = {p.study: load_study(p.study, {}, overrides) for p in parts}
    runs = ordered(parts, studies, Path(root))
    there = {alike(run): run for run in runs if run.finished}
    absent = [run for run in runs if not ended_before(run)]
    lent = [(there[alike(run)], run) for run in absent if alike(run) in there]
    once: dict[str, PlannedRun] = {}
    for run in absent:
        once.setdefault(alike(run), run)
    todo = [run for same, run in once.items() if same not in there]
    todo.sort(key=lambda run: not begun(run))
    done = len(runs) - len(absent)
    say(f"{done} of {len(runs)} runs are there, {len(lent)} in another study, {len(todo)} left")
    if "--list" in sys.argv:
        print(*map(named, todo), sep="\n")
        return 0
    wait_for(os.environ.get("READY"))
    todo = with_text(todo)
    for run in todo:
        clean(run)
    if todo:
        check_runs(studies[str(todo[0].config.run.study)], todo[:1])
    for study in studies.values():
        Path(root, study.name).mkdir(parents=True, exist_ok=True)
        write_study(Path(root, study.name), study)
    for source, run in lent:
        lend(source, run)
    room = (gpu_memory() or math.inf) / 2**30 - SPARED
    names = gpus_to_share([todo[0].config]) if todo else []
    gpus = [Gpu(name, room, apart=len(names) > 1) for name in names]
    places, until = int(os.environ.get("PER_GPU", "10")), float(os.environ["CALL_END"])
    goes_on = bool(os.environ.get("GOES_ON"))
    queue = Queue(Path(root), Path(out), gpus or [Gpu(None)], places, until, goes_on)
    queue.lent = [run.dir for _, run in lent]
    return queue.run(todo)


def with_text(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those whose corpus lies here; says which studies' does not."""
    found, absent = [], {}
    for run in runs:
        path = run.config.data.path
        if path is None or Path(path).exists():
            found.append(run)
        else:
            absent[run.config.run.study] = path
    for study, path in absent.items():
        say(f"{study} is left out: there is no {path}")
    return found


def wait_for(path: str | None) -> None:
    while path is not None and not Path(path).exists():
        time.sleep(0.1)


def ordered(
    parts: Sequence[Part], studies: Mapping[str, StudyConfig], root: Path
) -> list[PlannedRun]:
    """All runs, part by part and seed by seed, so that after any of them the arms so far can be
    compared."""
    # seconds each; forked before anything starts a thread or a GPU
    with ProcessPoolExecutor(max(1, min(cores(), len(studies)))) as pool:
        planned = pool.map(plan_of, studies.values(), repeat(root))
        runs = {(str(r.config.run.study), r.arm, r.seed): r for found in planned for r in found}
    found: dict[tuple[str, str, int], PlannedRun] = {}
    for part in parts:
        study = studies[part.study]
        arms = part.arms or [arm.name for arm in study.arms]
        assert {*arms} <= {arm.name for arm in study.arms}, f"{part} names an arm that is none"
        for seed in sorted({s for name, _, s in runs if name == study.name and s in part.seeds}):
            for arm in arms:
                if (key := (study.name, arm, seed)) in runs:
                    found.setdefault(key, runs[key])
    return list(found.values())


def plan_of(study: StudyConfig, root: Path) -> list[PlannedRun]:
    """Of all arms the study's seeds and those that have run, and the next ones that it asks for."""
    arms = {arm.name: {*study.seeds} for arm in study.arms}
    if study.max_seeds and (root / study.name).is_dir():
        result = read_result(root / study.name, study)
        for found in ({a.name: a.runs for a in result.arms}, next_seeds(study, result)):
            arms = {arm: seeds | {*found.get(arm, ())} for arm, seeds in arms.items()}
    return Planner(study, root / study.name, compose).plan(
        {arm: sorted(seeds) for arm, seeds in arms.items()}
    )


def ended_before(run: PlannedRun) -> bool:
    """Finished, or diverged, which is a result too."""
    if run.finished:
        return True
    failure = run.dir / "failure.json"
    return failure.is_file() and json.loads(failure.read_text())["outcome"] == "diverged"


def alike(run: PlannedRun) -> str:
    """Equal of runs that give the same bits: whose settings are the same but for name and place."""
    return repr(replace(run.config, run=RunConfig()))


def lend(source: PlannedRun, run: PlannedRun) -> None:
    """What `source`, of another study, has left becomes `run`'s; its commit stays in it."""
    run.dir.mkdir(parents=True, exist_ok=True)
    for name, content in kept(source.dir):
        (run.dir / name).write_bytes(content)
    own = run.config.run
    config = yaml.safe_load((run.dir / CONFIG).read_text())
    config["run"] |= {"dir": own.dir, "study": own.study, "arm": own.arm}
    (run.dir / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
    summary = json.loads((run.dir / SUMMARY).read_text())
    summary |= {"study": own.study, "arm": own.arm}
    (run.dir / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


class Queue:
    def __init__(
        self,
        root: Path,
        out: Path,
        gpus: list[Gpu],
        per_gpu: int,
        until: float,
        goes_on: bool,
    ) -> None:
        self.root, self.out, self.gpus, self.per_gpu = root, out, gpus, per_gpu
        self.until, self.goes_on, self.paused = until, goes_on, 0
        self.pool = Pool(ENTRY)
        self.pace = Pace()
        self.threads = max(1, cores() // (len(gpus) * per_gpu))
        self.finished: list[Path] = []
        self.lent: list[Path] = []  # packed too
        self.again: set[Path] = set()
        self.failed = 0
        self.measured = Measured(self.pace)
        self.beside = Beside(os.environ.get("BESIDE"), out / "beside.log")

    def run(self, todo: list[PlannedRun]) -> int:
        """Exit code: 0, or 1 where runs failed and nothing was done."""
        packed, waiting = time.time(), list(todo)
        with stop_on_signals() as stop:
            try:
                while (waiting or self.busy) and not stop.requested:
                    now = time.time()
                    waiting = self.start(waiting, now)
                    if not self.busy or now > self.until - (LAST if self.goes_on else STOP):
                        break
                    self.beside.look(now)
                    for ended in self.pool.wait(1.0):
                        waiting = self.settle(ended) + waiting
                    self.measured.look(self.gpus)
                    if self.failed >= 3 and not self.useful:
                        say("three runs failed and no other makes steps: stopped")
                        return 1
                    if time.time() - packed > PACK_EVERY:
                        packed = time.time()
                        self.pack()
            finally:
                cut = [str(run) for run in self.pool.running]
                self.beside.stop()
                self.pool.stop(grace=0.5)  # no time, or no machine, is left for checkpoints
                self.pack()
        told = [f"{len(self.finished)} runs ended", f"{self.failed} failed"]
        told += [f"{self.paused} to go on"] * self.goes_on + [f"{len(waiting)} not begun"]
        say(", ".join([*told, *([f"cut: {', '.join(cut)}"] if cut else [])]))
        return int(self.failed > 0 and not self.useful)

    @property
    def useful(self) -> bool:
        """Whether any run has ended, stopped to go on, or makes steps."""
        now = any(one.moved for gpu in self.gpus for one in gpu.runs.values())
        return bool(self.finished or self.paused or now)

    @property
    def busy(self) -> bool:
        return bool(self.pool.running) or self.beside.running

    def start(self, waiting: list[PlannedRun], now: float) -> list[PlannedRun]:
        """Begins what has room and time, in order, and returns the runs that wait on. Where one
        would not finish, smaller ones further down may. Where a slow run finds others on all GPUs,
        one of these takes no more of them, until it is empty."""
        kept: Gpu | None = None
        for run in list(waiting):
            room = [gpu for gpu in self.gpus if gpu.has_room(run, self.per_gpu)]
            if not room:
                break
            free = [gpu for gpu in room if gpu.suits(run) and gpu is not kept]
            if not free:
                if not any(gpu.suits(run) for gpu in self.gpus):
                    kept = min(room, key=lambda g: sum(g.left()))
                continue
            own, seconds = left(run), self.until - SPARE - now
            if self.goes_on:
                reserve = self.pace.start + SPARE - STOP + size(run).gb
                fit = free if now + reserve < self.stops() else []
            else:
                fit = [gpu for gpu in free if self.pace.fits(gpu.left(), own, seconds)]
            if not fit:
                continue
            spread = slow(run) == 1  # over all GPUs; slow runs first fill the one that has some
            gpu = min(fit, key=lambda g: (not (spread or g.runs), sum(g.left())))
            waiting.remove(run)
            config = run.config
            if self.goes_on:
                config = replace(config, run=replace(config.run, until=self.stops()))
            gpu.runs[run.dir] = Running(run, now, last_step(run.dir))
            self.pool.start(replace(run, config=config), Slot(self.threads, gpu.name))
        return waiting

    def stops(self) -> float:
        """By when one more run shall have written its checkpoint: before those that run write
        theirs. All at once, 19 of 24 runs of 134M had not written theirs after 9 seconds."""
        written = sum(size(one.run).gb for gpu in self.gpus for one in gpu.runs.values())
        return self.until - PAUSE - written

    def settle(self, ended: Ended) -> list[PlannedRun]:
        """Note how it ended. A run that fails before it makes a step is to be begun once more:
        while many start, MPS may have no room for one of them."""
        gpu = next(gpu for gpu in self.gpus if ended.run.dir in gpu.runs)
        one = gpu.runs.pop(ended.run.dir)
        if ended.code == PAUSED:
            self.paused += 1
            return []
        result = ended_run(ended.run, ended.code, False)
        if result.outcome in ("finished", "diverged"):
            self.finished.append(ended.run.dir)
        elif not one.moved and ended.run.dir not in self.again:
            self.again.add(ended.run.dir)
            say(f"{named(ended.run)}: {ending(result)}; begun once more")
            clean(ended.run)
            return [ended.run]
        else:
            self.failed += 1
        took = f"{time.time() - one.began:.0f} s, {self.pace.shared:.0f} GPU-seconds a run"
        say(f"{len(self.finished)} {named(ended.run)}: {ending(result)}; {took}")
        return []

    def pack(self) -> None:
        """OUT/NAME.tar.gz anew, of each study: itself and what its runs of this call wrote."""
        folders = [*self.lent, *self.finished]
        for study in {folder.relative_to(self.root).parts[0] for folder in folders}:
            target = self.out / f"{study}.tar.gz"
            part = target.with_suffix(".part")
            with tarfile.open(part, "w:gz") as tar:
                tar.add(self.root / study / "study.yaml", f"{study}/study.yaml")
                for folder in folders:
                    if folder.is_relative_to(self.root / study):
                        self._add(tar, folder)
            part.replace(target)

    def _add(self, tar: tarfile.TarFile, folder: Path) -> None:
        for name, content in kept(folder):
            entry = tarfile.TarInfo(f"{folder.relative_to(self.root)}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            tar.addfile(entry, io.BytesIO(content))


def kept(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of a run what reports need."""
    for name in KEPT:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()
    rows = read_metrics(folder)
    last = rows[-1]["step"] if rows else 0
    thin = [
        row
        for row in rows
        if row["step"] % THIN == 0
        or row["step"] in (1, last)
        or {"heldout_loss", "telemetry"} & row.keys()
    ]
    yield METRICS, "".join(json.dumps(row) + "\n" for row in thin).encode()


class Beside:
    """A command of the shell beside the runs, in a group of its own, so that all of it ends."""

    def __init__(self, command: str | None, log: Path) -> None:
        self.command, self.log = command, log
        self.began = time.time()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Also before it has begun."""
        return bool(self.command) and (self.process is None or self.process.poll() is None)

    def look(self, now: float) -> None:
        """Begin it when most runs have: processes that come to MPS together may be refused."""
        if self.command and self.process is None and now - self.began > AFTER:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    ["bash", "-c", self.command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def stop(self) -> None:
        if self.process is None:
            return
        if self.running:
            say("BESIDE had not ended")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Measured:
    """What GPUs got done lately: GPU-seconds a run where at least half of the places are taken."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.before: dict[str | None, tuple[float, dict[Path, int]]] = {}
        self.done: dict[str | None, list[tuple[float, float]]] = {}

    def look(self, gpus: Sequence[Gpu]) -> None:
        """Every ten seconds; what is older than 90 seconds counts no more."""
        now = time.time()
        for gpu in gpus:
            then, steps = self.before.get(gpu.name, (0.0, {}))
            if now - then < 10:
                continue
            at = {one.run.dir: last_step(one.run.dir) for one in gpu.runs.values() if one.moved}
            if steps.keys() == at.keys() == gpu.runs.keys() and len(at) >= 4:
                runs = (one.run for one in gpu.runs.values())
                gained = sum(
                    (at[run.dir] - steps[run.dir]) * size(run).work / run.config.train.steps
                    for run in runs
                )
                self.done.setdefault(gpu.name, []).append((now - then, gained))
            self.before[gpu.name] = (now, at)
        lately = [entry for done in self.done.values() for entry in done[-9:]]
        if sum(seconds for seconds, _ in lately) >= 30 and sum(runs for _, runs in lately) > 0:
            self.pace.shared = sum(s for s, _ in lately) / sum(r for _, r in lately)


def begun(run: PlannedRun) -> bool:
    """Whether it can go on from the checkpoint of a call before on this machine."""
    return any((run.dir / "checkpoints").glob("step-*"))


def clean(run: PlannedRun) -> None:
    """A run that was cut without a checkpoint starts anew."""
    for name in (*KEPT, METRICS, "log.txt") if not begun(run) else ("failure.json",):
        (run.dir / name).unlink(missing_ok=True)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
