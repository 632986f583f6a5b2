"""One run: set up, resume, step, evaluate, save, and write the results.

The order inside a step decides what a kill can cost: the step's line goes to metrics.jsonl first,
the checkpoint follows, and a restart drops the lines after its checkpoint. So a run that was killed
at any moment ends with the bytes of an undisturbed one.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils import deterministic

from zpp_lab.codecs import kernels
from zpp_lab.collectives.plan import quantized_share
from zpp_lab.collectives.watchdog import meeting
from zpp_lab.config.compose import check_same_run, has_ended, run_dir
from zpp_lab.config.flat import arm_of
from zpp_lab.config.schema import FEW_HELDOUT, Config, heldout_notes
from zpp_lab.data import PackedData, TokenData, open_data
from zpp_lab.data.prepare import open_tokenizer
from zpp_lab.data.prompts import open_prompts
from zpp_lab.data.source import TextSource
from zpp_lab.engines.base import Engine, NonFiniteError, StepResult
from zpp_lab.engines.build import build_engine, pick_device
from zpp_lab.engines.optim.build import learning_rate
from zpp_lab.files import HELDOUT, METRICS, SUMMARY, is_full, write_atomic
from zpp_lab.runs.metrics import Record, encode, read, to_json
from zpp_lab.runs.provenance import commit, machine_facts, note_commit, versions
from zpp_lab.runs.tracker import Tracker
from zpp_lab.runs.wandb.folder import read_summary, write_failure
from zpp_lab.train.evaluation import DivergedError, DivergenceRule, LossReadout
from zpp_lab.train.footprint import StartUp, crowded, of_ranks, peak_gib, retries, settled
from zpp_lab.train.inputs import check_run
from zpp_lab.train.launch.cause import memory_is_full
from zpp_lab.train.profile import Profile
from zpp_lab.train.resume import check_same_data, check_start, note_data, open_store, resume
from zpp_lab.train.rl.learned import check_tokenizer
from zpp_lab.train.rl.readout import SuccessReadout
from zpp_lab.train.rl.rewards import RewardError
from zpp_lab.train.rl.rollouts import from_first
from zpp_lab.train.rl.source import Judge, RolloutSource
from zpp_lab.train.speed import Meter
from zpp_lab.train.time_slice import UNFINISHED, Signals, TimeSlice, writing_seconds

Data = TokenData | PackedData
Source = TextSource | RolloutSource
Readout = LossReadout | SuccessReadout
MANY = 64  # passes of a step from which on a line warns of so many


def run(
    config: Config, rank: int = 0, start_up: StartUp | None = None, checked: bool = False
) -> Record:
    """Train as `config` says, resuming a former start of the run.

    Returns the summary, which is also in summary.json; a finished run returns at once. A run that
    stopped early (run.until, run.piece_steps) returns its outcome, unfinished, and its step. Raises
    what went wrong, after writing failure.json. An engine of several processes has each call this
    with its rank; rank 0 alone writes. `start_up`: the time before. `checked`: this process has
    called `check_run` already.
    """
    folder = run_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    check_same_run(config, folder)
    if has_ended(config):
        return read_summary(folder / SUMMARY)
    return Trainer(config, folder, rank, start_up, checked).run()


class Trainer:
    """The step loop of one run over any engine."""

    def __init__(
        self, config: Config, folder: Path, rank: int, start_up: StartUp | None, checked: bool
    ) -> None:
        self.config, self.folder, self.rank, self.checked = config, folder, rank, checked
        self.train = config.train
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        torch.use_deterministic_algorithms(config.engine.deterministic)
        kernels.configure(config.ops.backend)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = pick_device(config.engine)
        self.checkpoints = open_store(config, folder / "checkpoints", self.device)
        self.slice = TimeSlice(config.run.until, config.run.piece_steps)
        self.signals = Signals()
        self.start_up = start_up or StartUp()
        self.step = self.began = 0  # steps done; done when this process began
        self.saved = 0  # of them in the newest checkpoint from which a run can go on
        self.made: list[Record] = []  # which commit made which steps, on rank 0

    def run(self) -> Record:
        tracker: Tracker | None = None
        try:
            if not self.checked:
                check_run(self.config, tracked=self.rank == 0)
            self.commit = commit() if self.rank == 0 else None  # now: a checkout may change later
            data = open_data(self.config.data)
            self._look_at(data)
            self.start_up.done("data")
            engine = build_engine(self.config, data.vocab_size, self.device)
            self.start_up.parted("engine", engine.built)
            source, self.readout = self._open_task(engine, data)
            self.meter = Meter(engine.plan, self.config, self.device, data.vocab_size)
            self.step = resume(self.config, engine, self.checkpoints)
            self.saved = self.began = self.step
            self.start_up.done("checkpoint")
            check_same_data(self.folder, data, resumed=self.step > 0)
            self._make_up()
            rl = self.config.rl if self.config.task == "rl" else None
            self.divergence = DivergenceRule(self.train, self._losses(), rl)
            if self.rank == 0:
                if self.step:
                    print(f"resuming after step {self.step} of {self.train.steps}", flush=True)
                tracker = Tracker(self.config, self.folder, resume_step=self.step)
                note_data(self.folder, self.config.data, data)
                self.made = note_commit(self.folder, self.step, self.commit)
            self._warn_of_few()
            self.profile = Profile(self.train.profiled, self.folder, self.rank, self.device)
            alone = nullcontext() if self.config.engine.ranked else self.signals
            with settled(), self.profile, alone:
                last = self._loop(engine, source, tracker)
                if self.signals.came:
                    self.checkpoints.wait()
            if self.step < self.train.steps:
                return self._pause(tracker)
            return self._finish(engine, data, tracker, last)
        except BaseException as error:
            self._fail(error, tracker)
            raise

    def _finish(self, engine: Engine, data: Data, tracker: Tracker | None, last: Record) -> Record:
        """Evaluate after the last step and return the summary; {} but on rank 0."""
        read, by_document = self.readout.final(self.step)
        self.checkpoints.wait()
        peaks, tried = peak_gib(self.device), of_ranks(retries(self.device))
        if tracker is None:
            return {}
        summary = self._summary(engine, data, tracker, last) | read | self._readout(tracker)
        summary |= {"peak_gib": peaks, "start_up": self.start_up.facts()}
        summary["allocator_retries"] = tried if peaks else None  # as peak_gib: of each rank
        if note := crowded(tried, self.step - self.began):
            print(note, file=sys.stderr)
        summary["checkpoint_seconds"] = self.checkpoints.took or None  # the longest, on rank 0
        if len(self.made) > 1:
            summary["commits"] = self.made
        write_atomic(self.folder / HELDOUT, to_json(by_document) + "\n")
        tracker.finish(summary)
        if not self.train.keep_checkpoints:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return summary

    def _look_at(self, data: Data) -> None:
        """Check the data against the checkpoint, and print notes, before anything is built."""
        if self.config.model.start:
            check_start("model.start", Path(self.config.model.start), data)
        check_tokenizer(self.config, data)
        for note in (*data.notes, *self.config.notes) if self.rank == 0 else ():
            print(note, file=sys.stderr)
        passes = self.config.cluster.readers * self.train.micro_steps
        if not self.config.engine.ranked and passes >= MANY:
            print(f"each step runs forward and backward of {passes} ranks in turn", flush=True)

    def _warn_of_few(self) -> None:
        """Warn where the text holds fewer tokens than `train.eval_tokens` asks for."""
        asked, there = self.train.eval_tokens, len(self.readout)
        if self.config.task != "text":
            return
        for note in heldout_notes(there, asked) if self.rank == 0 and asked >= FEW_HELDOUT else ():
            print(note, file=sys.stderr)

    def _open_task(self, engine: Engine, data: Data) -> tuple[Source, Readout]:
        """Open batches and readout of the run's task, before its engine loads a checkpoint."""
        config = self.config
        if config.task != "rl":
            return TextSource(config, data), LossReadout(config, engine, data)
        tokenizer = open_tokenizer(config.data, data.folder)
        train, heldout = open_prompts(config, data.folder)
        width = max(len(tokens) for split in (train, heldout) for tokens in split.tokens)
        shared = (tokenizer, Judge(config, self.folder, self.rank), self.folder, width)
        source = RolloutSource(config, engine, train, *shared)
        return source, SuccessReadout(config, engine, heldout, *shared, offset=len(train))

    # ------------------------------------------------------------------ the loop

    def _loop(self, engine: Engine, source: Source, tracker: Tracker | None) -> Record:
        """Train up to the last step; returns the last step's record."""
        record: Record = (tracker.last if tracker else None) or {}
        seconds, first = float(record.get("seconds", 0.0)), self.step + 1
        longest = evaluation = total = 0.0
        began = time.perf_counter()
        while self.step < self.train.steps:
            mean = total / max(1, self.step - first)
            ahead = self._ahead(longest, evaluation, mean) + self._saving(engine)
            if self.signals.came or self.slice.over(ahead):
                break
            self.profile.before(self.step + 1)
            try:
                result = self._step(engine, source, tracker)
            except RewardError:
                self._keep(engine, tracker)
                raise
            measured = self.meter.step(time.perf_counter() - began, result.seconds)
            self.step += 1
            self.profile.after(self.step)
            if self.step == first:
                self.start_up.parted("first step", result.seconds | self._compiled())
                if tracker is not None:
                    print(self.start_up, flush=True)
            record = self._record(result) | source.record()
            passed = time.perf_counter() - began
            if self.step > first:  # the first step here compiles, and says nothing of the next
                longest, total = max(longest, passed), total + passed
            failed: RewardError | None = None
            if self._due(self.train.eval_every, self.step):
                try:
                    record |= self.readout.evaluate(self.step)
                except RewardError as error:  # `_make_up` evaluates when the run resumes
                    failed = error
                evaluation = max(evaluation, time.perf_counter() - began - passed)
            # what follows counts to the next step, which the engine may have begun
            seconds, began = seconds + (now := time.perf_counter()) - began, now
            record |= {"seconds": seconds, **measured}
            if tracker is not None:
                tracker.log(record)
            self._look_at_losses(record, result)
            if failed is not None:
                self._keep(engine, tracker)
                raise failed
            if self._saves(self.step):
                self._save(engine, tracker)
                began = time.perf_counter()
        over = self.step < self.train.steps or self.signals.came  # also in the last step
        if self.saved < self.step and over:
            self._save(engine, tracker, to_go_on=True)
        begun = self.step >= min(first, self.train.steps)
        if not begun and not self.signals.came and tracker is not None:
            print(self.slice.too_short(self._saving(engine)), flush=True)
        return record

    def _ahead(self, step: float, evaluation: float, mean: float) -> float:
        """Estimate the seconds of the next step, with its evaluation; the last step has two. Before
        the first one, assume that a token of it needs a third of what it does in a `mean` step: a
        single slow step says nothing of so many tokens."""
        last = self.step + 1 == self.train.steps
        due = last or (self.step + 1) % self.train.eval_every == 0
        share = len(self.readout) / (3 * self.config.tokens_per_step)
        return step + (due + last) * (evaluation or mean * share)

    def _saving(self, engine: Engine) -> float:
        """Estimate the seconds of the checkpoint at a time slice's end."""
        if self.config.run.until is None:
            return 0.0
        units = [u.unit for u in engine.plan.units]
        mine = self.config.engine.name == "fsdp"
        trained = (p for u in units for p in u.parameters if p.name in u.trainable)
        numel = sum(p.numel if mine else p.parts * p.numel for p in trained)
        ranks = engine.plan.recipe.shards * self.config.cluster.pp
        own = numel // ranks if mine else numel
        return max(self.checkpoints.took, writing_seconds(own, self.train.optimizer_state))

    def _saves(self, done: int) -> bool:
        if done == self.train.steps:
            return self.train.keep_checkpoints > 0
        return self._due(self.train.checkpoint_every, done)

    def _save(self, engine: Engine, tracker: Tracker | None, to_go_on: bool = False) -> None:
        if tracker is not None:
            tracker.sync()  # a checkpoint never knows more steps than the metrics
        with meeting(f"the checkpoint of step {self.step}"):
            origin = tracker.origin() if tracker is not None else None
            self.checkpoints.save(self.step, engine.state_dict(), to_go_on, origin)
        if to_go_on or not self.train.checkpoint_weights_only:
            self.saved = self.step

    def _keep(self, engine: Engine, tracker: Tracker | None) -> None:
        """Save the state before a reward's failure: its author mends it, and resumes."""
        if self.saved < self.step:
            self._save(engine, tracker, to_go_on=True)
        self.checkpoints.wait()

    def _make_up(self) -> None:
        """Evaluate the last step where a reward failed then, and add that to its line."""
        if self.config.task != "rl" or not self.step:
            return
        path, due = self.folder / METRICS, self._due(self.train.eval_every, self.step)
        rows = from_first(self.config, self.rank, lambda: read(path)[: self.step] if due else [])
        if len(rows) < self.step or "heldout_loss" in rows[-1]:
            return
        rows[-1] |= self.readout.evaluate(self.step)
        if self.rank == 0:
            write_atomic(path, b"".join(map(encode, rows)).decode())

    def _pause(self, tracker: Tracker | None) -> Record:
        """End a time slice, with a checkpoint but no summary. {} but on rank 0."""
        self.checkpoints.wait()
        if tracker is None:
            return {}
        tracker.pause()
        return {"outcome": UNFINISHED, "step": self.step}

    def _due(self, every: int, done: int) -> bool:
        return done == self.train.steps or (every > 0 and done % every == 0)

    def _step(self, engine: Engine, source: Source, tracker: Tracker | None) -> StepResult:
        lr = learning_rate(self.step, self.train)
        passes = self.config.cluster.readers * self.train.micro_steps

        def begun(count: int) -> None:
            if tracker is not None and not self.config.engine.ranked:
                tracker.passing(count, passes)

        step, ahead = self.step, None
        batches = self.meter.timed(source.step(step), begun)
        between = self._saves(step + 1) or self._due(self.train.eval_every, step + 1)
        profiled = self.train.profiled  # a trace holds these steps, whole, and no other
        between |= (step + 1 in profiled) != (step + 2 in profiled)
        if source.ahead and not between and not self._looks(step + 1):
            ahead = self.meter.timed(source.step(step + 1), begun)
        return engine.step(step, lr, batches, self._looks(step), ahead)

    def _looks(self, step: int) -> bool:
        """Whether this step has telemetry."""
        every = self.config.tracking.telemetry_every
        return every > 0 and (step == 0 or (step + 1) % every == 0)

    def _compiled(self) -> dict[str, float]:
        """Return the seconds that the compiler has taken so far, wherever they fell."""
        if not self.config.engine.compile:
            return {}
        from zpp_lab.engines.compile import seconds  # loads the compiler

        return seconds()

    def _look_at_losses(self, record: Record, result: StepResult) -> None:
        """Raise DivergedError when the run is lost; before its checkpoint, which would be too."""
        heldout = record.get("heldout_loss", 0.0)
        if not math.isfinite(heldout):
            raise DivergedError(
                f"step {self.step}: the held-out loss is {heldout}: this step's weights, or their "
                "quantized copies, give no finite loss; train.lr is likely too high"
            )
        self.divergence.look(self.step, loss_of(record))

    # ------------------------------------------------------------------ records

    def _record(self, result: StepResult) -> Record:
        record: Record = {
            "step": self.step,
            "loss": result.loss,
            "lr": learning_rate(self.step - 1, self.train),
            "grad_norm": result.grad_norm,
            "tokens": self.step * self.config.tokens_per_step,
            "bytes": {wire: traffic._asdict() for wire, traffic in result.bytes.items()},
        }
        if result.telemetry is not None:
            record["telemetry"] = result.telemetry
        return record

    def _losses(self) -> list[float]:
        """Return the losses of the steps that the checkpoint has done."""
        rows = read(self.folder / METRICS) if self.step else []
        return [loss_of(row) for row in rows if row["step"] <= self.step]

    def _summary(self, engine: Engine, data: Data, tracker: Tracker, last: Record) -> Record:
        config, plan = self.config, engine.plan
        phases = [(phase.steps, engine.plans[phase.first]) for phase in config.phases]
        totals = tracker.bytes
        sent = sum(sum(traffic.values()) for traffic in totals.values())
        return {
            "outcome": "finished",
            "study": config.run.study,
            "arm": arm_of(asdict(config)),
            "recipe": config.recipe.name,
            "seed": config.seed,
            "steps": self.step,
            "loss": last["loss"],
            "heldout_loss": last["heldout_loss"],
            "heldout_tokens": len(self.readout),
            "tokens": last["tokens"],
            "seconds": last["seconds"],
            "bytes": totals,
            "quantized_share": quantized_share(phases) if totals else None,  # by wire, 0 to 1
            # as `bytes`: {} is unknown
            "bytes_per_step": (
                (sent / self.step if sent % self.step else sent // self.step) if totals else None
            ),
            "data": {
                **{"name": config.data.name, "hash": data.hash, "tokens": data.tokens},
                **data.facts,
            },
            "peak_memory_bytes": self._peak_memory(),
            "mfu": self.meter.facts(),
            "model_parameters": sum(
                p.parts * p.numel for u in plan.units for p in u.unit.parameters
            ),
            "cluster": config.cluster.stored,
            "machine": machine_facts(),
            "commit": self.commit,
            "versions": versions(),
        }

    def _readout(self, tracker: Tracker) -> Record:
        """Return the mean training loss of the last `train.readout_steps` steps, in nats."""
        count = self.train.readout_steps
        if not count:
            return {}
        tracker.sync()
        losses = [row["loss"] for row in read(self.folder / METRICS)[-count:]]
        assert len(losses) == count
        return {"readout_loss": math.fsum(losses) / count, "readout_steps": count}

    def _peak_memory(self) -> int | None:
        """Return the most bytes that this process has held on its GPU; None on the CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None

    def _fail(self, error: BaseException, tracker: Tracker | None) -> None:
        failure = {
            "outcome": outcome_of(error),
            "error": f"{type(error).__name__}: {error}",
            "step": self.step,
            "traceback": traceback.format_exc(),
        }
        if tracker is not None:
            tracker.fail(failure, full=is_full(error))
        elif self.rank == 0:
            try:
                write_failure(self.folder, failure)
            except OSError as fault:  # the failure itself is what must be seen
                if not is_full(error):  # which says it already
                    print(fault, file=sys.stderr)


def loss_of(record: Record) -> float:
    """Return what of a step's record should not rise: its loss, or the reward with a minus."""
    return -record["rl"]["reward"] if "rl" in record else float(record["loss"])


def outcome_of(error: BaseException) -> str:
    if isinstance(error, NonFiniteError | DivergedError):
        return "diverged"
    if memory_is_full(error):
        return "out_of_memory"
    return "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "crashed"
