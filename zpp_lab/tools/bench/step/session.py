"""The processes of `zpp-lab bench step`, one a rank, and how their parent talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from zpp_lab.tools.bench.step.arms import Arm
from zpp_lab.train.launch.gpus import Placement
from zpp_lab.train.launch.ranks import Hosts, free_port, rank_environment

Answer = dict[str, Any]
START_LIMIT = 180.0  # seconds for all ranks to import torch and meet


class SessionError(RuntimeError):
    """A rank failed, ended or did not answer in time; the session is over."""


class Session:
    """All ranks of a cluster, ready to build and time `arms`.

    Where ranks share GPUs through MPS, the placement is one with its daemon running.
    SessionError when ranks do not come up; the folder's logs say why.
    """

    def __init__(
        self, hosts: Hosts, placement: Placement, arms: Sequence[Arm], folder: Path
    ) -> None:
        self.folder = folder
        self.ranks: list[_Rank] = []
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "arms.yaml"
        lines = [{"maker": arm.maker, "config": asdict(arm.config)} for arm in arms]
        settings.write_text(yaml.safe_dump(lines, sort_keys=False))
        port, cluster = free_port(), placement.cluster
        try:
            for rank in range(cluster.world):
                environment = rank_environment(hosts, placement, rank, port, os.environ)
                node = rank // cluster.gpus_per_node
                log = folder / f"rank{rank}.log"
                self.ranks.append(_Rank(hosts, node, environment, settings, log))
            self._answers(START_LIMIT)
        except BaseException:
            self.close()
            raise

    def ask(self, limit: float, do: str, **command: Any) -> list[Answer]:
        """Return every rank's answer in rank order, within `limit` seconds, or SessionError."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # its answer will say that it has ended
                rank.tell({"do": do, **command})
        return self._answers(limit)

    def _answers(self, limit: float) -> list[Answer]:
        deadline, left = time.monotonic() + limit, dict(enumerate(self.ranks))
        found: dict[int, Answer] = {}
        with selectors.DefaultSelector() as waiting:
            for number, rank in left.items():
                waiting.register(rank.answers, selectors.EVENT_READ, number)
            while left:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    names = ", ".join(map(str, left))
                    raise SessionError(f"no answer within {limit:.0f} s from rank {names}")
                for key, _ in ready:
                    found[key.data] = self._answer(key.data)
                    waiting.unregister(key.fileobj)
                    del left[key.data]
        return [found[number] for number in range(len(self.ranks))]

    def _answer(self, number: int) -> Answer:
        rank = self.ranks[number]
        line = rank.answers.readline()
        if not line:
            raise SessionError(f"rank {number} ended: {rank.last_words()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise SessionError(f"rank {number}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the ranks: they get a moment to do so by themselves."""
        deadline = time.monotonic() + 5.0
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.tell({"do": "end"})
        for rank in self.ranks:
            rank.end(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End the ranks at once: some of them may hang."""
        for rank in self.ranks:
            rank.end(0.0)


class _Rank:
    """One process: commands go to its standard input, answers come through a pipe."""

    def __init__(
        self, hosts: Hosts, node: int, environment: dict[str, str], settings: Path, log: Path
    ) -> None:
        self.log = log
        reading, writing = os.pipe()
        words = [sys.executable, "-m", "zpp_lab.tools.bench.step.rank", str(settings), str(writing)]
        try:
            with log.open("wb") as file:
                self.process: subprocess.Popen[str] = hosts.start(
                    node,
                    words,
                    environment,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                    text=True,
                )
        finally:
            os.close(writing)
        self.answers: IO[str] = os.fdopen(reading)

    def tell(self, command: Answer) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'no output'} ({self.log})"

    def end(self, patience: float) -> None:
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            self.answers.close()
            if self.process.stdin is not None:
                self.process.stdin.close()
