"""Records as a run sees them: whole records in sequences, and which of their tokens count.

Every record follows an end marker, that of the record before it or one in its place, so each of its
tokens has something to be predicted from. A sequence takes the records that come next for as long
as they fit; what is left of it is padding, which never counts. An epoch is every sequence once, in
an order that follows from the seed alone.

Records longer than a sequence are cut, dropped or refused first; `Fit` says which part of each is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zpp_lab.config.data import DataConfig

Batch = tuple[Tensor, ...]
IGNORED = -100  # a target that the loss does not count


@dataclass(frozen=True)
class Fit:
    """Records that fit a sequence. records: int64 [n], places in the split; starts, stops: int64
    [n], the used part of each among the split's tokens; counted: int64 [n], completion tokens."""

    records: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    counted: np.ndarray
    cut_prompts: int = 0
    cut_completions: int = 0
    dropped: int = 0

    @property
    def note(self) -> str:
        """What was done to long records, "" when nothing."""
        done = {
            "cut at the left of their prompt": self.cut_prompts,
            "cut at the end of their completion too": self.cut_completions,
            "dropped": self.dropped,
        }
        return ", ".join(f"{n} {what}" for what, n in done.items() if n)


def fit(offsets: np.ndarray, mask: np.ndarray, cfg: DataConfig, split: str) -> Fit:
    """Cut, drop or refuse (ValueError) the records of more than `cfg.seq_len` tokens, as
    `cfg.records.too_long` says. Their end markers are among the tokens. Cutting takes tokens from
    the left of the prompt; where a completion alone is too long, the whole prompt goes, and then
    the completion's end."""
    starts, stops = offsets[:-1].copy(), offsets[1:].copy()
    counted = np.add.reduceat(mask, starts, dtype=np.int64) if len(starts) else starts
    long = np.flatnonzero(stops - starts > cfg.seq_len)
    if cfg.pairs and cfg.records.too_long == "drop":  # both of a pair
        long = np.unique([2 * (long // 2), 2 * (long // 2) + 1])
    records, how = np.arange(len(starts)), cfg.records.too_long
    if len(long) and how == "refuse":
        raise ValueError(_refusal(len(long), int(long[0]), int((stops - starts).max()), cfg, split))
    if how == "drop":
        keep = np.delete(records, long)
        return Fit(keep, starts[keep], stops[keep], counted[keep], dropped=len(long))
    completions = 0
    for i in long:
        prompt = int(np.argmax(mask[starts[i] : stops[i]] == 1))
        starts[i] += min(prompt, stops[i] - starts[i] - cfg.seq_len)
        if stops[i] - starts[i] > cfg.seq_len:
            stops[i] = starts[i] + cfg.seq_len
            completions += 1
        counted[i] = int(mask[starts[i] : stops[i]].sum())
    return Fit(records, starts, stops, counted, len(long) - completions, completions)


def _refusal(count: int, first: int, longest: int, cfg: DataConfig, split: str) -> str:
    n = cfg.heldout_every
    first //= 1 + cfg.pairs
    number = first + first // (n - 1) + 1 if split == "train" else (first + 1) * n
    return (
        f"data: {count} {split} records are longer than data.seq_len={cfg.seq_len} tokens (up to "
        f"{longest}; the first is record {number}, blank lines not counted): raise data.seq_len, "
        "shorten them, or set data.records.too_long=truncate (cuts prompts at the left) or drop"
    )


@dataclass(frozen=True)
class Sequences:
    """One split. tokens, mask: memory-mapped [tokens]; fitted: the used parts of records; first:
    int64 [sequences + 1], the first record of each, then their number; counted: int64 [sequences],
    how many of each one's targets the loss counts."""

    tokens: np.ndarray
    mask: np.ndarray | None  # None: everything counts
    fitted: Fit
    first: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.counted)

    def row(self, place: int, seq_len: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets, both int64 [seq_len], and each counted target's record."""
        inputs = np.full(seq_len, end, np.int64)
        targets = np.full(seq_len, IGNORED, np.int64)
        records = np.full(seq_len, -1, np.int64)
        at = 0
        for i in range(self.first[place], self.first[place + 1]):
            part = slice(self.fitted.starts[i], self.fitted.stops[i])
            own = self.tokens[part].astype(np.int64)
            inputs[at + 1 : at + len(own)] = own[:-1]
            counts = True if self.mask is None else self.mask[part] == 1
            targets[at : at + len(own)] = np.where(counts, own, IGNORED)
            records[at : at + len(own)] = self.fitted.records[i]
            at += len(own)
        return inputs, targets, records[targets != IGNORED]


@dataclass(frozen=True)
class PackedData:
    """Training and held-out records; the counterpart of `TokenData` for sequences of `seq_len`."""

    vocab_size: int
    end: int
    hash: str
    tokenizer: str
    files: int
    folder: Path
    seq_len: int
    train: Sequences
    held: Sequences
    notes: tuple[str, ...]
    pairs: bool = False  # sequences 2i and 2i + 1 are one pair's texts

    @property
    def tokens(self) -> int:
        """Tokens of all training records."""
        return len(self.train.tokens)

    @property
    def heldout_tokens(self) -> int:
        return len(self.held.tokens)

    @property
    def facts(self) -> dict[str, Any]:
        """What a summary has besides name, hash and tokens."""
        used = self.train.fitted
        places = len(self.train) * self.seq_len
        return {
            "records": len(used.records),
            "sequences": len(self.train),
            "counted": int(self.train.counted.sum()),
            "padding": 1 - int((used.stops - used.starts).sum()) / places,
            "cut": used.cut_prompts + used.cut_completions,
            "dropped": used.dropped,
        }

    def step(
        self, seed: int, step: int, world: int, micros: int, batch_size: int, seq_len: int
    ) -> Callable[[int, int], Batch]:
        """Return (rank, micro-step) → inputs, targets int64 [batch_size, seq_len] and, but for
        pairs, the share, int64 [2]: `world` · `micros` over the step's counted targets."""
        turns = self.turns(seed, step, world, micros, batch_size, seq_len)
        if self.pairs:  # each micro-batch has as many
            return lambda rank, micro: self._batch(self.train, turns[rank, micro])
        share = torch.tensor([world * micros, int(self.train.counted[turns].sum())])
        return lambda rank, micro: (*self._batch(self.train, turns[rank, micro]), share)

    def turns(
        self, seed: int, step: int, world: int, micros: int, batch_size: int, seq_len: int
    ) -> np.ndarray:
        """Return which training sequences `step` takes, int64 [world, micros, batch_size]."""
        assert seq_len == self.seq_len
        count = world * micros * batch_size
        places = self._places(seed, step * count, count)
        return places.reshape(micros, world, batch_size).swapaxes(0, 1)

    def documents(self, place: int, seq_len: int) -> range:
        """Return which of the used training records a sequence has, from 0 on."""
        assert seq_len == self.seq_len
        return range(int(self.train.first[place]), int(self.train.first[place + 1]))

    def heldout(
        self, tokens: int, batch_size: int, seq_len: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same held-out sequences every time: about `tokens` places, spread evenly."""
        assert seq_len == self.seq_len
        places = self._held_places(tokens)
        batch_size += batch_size % 2 if self.pairs else 0
        for first in range(0, len(places), batch_size):
            yield self._batch(self.held, places[first : first + batch_size])

    def heldout_documents(self, tokens: int, seq_len: int) -> np.ndarray:
        """Return the record, or pair, of each counted target of `heldout`, int64, in order."""
        rows = (self.held.row(p, seq_len, self.end)[2] for p in self._held_places(tokens))
        return np.concatenate(list(rows)) // (1 + self.pairs)

    def _held_places(self, tokens: int) -> np.ndarray:
        each = 1 + self.pairs
        count = len(self.held) // each
        wanted = min(count, max(1, tokens // (each * self.seq_len)))
        return _texts(np.arange(wanted) * count // wanted, self.pairs)

    def _places(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return which sequences the `count` turns from `first` on take, int64 [count]."""
        each = 1 + self.pairs
        places = shuffled(seed, first // each, count // each, len(self.train) // each)
        return _texts(places, self.pairs)

    def _batch(self, split: Sequences, places: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = [split.row(place, self.seq_len, self.end)[:2] for place in places]
        inputs, targets = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
        return inputs, targets


def _texts(places: np.ndarray, pairs: bool) -> np.ndarray:
    """Return the sequences of records, or of pairs: both of each, the chosen text first."""
    return np.stack((2 * places, 2 * places + 1), 1).ravel() if pairs else places


def shuffled(seed: int, first: int, count: int, size: int) -> np.ndarray:
    """Return which of `size` things the `count` turns from `first` on take, int64 [count]."""
    epochs, at = np.divmod(np.arange(first, first + count), size)
    orders = {int(e): _order(seed, int(e), size) for e in np.unique(epochs)}
    return np.array([orders[int(e)][i] for e, i in zip(epochs, at, strict=True)])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return a permutation by sorting raw bits, which NumPy keeps the same in every version."""
    bits = np.random.Philox(key=seed, counter=[1, epoch, 0, 0]).random_raw(count)
    return np.argsort(bits, kind="stable")


def pack(
    tokens: np.ndarray, mask: np.ndarray, offsets: np.ndarray, cfg: DataConfig, split: str
) -> Sequences:
    """Pack one split's records into sequences; ValueError when no record fits one, see `fit`."""
    fitted = fit(offsets, mask, cfg, split)
    if not len(fitted.records):
        raise ValueError(
            f"no {split} record fits data.seq_len={cfg.seq_len}: set data.records.too_long=truncate"
        )
    lengths = fitted.stops - fitted.starts
    packs = cfg.records.pack and not cfg.pairs
    first = _next_fit(lengths, cfg.seq_len) if packs else np.arange(len(lengths) + 1)
    counted = np.add.reduceat(fitted.counted if cfg.mask_prompt else lengths, first[:-1])
    return Sequences(tokens, mask if cfg.mask_prompt else None, fitted, first, counted)


def _next_fit(lengths: np.ndarray, most: int) -> np.ndarray:
    """Return the first record of each sequence, then the number of records."""
    first, used = [0], 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > most:
            first.append(i)
            used = 0
        used += length
    return np.array([*first, len(lengths)])
