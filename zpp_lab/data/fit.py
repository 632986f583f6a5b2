"""Which piece of each record a sequence can hold, and what was done to those that are too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zpp_lab.config import DataConfig


@dataclass(frozen=True)
class Fit:
    """records: int64 [n], places in the split; starts, stops: int64 [n], where each one's piece
    lies among the split's tokens; counted: int64 [n], its completion's tokens."""

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
    `cfg.records.too_long` says. Their end markers are among the tokens.

    Cutting takes tokens from the left of the prompt; where a completion alone is too long, the
    whole prompt goes, and then the completion's end.
    """
    starts, stops = offsets[:-1].copy(), offsets[1:].copy()
    counted = np.add.reduceat(mask, starts, dtype=np.int64) if len(starts) else starts
    long = np.flatnonzero(stops - starts > cfg.seq_len)
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
    number = first + first // (n - 1) + 1 if split == "train" else (first + 1) * n
    return (
        f"data: {count} {split} records are longer than data.seq_len={cfg.seq_len} tokens (up to "
        f"{longest}; the first is record {number}, blank lines not counted): raise data.seq_len, "
        "shorten them, or set data.records.too_long=truncate (cuts prompts at the left) or drop"
    )
