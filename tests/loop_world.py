"""Loops' jobs on two ranks under torchrun, over NCCL or gloo. A job that fails or hangs ends its
start; the next start does what is left, so that it costs no other job its answer.

    torchrun --nproc-per-node 2 -m tests.loop_world FOLDER 2x1 groups cuda swapped:amsp_node ...

On a GPU, a rank may have started a reduction before it learns that the others differ. That
communicator cannot be used again, so each such case of `experts` ends its start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import loop_base, loop_jobs
from tests.two_ranks import environment, starting
from zpp_lab.api import init
from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import ClusterConfig

JOB_SECONDS = 60.0  # of one job; a start has START more
START = 60.0
HANGS = 20.0  # seconds after which a transfer ends its rank
WIDE = 512  # width of models of jobs that compare bits: long transfers show a missing wait
BITS = ("swapped", "averaged", "forwards", "inference", "own_among_micro_steps", "resumed")
ROOT = Path(__file__).parents[1]


class Answers(dict[str, Any]):
    """What jobs returned. A test of a job that has failed fails with the ranks' output; one of a
    recipe that the cluster cannot have is skipped."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.cluster = cluster_of(shape)
        self.faults: dict[str, str] = {}

    def __missing__(self, key: str) -> Any:
        name = key.split()[-1]
        if not fits(name, self.cluster):
            pytest.skip(f"{name} needs another cluster")
        raise AssertionError(self.faults.get(key, f"{key} has not run"))


def cluster_of(shape: str) -> ClusterConfig:
    return ClusterConfig(*map(int, shape.split("x")))


def fits(name: str, cluster: ClusterConfig) -> bool:
    """Whether the cluster has every wire of the recipe, weights_update too."""
    try:
        Recipe(loop_base.RECIPES[name], cluster)
    except ValueError:
        return False
    return cluster.nodes > 1 or name not in loop_jobs.KEPT


def ask(shape: str, choice: str, device: str, jobs: list[tuple[str, str]], folder: Path) -> Answers:
    """Return the answers of all jobs - a function of tests/loop_jobs.py, a recipe - that fit."""
    answers = Answers(shape)
    left = [f"{job}:{name}" for job, name in jobs if fits(name, answers.cluster)]
    if device != "cpu":
        left = [text for each in left for text in spread(each)]
    for number in range(2 * len(left)):
        if not left:
            break
        own = folder / f"start{number}"
        own.mkdir()
        text, well = _start([str(own), shape, choice, device, *left], own / "answers", HANGS)
        found = [json.loads(line) for line in _lines(own / "answers")]
        for key, answer in found:
            more = key in answers and isinstance(answer, dict)  # another case of the job
            answers[key] = {**answers[key], **answer} if more else answer
        done = len(found)
        if done < len(left) and not well:
            answers.faults[" ".join(left[done].split(":")[:2])] = text[-6000:]
        left = left[done + (not well) :]
    return answers


def spread(text: str) -> list[str]:
    """The job, or its cases that end a start one by one behind those that do not."""
    if not text.startswith("experts:"):
        return [text]
    wider = str(text.endswith("zero3"))  # shapes differ
    together = ":".join(c for c in loop_jobs.CASES if c.startswith("at_once"))
    kinds = [kind for kind in loop_jobs.KINDS if kind != "at_once"]
    return [f"{text}:{together}", *(f"{text}:{kind}, {wider}" for kind in kinds)]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _start(words: list[str], answers: Path, more: float) -> tuple[str, bool]:
    """Run torchrun until it has ended, or no answer came for long; its output, and whether it has
    ended well."""
    command = starting("tests.loop_world", *words)
    log = answers.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True
        )
    seen, since = 0, time.monotonic() + START
    while process.poll() is None:
        time.sleep(0.05)
        if (count := len(_lines(answers))) > seen:
            seen, since = count, time.monotonic()
        if time.monotonic() - since > JOB_SECONDS + more:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return log.read_text(errors="replace"), process.returncode == 0


def main() -> None:
    folder, shape, choice, device, *jobs = sys.argv[1:]
    loop_base.WORLD.shape = shape
    loop_base.WORLD.device = init("gloo" if device == "cpu" else None)
    cluster: Any = cluster_of(shape)
    way: Any = choice
    transport = connect(cluster, Watchdog(HANGS), way, loop_base.WORLD.device)
    for text in jobs:
        job, name, *cases = text.split(":")
        loop_base.WORLD.width = WIDE if job in BITS else 8
        more = [folder] if job == "resumed" else cases
        function: Callable[..., Any] = getattr(loop_jobs, job)
        with patch("zpp_lab.api.connect", lambda *_: transport):
            found = function(name, *more)
        if dist.get_rank() == 0:
            with Path(folder, "answers").open("a") as file:
                file.write(json.dumps([f"{job} {name}", found]) + "\n")
        if device != "cpu" and len(cases) == 1:
            dist.all_gather_object([None] * 2, "answered")  # rank 0 has written
            os._exit(0)
        dist.barrier()
    if device != "cpu":
        torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
