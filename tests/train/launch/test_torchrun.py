"""Ranks that torchrun started hold their run's folder as `zpp-lab train` does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_runs import corpus
from tests.train.launch.test_launcher import LIMIT, lines, wait_for_lines
from zpp_lab.files import hold
from zpp_lab.runs.reader import read_run, state, unfinished_text

STEPS = 100_000  # more than any test waits for
SETTINGS = f"""engine=fsdp engine.device=cpu engine.threads=1 cluster=1x2 recipe=zeropp data=text
data.cache_dir=cache data.seq_len=16 data.heldout_every=2 model.dim=16 model.layers=1 model.heads=2
model.kv_heads=2 model.ffn=24 train.steps={STEPS} train.batch_size=2 train.eval_tokens=64
train.eval_every=50000 train.checkpoint_every=3 tracking.wandb=off run.dir=run""".split()


class Torchrun:
    """Starts of one run below one folder, each by a torchrun of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.words = [*SETTINGS, f"data.path={corpus(folder)}"]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        train = ["--nproc-per-node", "2", "-m", "zpp_lab.cli", "train", *self.words, *words]
        root = str(Path(__file__).parents[3])
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(
                [*agent, *train],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
            )
        self.started.append(process)
        return process

    def said(self, log: str) -> str:
        return (self.folder / log).read_text()

    def ended(self, log: str, *words: str) -> int:
        return self.start(log, *words).wait(timeout=LIMIT)


def ranks(agent: subprocess.Popen[bytes]) -> dict[str, int]:
    """The process of each rank that a torchrun has started."""
    task = Path(f"/proc/{agent.pid}/task")
    children = [p for t in task.iterdir() for p in (t / "children").read_text().split()]
    found = {}
    for pid in children:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {v[5:].decode(): int(pid) for v in given if v.startswith(b"RANK=")}
    return found


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(tmp_path)
    yield made
    for process in made.started:
        process.terminate()  # which ends the ranks, as SIGKILL would not
        process.wait(timeout=LIMIT)


REFUSED = "run: a run is active here already; wait for it or stop it, or set another run.dir"


@pytest.mark.slow
def test_a_mistake_is_told_once_and_leaves_nothing(torchrun: Torchrun) -> None:
    assert torchrun.ended("log.txt", "data.path=/no/text") != 0
    said = re.findall(r"data.path=/no/text: file or folder", torchrun.said("log.txt"))
    assert len(said) == 1
    assert not torchrun.run.exists()


def test_every_rank_of_a_second_start_is_told(torchrun: Torchrun) -> None:
    torchrun.run.mkdir()
    with hold(torchrun.run):
        assert torchrun.ended("log.txt") != 0
    for rank in (0, 1):
        assert f"rank {rank}: {REFUSED}" in torchrun.said("log.txt")
    assert [path.name for path in torchrun.run.iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
def test_a_run_is_seen_kept_apart_and_goes_on(torchrun: Torchrun) -> None:
    first = torchrun.start("first.txt")
    wait_for_lines(torchrun.run, 5, first)
    found = read_run(torchrun.run)
    assert state(found) == "running", torchrun.said("first.txt")
    assert re.fullmatch(rf"is running after step \d+ of {STEPS}", unfinished_text(found))

    assert torchrun.ended("second.txt") != 0
    assert f"rank 1: {REFUSED}" in torchrun.said("second.txt")
    assert not (torchrun.run / "failure.json").exists()
    wait_for_lines(torchrun.run, lines(torchrun.run) + 1, first)
    assert state(read_run(torchrun.run)) == "running"

    os.kill(ranks(first)["0"], signal.SIGKILL)
    assert first.wait(timeout=LIMIT) != 0
    assert state(read_run(torchrun.run)) == "stopped"

    assert torchrun.ended("again.txt", "run.piece_steps=2") == 0, torchrun.said("again.txt")
    assert re.search(rf"resuming after step \d+ of {STEPS}", torchrun.said("again.txt"))
    assert torchrun.said("again.txt").count("stopped before the end") == 1  # by rank 0
    assert state(read_run(torchrun.run)) == "stopped"


@pytest.mark.slow
def test_a_folder_that_cannot_be_held_stops_every_rank(torchrun: Torchrun) -> None:
    (torchrun.run / ".lock").mkdir(parents=True)  # as a disk or its permissions would refuse it
    assert torchrun.ended("log.txt") != 0
    said = torchrun.said("log.txt")
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: .*run/\.lock'.*run\.dir", said), said
