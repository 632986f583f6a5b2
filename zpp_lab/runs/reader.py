"""Reads a study's folder (study.yaml and run folders), and how each run ended.

A run folder holds config.yaml, metrics.jsonl and, once it ended, summary.json or failure.json; of a
run killed before it could write them, its log alone. Only finished runs have a loss to judge.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from zpp_lab import files
from zpp_lab.config.load import load
from zpp_lab.config.study import NOT_RUNS, StudyConfig
from zpp_lab.runs.metrics import out_of_order, read, read_object
from zpp_lab.runs.wandb.folder import read_summary

NOT_JUDGED = "not judged"
# verdicts that say nothing of loss
NO_ANSWER = ("no baseline", "not run", "unfinished", "failed", NOT_JUDGED)
NOT_STARTED = "not started"
_STATES = {"unfinished": "stopped", "out_of_memory": "out of memory"}
_PREDICATES = {  # of one run, of several
    NOT_STARTED: ("has not been started", "have not been started"),
    "running": ("is running", "are running"),
    "out of memory": ("ran out of memory", "ran out of memory"),
}
_MARKS = (files.CONFIG, files.SUMMARY, files.FAILURE, files.METRICS)
# of the held-out tokens, in summaries since they are taken; older ones have none
READOUTS = ("heldout_accuracy", "heldout_bits_per_byte")
_TAIL = 65536  # bytes of metrics.jsonl in which its last line most likely lies


def state(run: Run | None) -> str:
    """Return finished, running, stopped, diverged, crashed, out of memory or not started.

    stopped: it began, and left neither a summary nor a failure of its own: Ctrl-C, SIGTERM, --for,
    or whatever else ended its process.
    """
    if run is None:
        return NOT_STARTED
    if run.running:
        return "running"
    return _STATES.get(run.outcome, run.outcome)


def reached(run: Run) -> str:
    """Return how far a run came: "after step 120 of 300", or "before step 1"."""
    if run.step == 0:
        return "before step 1" + (f" of {run.steps}" if run.steps is not None else "")
    return f"after step {run.step}" + (f" of {run.steps}" if run.steps is not None else "")


def cause(run: Run | None) -> str:
    """Return the first line of what a run that failed has said; "" for others."""
    if run is None or run.running or state(run) == "stopped":
        return ""
    if run.failure is not None:
        lines = str(run.failure.get("error", "")).strip().splitlines()
        return lines[0][:200].rstrip(".") if lines else ""
    return "its held-out loss is not a number" if state(run) == "diverged" else ""


def unfinished_text(run: Run | None, several: bool = False) -> str:
    """Return a predicate for unfinished runs: "crashed after step 3 of 12 (it broke)"."""
    name, why = state(run), cause(run)
    found = _PREDICATES.get(name, (name, name))[several]
    if run is None:
        return found
    return f"{found} {reached(run)}" + (f" ({why})" if why else "")


def failures(runs: Sequence[Run]) -> str:
    """Return how the failed runs of an arm ended, without their causes."""
    ends = dict.fromkeys(f"{state(run)} {reached(run)}" for run in runs)
    return ", ".join(ends if len(ends) < 3 else dict.fromkeys(map(state, runs)))


def standing(runs: Mapping[int, Run], seeds: Sequence[int]) -> str:
    """Return how far an arm has come that has begun and of which no run has finished."""
    planned = {*seeds, *runs}
    furthest = max(runs.values(), key=lambda run: run.step)
    if len(planned) == 1:
        return f"{state(furthest)} {reached(furthest)}"
    active = sum(run.running for run in runs.values())
    began = f"{len(runs)} of {len(planned)} runs began" + (f", {active} running" * (active > 0))
    return f"{began}; the furthest is {reached(furthest)}"


@dataclass(frozen=True)
class Run:
    """One run folder. `config` is the nested mapping of config.yaml ({} when it is absent).

    step: the last one that metrics.jsonl has. running: a living process held the folder when it
    was read; of another machine's that is known where both share a file system and its locks.
    """

    dir: Path
    arm: str
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None
    step: int = 0
    running: bool = False

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r}, arm={self.arm!r}, seed={self.seed}, {self.outcome})"

    @property
    def steps(self) -> int | None:
        """How many the run was to do; None where no config tells."""
        steps = (self.config.get("train") or {}).get("steps")
        return None if steps is None else int(steps)

    @property
    def outcome(self) -> str:
        """finished, diverged, out_of_memory, crashed or unfinished."""
        if self.summary is not None:
            return "finished" if self.heldout_loss is not None else "diverged"
        outcome = (
            "unfinished" if self.failure is None else str(self.failure.get("outcome", "crashed"))
        )
        return "unfinished" if outcome == "interrupted" else outcome

    @property
    def recipe(self) -> str:
        return str((self.config.get("recipe") or {}).get("name", ""))

    @property
    def heldout_loss(self) -> float | None:
        """Nats per token; None when the run has not finished or the loss is not finite."""
        value = (self.summary or {}).get("heldout_loss")
        return float(value) if value is not None and math.isfinite(value) else None

    @property
    def readout(self) -> tuple[int, float] | None:
        """(steps, the mean training loss of the last so many, nats a token); None without one."""
        found = self.summary if self.outcome == "finished" else None
        if not found or "readout_loss" not in found or not math.isfinite(found["readout_loss"]):
            return None
        return int(found["readout_steps"]), float(found["readout_loss"])

    @property
    def quantized(self) -> Mapping[str, float]:
        """Of each wire's bytes the part that codecs made, 0 to 1; {} when it is unknown."""
        return (self.summary or {}).get("quantized_share") or {}

    @cached_property
    def heldout_tokens(self) -> int | None:
        """Over how many tokens that loss is a mean; None where no file tells."""
        if self.summary is None:
            return None
        if "heldout_tokens" in self.summary:
            return int(self.summary["heldout_tokens"])
        found = read_json(self.dir / files.HELDOUT)  # of older versions
        try:
            return None if found is None else sum(map(int, found["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise files.damaged(self.dir / files.HELDOUT, error) from None

    @property
    def data_hash(self) -> str | None:
        """Of the tokens that it read and was judged on; None where its summary does not tell."""
        return ((self.summary or {}).get("data") or {}).get("hash")

    def bytes_per_step(self, hop: str | None = None) -> float | None:
        """Return mean bytes of a step over all wires and ranks; `hop` is intra, inter or None
        (both).

        None when it is unknown."""
        if self.summary is None or not self.summary["bytes"]:  # {}: the engine cannot tell
            return None
        hops = (hop,) if hop else ("intra", "inter")
        sent = sum(wire.get(h, 0) for wire in self.summary["bytes"].values() for h in hops)
        return sent / self.summary["steps"]


def find_runs(root: Path) -> list[Run]:
    """Return every run folder at or below `root`, sorted by path; one that was refused before it
    began (failure.json alone, nothing that tells a seed) is left out."""
    return [
        read_run(folder)
        for folder in _run_folders(root)
        if _seed_of(folder.name) is not None or any((folder / n).is_file() for n in _MARKS[:2])
    ]


def read_run(folder: Path) -> Run:
    """Return one run folder; a file that cannot be read is a ValueError that names it."""
    running = files.held(folder)  # asked first: a run that ends meanwhile has finished, not stopped
    config = _or_none(files.read_yaml, folder / files.CONFIG) or {}
    summary = _or_none(read_summary, folder / files.SUMMARY)
    failure = read_json(folder / files.FAILURE)
    settings = config.get("run") or {}
    source = summary or {}
    arm = source.get("arm") or settings.get("arm") or source.get("recipe")
    arm = arm or (config.get("recipe") or {}).get("name") or folder.parent.name
    seed = source.get("seed", config.get("seed", _seed_of(folder.name)))
    if seed is None:
        raise ValueError(
            f"{folder}: no config.yaml or summary.json, so its seed is unknown; delete the folder"
        )
    if summary is not None:
        last = last_step(folder)
        if last != summary["steps"] and (folder / files.METRICS).is_file():
            ends = f"ends at step {last} of {summary['steps']}"
            raise files.damaged(
                folder / files.METRICS, ends, "restore it from a copy, or restart the run"
            )
        return Run(folder, str(arm), int(seed), config, summary, failure, summary["steps"])
    step = last_step(folder)
    return Run(folder, str(arm), int(seed), config, None, failure, step, running)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in step order; [] when there is none.

    A last line that a kill cut short is left out; any other broken line is a ValueError, and so is
    one without its loss, or with a step that does not follow those before it.
    """
    path, last = folder / files.METRICS, 0
    rows = _read_at_once(path) or read(path)
    for line, row in enumerate(rows, 1):
        kinds = (("step", int), ("loss", int | float), ("heldout_loss", int | float | None))
        wrong = [name for name, kind in kinds if not isinstance(row.get(name), kind)]
        if wrong:
            raise files.damaged(
                path, f"line {line}: {wrong[0]}: {row.get(wrong[0], 'files.missing')!r}"
            )
        if why := out_of_order(row, last):
            raise files.damaged(path, f"line {line}: {why}")
        last = row["step"]
    return rows


def _read_at_once(path: Path) -> list[dict[str, Any]] | None:
    """All lines by one call of the parser, which is several times as fast as line by line.

    None when there is anything unusual in the file, a spelled-out NaN or a broken line.
    """
    try:
        text = path.read_bytes()
        if b'NaN"' in text or b'Infinity"' in text:
            return None
        lines = text[: text.rfind(b"\n")].replace(b"\n", b",") if text else b""
        rows = json.loads(b"[" + lines + b"]")
    except (OSError, ValueError):
        return None
    return rows if all(isinstance(row, dict) for row in rows) else None


def last_record(folder: Path) -> dict[str, Any] | None:
    """Return the last whole line of metrics.jsonl, read from its end; None without one."""
    try:
        with open(folder / files.METRICS, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")
            if len(lines) < 3 and size > _TAIL:  # one line, with telemetry, may be longer
                file.seek(0)
                lines = file.read().split(b"\n")
        record = json.loads(lines[-2])
    except (OSError, ValueError, IndexError):
        return None
    return record if isinstance(record, dict) else None


def last_step(folder: Path) -> int:
    """Return the step of `last_record`, 0 when there is none."""
    return int((last_record(folder) or {}).get("step", 0))


def queued_at(folder: Path) -> int | None:
    """Return the step at which the run's Slurm job was last queued again; None if never."""
    path = folder / files.QUEUED
    return int(path.read_text()) if path.is_file() else None


def read_study(root: Path) -> StudyConfig | None:
    """Return the study that `root` was run as, or None for a folder of plain runs."""
    path = root / files.STUDY_FILE
    values = _or_none(files.read_yaml, path)
    try:
        return None if values is None else load(StudyConfig, values)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}. If another version of zpp_lab wrote it, use that one, or delete "
            "the file: the runs are kept"
        ) from None


def write_study(root: Path, study: StudyConfig) -> None:
    text = yaml.safe_dump(asdict(study), sort_keys=False, allow_unicode=True)
    files.write_atomic(root / files.STUDY_FILE, text)


def _run_folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        raise ValueError(f"{root}: {files.missing(root)}; use the folder of a study or of runs")
    for place, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in NOT_RUNS and not f.startswith("."))
        begun = any(mark in names for mark in _MARKS)
        if begun or (files.LOG in names and _seed_of(Path(place).name) is not None):
            folders.clear()
            yield Path(place)


def _seed_of(name: str) -> str | None:
    """The number in a folder name such as seed3, for a run that failed before it wrote more."""
    return name.removeprefix("seed") if re.fullmatch(r"seed\d+", name) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a file of a run folder; None when there is none, ValueError when it is broken."""
    return _or_none(read_object, path)


def _or_none(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any] | None:
    try:
        return read(path)
    except FileNotFoundError:  # not asked before: another start may remove it in between
        return None
