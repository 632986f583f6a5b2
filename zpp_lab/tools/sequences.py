"""What a run read in a step: its sequences, where they come from and how often they repeat.

A loss or a gradient's norm that jumps in one step has its reason in the weights or in the text.
Batches follow from the settings alone, so the text can be looked at afterwards, on any machine
that has the run's token files or its corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zpp_lab.config.data import DataConfig
from zpp_lab.data import PackedData, TokenData, open_data
from zpp_lab.data.prepare import open_corpus, open_tokenizer, parts
from zpp_lab.data.source import TextSource
from zpp_lab.tools.export.model import run_config
from zpp_lab.train.resume import check_same_data

PERIOD = 64  # tokens: the longest repeat that is looked for
NAMED = ("stdlib", "installation", "text")  # corpora whose documents have names that files give


@dataclass(frozen=True)
class Sequence:
    """One sequence of a step. `step` counts from 1, the rest from 0; documents: names, or numbers
    where the corpus has none; text: decoded."""

    step: int
    rank: int
    micro: int
    row: int
    documents: tuple[str, ...]
    distinct: int  # tokens
    repeats: float  # share of the tokens, see `repeats`
    text: str


def sequences(run: Path, steps: list[int]) -> Iterator[Sequence]:
    """Yield all sequences of the `steps` (from 1 on) of the run in `run`, in order.

    ValueError when it is no run's folder, when it has no such step, or when its corpus has changed.
    """
    config = run_config(run)
    unknown = [step for step in steps if not 1 <= step <= config.train.steps]
    if unknown:
        raise ValueError(f"step {unknown[0]}: {run} has steps 1 to {config.train.steps}")
    data = open_data(config.data)
    check_same_data(run, data, resumed=True)
    decode = open_tokenizer(config.data, data.folder).decode
    source = TextSource(config, data)
    found = [(step, *place) for step in steps for place in _places(source, step)]
    length = config.data.seq_len
    read = {place: data.documents(place, length) for *_, place in found}
    names = _names(config.data, {i for documents in read.values() for i in documents})
    for step, rank, micro, row, place in found:
        tokens = _tokens(data, place, length)
        yield Sequence(
            step,
            rank,
            micro,
            row,
            tuple(names(i) for i in read[place]),
            len(np.unique(tokens)),
            repeats(tokens),
            decode(tokens.tolist()),
        )


def repeats(tokens: np.ndarray) -> float:
    """Return the share of tokens [n] that equal the one some places before, for the distance, of at
    most PERIOD and a quarter of them, at which most do: 1.0 for a line that comes again and
    again."""
    most = min(PERIOD, len(tokens) // 4)
    return max((float(np.mean(tokens[p:] == tokens[:-p])) for p in range(1, most + 1)), default=0.0)


def _places(source: TextSource, step: int) -> Iterator[tuple[int, int, int, int]]:
    """(rank, micro-step, row, where the sequence is) of one step."""
    for (rank, micro, row), place in np.ndenumerate(source.turns(step - 1)):
        yield rank, micro, row, int(place)


def _tokens(data: TokenData | PackedData, place: int, length: int) -> np.ndarray:
    if isinstance(data, TokenData):
        return np.asarray(data.streams["train"][place : place + length])
    return data.train.row(place, length, data.end)[0]


def _names(cfg: DataConfig, wanted: set[int]) -> Callable[[int], str]:
    """Names of training documents by their number; the corpus is read up to the last of them."""
    if cfg.name not in NAMED:
        return lambda i: f"{'record' if cfg.name == 'jsonl' else 'document'} {i}"
    training = (name for name, split, _ in parts(open_corpus(cfg), cfg) if split == "train")
    known = {
        i: name for i, name in zip(range(max(wanted) + 1), training, strict=False) if i in wanted
    }
    return known.__getitem__
