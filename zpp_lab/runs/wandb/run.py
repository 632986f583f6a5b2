"""One wandb run being written: the only file that talks to wandb's library.

What wandb would gather by itself would be of the process that sends: its code, command, packages
and console are switched off. The run folder has the commit and the console. System metrics are of
the training's process, and only while it is followed: afterwards nobody can tell them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

from zpp_lab.config.wires import WIRES
from zpp_lab.runs.metrics import Record, read
from zpp_lab.runs.wandb import identity
from zpp_lab.runs.wandb.baseline import LOSSES, Baseline, find_baseline
from zpp_lab.runs.wandb.folder import RunFolder
from zpp_lab.runs.wandb.mode import Mode

_SPEED = ("tokens_per_second", "mfu", "memory/*")
_HIDDEN = ("tokens", "seconds", "wait/*", "bytes/*", "telemetry/*")


class WandbRun:
    """Opens the wandb run that belongs to a run folder, or opens it again.

    Online it goes on after the last step that the server has. The server can be asked,
    as it gets the steps in order and the summary after them: it never has a hole.

    A step's row has the loss gap too when the baseline run has the step already. Gaps that
    come to be known later follow the last step in rows of their own, so they are series over
    gap_vs_.../step, not over wandb's own counter.

    Raises wandb's errors and TimeoutError; `forget` must follow each of them.
    """

    def __init__(self, folder: RunFolder, mode: Mode, trainer: int | None = None) -> None:
        """trainer: the process that is still training."""
        shutil.rmtree(folder.path / "wandb", ignore_errors=True)  # of an earlier attempt
        config = folder.config()
        tracking = config.get("tracking") or {}
        named = identity.identity(folder, config)
        self._run = open_run(
            mode,
            str(folder.path),
            float(tracking.get("timeout_seconds", 60.0)),
            summarized=False,
            trainer=trainer if folder.watched(config) else None,
            commit=folder.commit() if tracking.get("git", True) else None,
            config=identity.shown_config(config),
            **named,
        )
        if mode == "online":  # a later start, without this environment, goes on there
            folder.note(project=named["project"])
        # wandb's counter is the step, and goes on after the last one: 0 for a run from its start.
        self._counter = self._run.starting_step - 1
        self.last_step = 0  # the last step that wandb has
        self.url: str | None = self._run.url if mode == "online" else None
        self.folder = os.path.relpath(os.path.dirname(self._run.dir), folder.path)
        self._run_folder = folder
        sent = int(folder.state().get("console", 0)) if mode == "online" else 0
        self.console = sent  # bytes of the console that wandb has
        self._shows_console = bool(tracking.get("console", True))
        self.gaps = int(folder.state().get("gaps", 0))  # gaps are there up to this step
        self._with_gap: set[int] = set()  # steps after it whose row has one
        self._baseline: Baseline | None = None
        self._least: dict[str, float] = {}  # of each loss
        _define(self._run)
        self._look_for_baseline()

    def log(self, records: Iterable[Record]) -> None:
        """Send the records of the steps that wandb does not have yet."""
        if self._baseline is not None:
            self._baseline.refresh()
        latest: Record = {}
        for record in records:
            self.last_step = step = record["step"]
            if step > self._counter:
                gap = self._baseline.gap(record) if self._baseline is not None else None
                values = {**identity.row(record), **(gap or {})}
                latest |= values
                if shown := self._completions(record):
                    values |= shown
                    latest |= shown
                self._run.log(values, step=step)
                self._counter = step
                if gap:
                    self._with_gap.add(step)
            latest |= self._whole(record)
        if latest:
            self._run.summary.update({**latest, "_step": self._counter, "_timestamp": time.time()})

    def _completions(self, record: Record) -> dict[str, Any]:
        """Return the completions sampled at an evaluation as a table; {} without any."""
        found = self._run_folder.completions(record["step"]) if "heldout_loss" in record else []
        if not found:
            return {}
        import wandb

        names = list(found[0]["rewards"])
        rows = [[x["step"], x["prompt"], x["completion"], *x["rewards"].values()] for x in found]
        return {"completions": wandb.Table(["step", "prompt", "completion", *names], rows)}

    def say(self) -> None:
        """Send the lines that the training has said since the last call."""
        if not self._shows_console:
            return
        self.console, text = self._run_folder.console_after(self.console)
        if text:
            self._run.write_logs(text)

    def _whole(self, record: Record) -> Record:
        """What a table shows of a run so far: least losses, and seconds of training."""
        values: Record = {}
        for name in LOSSES:
            if name in record:
                least = self._least.get(name, record[name])
                self._least[name] = min(least, record[name])
                values[name] = {"min": self._least[name], "last": record[name]}
        if "seconds" in record:
            seconds = record["seconds"]
            values |= {"_runtime": seconds, "_wandb": {"runtime": int(seconds)}}
        return values

    def finish(self, outcome: dict[str, Any] | None) -> None:
        """Send the summary and wait, for a bounded time, until the server has it all.

        `outcome` is None for a run that was killed; else its names go below `final/`,
        as wandb's own summary holds the last step's values under the plain names.
        TimeoutError when time is up.
        """
        finished = outcome is not None and outcome.get("outcome") == "finished"
        if finished:  # a run that may go on must not have rows after its last step
            self._send_late_gaps()
        if outcome is not None:
            made_with = {key: outcome[key] for key in identity.MADE_WITH if key in outcome}
            self._run.config.update(made_with, allow_val_change=True)
            self._run.summary.update(identity.results(outcome))
            self._run.summary.update(identity.outcome_values(outcome, self._baseline))
        self._run.finish(exit_code=0 if finished else 1)

    def _look_for_baseline(self) -> None:
        if self._baseline is None:
            self._baseline = find_baseline(self._run_folder)
            if self._baseline is not None:
                prefix = self._baseline.prefix  # a step of its own: late gaps come after the last
                self._run.define_metric(f"{prefix}/step", hidden=True)
                self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def _send_late_gaps(self) -> None:
        """Gaps that were not known when their step was sent, or that nobody knows to be there."""
        self._look_for_baseline()
        if self._baseline is None:
            return
        self._baseline.refresh()
        missing = []
        for record in read(self._run_folder.metrics):
            if record["step"] <= self.gaps or record["step"] in self._with_gap:
                continue
            if gap := self._baseline.gap(record):
                self._counter += 1
                self._run.log(gap, step=self._counter)
                self._run.summary.update({**gap, "_step": self._counter})
            else:
                missing.append(record["step"])
        self.gaps = min(missing, default=self.last_step + 1) - 1


def open_run(
    mode: Mode,
    place: str,
    timeout: float,
    summarized: bool,
    trainer: int | None = None,
    commit: str | None = None,
    **named: Any,
) -> Any:
    """Call wandb.init with everything switched off that the run folder has already; `summarized`:
    by wandb, which counts the seconds that sending takes as the run's. trainer: the process of
    which wandb gathers system metrics, None for none."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports to third parties
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb.init(
        **named,
        mode="online" if mode == "online" else "offline",
        resume="allow" if mode == "online" else None,
        dir=place,
        settings=_settings(timeout, summarized, trainer, commit),
    )


def forget() -> None:
    """End wandb's own helper process; what it still held is in the run folder anyway."""
    if "wandb" in sys.modules:
        with contextlib.suppress(Exception):  # the helper may be the one that crashed
            sys.modules["wandb"].teardown(exit_code=1)


def _define(run: Any) -> None:
    """Axes, what a table shows of a series (losses by their least and last value), and which of
    them get a panel by themselves; the others are there for panels that somebody makes."""
    run.define_metric("step", hidden=True)
    for name in LOSSES:
        run.define_metric(name, step_metric="step", summary="min,last", hidden=True)
    for name in (*(name for name in identity.SHOWN if name not in LOSSES), *_HIDDEN):
        run.define_metric(name, step_metric="step", hidden=True)
    by_class = [f"telemetry/{wire}/{identity.BY_CLASS}" for wire in WIRES]
    for name in (*identity.SHOWN.values(), identity.BYTES, *_SPEED, *by_class):
        run.define_metric(name, step_metric="step")  # a table shows the last value


def _settings(timeout: float, summarized: bool, trainer: int | None, commit: str | None) -> Any:
    import wandb

    watched = {} if trainer is None else {"x_stats_pid": trainer}

    return wandb.Settings(
        init_timeout=timeout,
        finish_timeout=timeout,
        finish_timeout_raises=True,
        console="off",
        save_code=False,
        disable_code=True,
        disable_git=True,  # of the folder that the sender is in
        git_commit=commit,
        disable_job_creation=True,
        silent=True,
        symlink=False,
        x_disable_meta=True,
        x_disable_stats=trainer is None,
        x_disable_machine_info=trainer is None,
        x_disable_viewer=True,
        x_save_requirements=False,
        x_server_side_derived_summary=not summarized,  # all that it does is: not here
        **watched,
    )
