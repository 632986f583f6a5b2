"""Prepared tokens as a run sees them: random training windows, fixed held-out windows.

A batch depends on nothing but its arguments, so every arm of a study, every
engine and a resumed run see the same tokens.

A batch follows from its rank's number. So half the ranks with twice the batch see other text,
unless `data.draw_ranks` draws for as many ranks as there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zpp_lab.config.data import DataConfig
from zpp_lab.data.packed import PackedData, pack
from zpp_lab.data.prepare import SPLITS, Split, open_corpus, prepared
from zpp_lab.data.tokenizer import token_dtype

_COMMON = ("vocab_size", "hash", "files", "tokenizer")  # of the meta, fields of both kinds of data


def open_data(cfg: DataConfig) -> TokenData | PackedData:
    """Open the tokens that `cfg` describes, prepared on first use and reused afterwards. ValueError
    for text that is missing, unreadable or too short for `cfg.seq_len`, OSError when the token
    files cannot be written."""
    folder, meta = prepared(open_corpus(cfg), cfg)
    if cfg.has_records:
        return _packed(folder, meta, cfg)
    for split, what in (("train", "training"), ("heldout", "held-out")):
        if meta["tokens"][split] <= cfg.seq_len:
            raise ValueError(
                f"data: {meta['tokens'][split]} {what} tokens are too few for "
                f"data.seq_len={cfg.seq_len}: use more text (data.path, data.max_bytes), a "
                f"smaller data.seq_len or another data.heldout_every (now {cfg.heldout_every})"
            )
    dtype = token_dtype(meta["vocab_size"])
    return TokenData(
        **{name: meta[name] for name in _COMMON},
        folder=folder,
        streams={s: np.memmap(folder / f"{s}.bin", dtype, mode="r") for s in SPLITS},
        offsets={s: np.fromfile(folder / f"{s}.offsets.bin", "<i8") for s in SPLITS},
        draw_ranks=cfg.draw_ranks,
    )


def _packed(folder: Path, meta: dict[str, Any], cfg: DataConfig) -> PackedData:
    dtype = token_dtype(meta["vocab_size"])

    def split(name: Split) -> Any:
        tokens = np.memmap(folder / f"{name}.bin", dtype, mode="r")
        mask = np.memmap(folder / f"{name}.mask.bin", np.uint8, mode="r")
        return pack(tokens, mask, np.fromfile(folder / f"{name}.offsets.bin", "<i8"), cfg, name)

    train, held = split("train"), split("heldout")
    notes = [
        f"{what} records longer than data.seq_len={cfg.seq_len}: {note}"
        for what, note in {"training": train.fitted.note, "held-out": held.fitted.note}.items()
        if note
    ]
    return PackedData(
        **{name: meta[name] for name in _COMMON},
        end=meta["end"],
        folder=folder,
        seq_len=cfg.seq_len,
        train=train,
        held=held,
        notes=(*notes, *meta["notes"]),
        pairs=cfg.pairs,
    )


@dataclass(frozen=True)
class TokenData:
    """Training and held-out tokens of one corpus.

    `hash` is the sha256 over the tokenizer, the split, and every document's name and content,
    `tokenizer` that of what decides how text is encoded, `folder` where the token files and a BPE's
    tokenizer.json lie. `streams` maps a split to its tokens (memory-mapped, unsigned integers
    [tokens]), `offsets` to the start of each document in it (int64 [documents + 1], the last one is
    the end). `draw_ranks`: see `step`.
    """

    vocab_size: int
    hash: str
    files: int
    tokenizer: str
    folder: Path
    streams: dict[Split, np.ndarray]
    offsets: dict[Split, np.ndarray]
    draw_ranks: int = 0

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return len(self.streams["train"])

    @property
    def heldout_tokens(self) -> int:
        return len(self.streams["heldout"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the text was used."""
        return ()

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    def step(
        self, seed: int, step: int, world: int, micros: int, batch_size: int, seq_len: int
    ) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """Return (rank, micro-step) → the batch of one step. With `draw_ranks` the step's sequences
        are those that so many ranks would draw in one micro-step; ranks here take them in order,
        micro-step by micro-step. ValueError when they cannot be dealt out evenly."""
        if not self.draw_ranks:
            own = partial(self.batch, seed, step, batch_size=batch_size, seq_len=seq_len)
            return lambda rank, micro: own(rank, micro)
        turns = self.turns(seed, step, world, micros, batch_size, seq_len)
        return lambda rank, micro: self._windows("train", turns[rank, micro], seq_len)

    def turns(
        self, seed: int, step: int, world: int, micros: int, batch_size: int, seq_len: int
    ) -> np.ndarray:
        """Return where the sequences of `step` begin, int64 [world, micros, batch_size]."""
        shape = (world, micros, batch_size)
        if not self.draw_ranks:
            each = [(r, m) for r in range(world) for m in range(micros)]
            drawn = [self._starts(seed, step, r, m, batch_size, seq_len) for r, m in each]
            return np.concatenate(drawn).reshape(shape)
        count, left = divmod(world * micros * batch_size, self.draw_ranks)
        if left:
            raise ValueError(
                f"data.draw_ranks={self.draw_ranks}: a step has {world * micros * batch_size} "
                "sequences (ranks × micro-steps × batch); use a divisor of that"
            )
        drawn = [self._starts(seed, step, r, 0, count, seq_len) for r in range(self.draw_ranks)]
        return np.concatenate(drawn).reshape(shape)

    def documents(self, start: int, seq_len: int) -> range:
        """Return which training documents the window from `start` on reads, from 0 on."""
        first, last = np.searchsorted(self.offsets["train"], (start, start + seq_len), side="right")
        return range(int(first) - 1, int(last))

    def batch(
        self, seed: int, step: int, rank: int, micro: int, batch_size: int, seq_len: int
    ) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of one micro-step of one rank: int64 [batch_size, seq_len], CPU.
        Windows start anywhere in the training tokens. A pure function of its arguments: the
        generator's key is `seed`, its counter the rest, and its raw bits are used, which NumPy
        keeps the same in every version."""
        starts = self._starts(seed, step, rank, micro, batch_size, seq_len)
        return self._windows("train", starts, seq_len)

    def _starts(
        self, seed: int, step: int, rank: int, micro: int, count: int, seq_len: int
    ) -> np.ndarray:
        """Return where the windows of a batch begin, int64 [count]."""
        bits = np.random.Philox(key=seed, counter=[0, step, rank, micro]).random_raw(count)
        return (bits % np.uint64(self._places("train", seq_len))).astype(np.int64)

    def heldout(
        self, tokens: int, batch_size: int, seq_len: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same held-out windows every time: about `tokens` tokens, spread evenly. Yields
        (inputs, targets) as `batch` does. Windows do not overlap and do not depend on `batch_size`,
        so the last batch may be shorter: weight a mean by its rows."""
        starts = self._heldout_starts(tokens, seq_len)
        for first in range(0, len(starts), batch_size):
            yield self._windows("heldout", starts[first : first + batch_size], seq_len)

    def heldout_documents(self, tokens: int, seq_len: int) -> np.ndarray:
        """Return the document of each target of `heldout`, int64 [targets], in the same order.
        Documents count from 0 in the held-out split; their end markers belong to them."""
        targets = self._heldout_starts(tokens, seq_len)[:, None] + np.arange(1, seq_len + 1)
        return np.searchsorted(self.offsets["heldout"], targets.ravel(), side="right") - 1

    def _heldout_starts(self, tokens: int, seq_len: int) -> np.ndarray:
        windows = -(-self._places("heldout", seq_len) // seq_len)  # rounded up
        wanted = min(windows, max(1, tokens // seq_len))
        return np.arange(wanted) * windows // wanted * seq_len

    def _places(self, split: Split, seq_len: int) -> int:
        """Return in how many places a window of `seq_len` inputs and their targets can start."""
        places = len(self.streams[split]) - seq_len
        if places < 1:
            raise ValueError(
                f"data: {len(self.streams[split])} {split} tokens are too few for windows of "
                f"{seq_len} tokens: use a smaller data.seq_len or more text"
            )
        return places

    def _windows(self, split: Split, starts: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
        at = starts[:, None] + np.arange(seq_len + 1)
        rows = torch.from_numpy(self.streams[split][at].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
