"""Small tasks as records, made here: sums that a reward can check, for reinforcement learning.

Some answers may have one random digit (`data.wrong`): a model that learns from those alone samples
the right answer about as often as it stood in the text, which is where rewards take over. With
`data.pairs` the right answer is preferred to one with a wrong digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zpp_lab.config.data import DataConfig
from zpp_lab.data.corpus import File, FileCorpus

_TERMS = 8  # of a running sum, of two digits each
_SUMS = 20_000
_MADE = 1  # raise it when the records change


@dataclass(frozen=True)
class TaskFiles(FileCorpus):
    """One file of records that lies in memory."""

    content: bytes = b""
    made: tuple[Any, ...] = ()

    def identity(self) -> dict[str, Any]:
        return {"task": [*self.made, _MADE]}

    def _read(self, file: File) -> bytes:
        return self.content[: file.take]


def task_files(cfg: DataConfig) -> TaskFiles:
    """Make the task `cfg.name`, cut to `cfg.max_bytes`: the same records every time."""
    draw = np.random.Generator(np.random.Philox(key=1))
    asked = (_additions if cfg.name == "addition" else _sums)(draw)
    records = (
        {"prompt": prompt, "chosen": answer, "rejected": _with_error(answer, 1, draw, other=True)}
        if cfg.pairs
        else {"prompt": prompt, "completion": _with_error(answer, cfg.wrong, draw)}
        for prompt, answer in asked
    )
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    size, take = len(content), min(cfg.max_bytes or len(content), len(content))
    file = File(f"{cfg.name}.jsonl", size, 0, take)
    made = (cfg.name, "pairs" if cfg.pairs else cfg.wrong, take)
    return TaskFiles(Path(cfg.name), (file,), content=content, made=made)


def _additions(draw: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Yield every pair of numbers below 100 once, in an order of chance: 12+34= and 046. All have
    the same width, which a small model learns several times as fast."""
    for place in np.argsort(draw.random(10_000), kind="stable").tolist():
        a, b = divmod(place, 100)
        yield f"{a:02}+{b:02}=", f"{a + b:03}"


def _sums(draw: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Yield sums of eight numbers with their steps: 12+34+…= and 12+34=46;46+…=…;…"""
    for terms in (draw.random((_SUMS, _TERMS)) * 90 + 10).astype(int).tolist():
        steps = zip(pairwise(accumulate(terms)), terms[1:], strict=True)
        written = ";".join(f"{before}+{term}={total}" for (before, total), term in steps)
        yield "+".join(map(str, terms)) + "=", written


def _with_error(answer: str, share: float, draw: np.random.Generator, other: bool = False) -> str:
    """Return the answer, with one of its digits random in a share of the calls; `other`: never the
    right one."""
    chance, where, digit = draw.random(3).tolist()
    places = [i for i, character in enumerate(answer) if character.isdigit()]
    at = places[int(where * len(places))]
    new = (int(answer[at]) + 1 + int(digit * 9)) % 10 if other else int(digit * 10)
    return answer[:at] + str(new) + answer[at + 1 :] if chance < share else answer
