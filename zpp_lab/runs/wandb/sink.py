"""Sends run folders to wandb, in a process of its own.

It follows metrics.jsonl while the run trains, so a slow or dead server never delays training. A
run can be sent again at any time: its wandb id is fixed, and the server says which steps it has.

    python -m zpp_lab.runs.wandb.sink DIR ... [--parent PID]
    python -m zpp_lab.runs.wandb.sink --study ROOT [--parent PID]

Offline, without system metrics, a run is written once, when it ends. A study starts one such
process for all its runs, as importing wandb costs more than a run. `--parent` names the process
that started this one: when it is gone, no more lines will come.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml

from zpp_lab.files import missing
from zpp_lab.runs.metrics import Tail
from zpp_lab.runs.wandb.baseline import is_ready
from zpp_lab.runs.wandb.folder import RunFolder, run_folders
from zpp_lab.runs.wandb.mode import Mode, check_can_send, resolve
from zpp_lab.runs.wandb.run import WandbRun, forget

POLL_SECONDS = 1.0
RETRY_SECONDS = 120.0
_DAMAGED = (OSError, ValueError, KeyError, yaml.YAMLError)  # what reading a damaged folder raises

Ended = Callable[[], bool]


def sync(run_dir: Path | str) -> str | None:
    """Replay a run's folder to wandb online: what the server has already is not sent twice.

    Returns the run's URL. ValueError without wandb or a key, RuntimeError when the
    server cannot be reached or does not take it all in time; it can be tried again.
    """
    check_can_send()
    folder = RunFolder(run_dir)
    with folder.lock(wait=False):
        if not _attempt(folder, "online", lambda: True):
            raise RuntimeError(f"{folder.path} was not sent to wandb: {folder.state()['error']}")
    return folder.state()["url"]


def sync_all(paths: Sequence[Path | str]) -> int:
    """Call `sync` for each run folder in or below `paths`; returns how many could not be sent.

    A line a run says where it is, or why it is not. ValueError when there is no run.
    """
    folders = [run for path in paths for run in run_folders(path)]
    if not folders:
        absent = [path for path in map(Path, paths) if not path.is_dir()]
        if absent:
            raise ValueError(f"{absent[0]}: {missing(absent[0])}; use a run's folder, or a study's")
        raise ValueError(
            f"no metrics.jsonl in or below {', '.join(map(str, paths))}: use a run's folder, or a "
            "folder above some"
        )
    failures = 0
    for folder in folders:
        try:
            print(f"{folder.path}: {sync(folder.path)}", flush=True)
        except RuntimeError as error:
            failures += 1
            print(error, file=sys.stderr)
    return failures


def follow(folder: RunFolder, mode: Mode, ended: Ended, trainer: int | None = None) -> bool:
    """Send one run until it has ended; return whether wandb has all. trainer: its process."""
    with folder.lock(wait=True):
        if mode == "offline" and (trainer is None or not folder.watched(folder.config())):
            _wait(ended, None)
        while True:
            last = ended()
            done = _attempt(folder, mode, ended, None if last else trainer)
            if done or last:
                return done
            _wait(ended, RETRY_SECONDS)


def _attempt(folder: RunFolder, mode: Mode, ended: Ended, trainer: int | None = None) -> bool:
    """Open the wandb run, send what there is until the end, close it. False when it failed."""
    folder.note(mode=mode, state="sending", error=None)
    try:
        run = WandbRun(folder, mode, trainer)
        folder.note(url=run.url, folder=run.folder)
        mark = _send(run, folder, ended)
        folder.note(state="complete", sent_step=run.last_step, gaps=run.gaps, ended=mark)
        if mode == "online":
            folder.note(console=run.console)
        return True
    except Exception as error:  # whatever happens in wandb, the run can be sent again
        traceback.print_exc()
        folder.note(state="failed", error=f"{type(error).__name__}: {error}")
        forget()
        return False


def _send(run: WandbRun, folder: RunFolder, ended: Ended) -> str | None:
    """Returns the mark of the ending that was sent, None when the run was killed."""
    tail = Tail(folder.metrics)
    while True:
        last, mark = ended(), folder.ended()  # asked first, so that no line is missed
        run.log(tail.new())
        run.say()
        if last:
            run.finish(folder.outcome())
            return mark
        _wait(ended, POLL_SECONDS)


def serve_study(root: Path | str, auto: Mode, more: Callable[[float], bool]) -> int:
    """Send each run below `root` when it has ended; returns how many could not be sent.

    A run waits here, not in training, until its baseline has ended, so that the loss gap is in
    every row; at the study's end it goes as it is. `auto` is the mode of runs that leave it
    open. `more(seconds)` waits that long at most and says whether runs may still come.
    """
    failed: dict[Path, str] = {}  # the ending that could not be sent; tried again at the end
    going = True
    while True:
        waiting = sorted(_unsent(root), key=lambda item: item[0].path in failed)
        for folder, mark in waiting:
            if going and (failed.get(folder.path) == mark or not _ready(folder, root)):
                continue
            if not _deliver(folder, mark, auto):
                failed[folder.path] = mark
                break  # the next one would wait for the same server
        if not going:
            return len(_unsent(root))
        going = more(RETRY_SECONDS if failed else POLL_SECONDS)


def _unsent(root: Path | str) -> list[tuple[RunFolder, str]]:
    """The runs that have ended in a way that wandb does not know yet, with the mark of that."""
    found = []
    for folder in run_folders(root):
        mark = folder.ended()
        if mark is not None and folder.sent() != mark:
            found.append((folder, mark))
    return found


def _ready(folder: RunFolder, root: Path | str) -> bool:
    try:
        return is_ready(folder, root)
    except _DAMAGED:
        return True  # the delivery says so


def _deliver(folder: RunFolder, mark: str, auto: Mode) -> bool:
    try:
        mode = _mode_of(folder, auto)
        if mode != "off":
            return follow(folder, mode, lambda: True)
        folder.note(mode="off", state="complete", ended=mark)
        return True
    except _DAMAGED:  # the other folders go on
        traceback.print_exc()
        return False


def _mode_of(folder: RunFolder, auto: Mode) -> Mode:
    wanted = (folder.config().get("tracking") or {}).get("wandb", "auto")
    return auto if wanted == "auto" else wanted


def _wait(ended: Ended, seconds: float | None) -> None:
    """Wait until the run has ended, at most `seconds`."""
    stop = None if seconds is None else time.monotonic() + seconds
    while not ended() and (stop is None or time.monotonic() < stop):
        time.sleep(POLL_SECONDS / 2)


def _gone(parent: int | None) -> bool:
    """Whether the process that started this one is gone: orphans get another parent."""
    return parent is None or os.getppid() != parent


def _more_runs(parent: int | None) -> Callable[[float], bool]:
    """For `serve_study`: the launcher closes our standard input when the last run has ended."""

    def more(seconds: float) -> bool:
        stop = time.monotonic() + seconds
        while not _gone(parent):
            if select.select([sys.stdin], [], [], POLL_SECONDS / 2)[0] and not os.read(0, 1):
                return False
            if time.monotonic() >= stop:
                return True
        return False

    return more


def _follow_all(folders: list[RunFolder], auto: Mode, parent: int | None) -> int:
    failures = 0
    for folder in folders:
        mode = _mode_of(folder, auto)
        if mode != "off":
            failures += not follow(folder, mode, partial(_over, folder, parent), parent)
    return failures


def _over(folder: RunFolder, parent: int | None) -> bool:
    return folder.ended() is not None or _gone(parent)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zpp_lab.runs.wandb.sink")
    parser.add_argument("folders", nargs="*", help="run folders, or folders of them")
    parser.add_argument("--study", help="send the runs below this folder as they end")
    parser.add_argument("--mode", choices=["online", "offline"], help="for runs that say auto")
    parser.add_argument("--parent", type=int, help="the process that starts this one")
    args = parser.parse_args(argv)
    if bool(args.study) == bool(args.folders):
        parser.error("give run folders, or --study ROOT")
    return args


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0 when wandb has everything, 1 when something could not be sent."""
    args = _arguments(argv)
    os.nice(10)  # training comes first
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm warns all processes of a job
        signal.signal(number, signal.SIG_IGN)
    try:
        auto: Mode = args.mode or resolve("auto")[0]
        if args.study:
            return int(serve_study(args.study, auto, _more_runs(args.parent)) > 0)
        folders = [run for folder in args.folders for run in run_folders(folder)]
        return int(_follow_all(folders, auto, args.parent) > 0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
