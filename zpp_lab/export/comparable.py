"""Whether a folder's model can be measured on a run's held-out tokens.

A model of another tokenizer reads other words into the same numbers, one that sees the tokens it is
asked for needs no language at all, and both give a loss like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.config import DataConfig
from zpp_lab.data.outside_tokenizer import open_outside
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import library

_TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "spiece.model")


def check_comparable(
    model: Any, path: Path, source: Path, data: DataConfig, window: Tensor
) -> None:
    """ValueError when the model in `path` cannot read the held-out tokens of the run `source`,
    or cannot be asked for them. window: int64 [1, T], some of those tokens."""
    _same_tokenizer(path, source, data)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < window.shape[1]:
        raise ValueError(
            f"{path} knows {limit} positions, the windows of {source} have {window.shape[1]}: name "
            f"with --data a run with data.seq_len={limit} or less"
        )
    if _sees_ahead(model, window):
        raise ValueError(
            f"{path} is no causal language model: it sees the tokens that it is to predict"
        )


def _same_tokenizer(path: Path, source: Path, data: DataConfig) -> None:
    """Of a folder without a tokenizer nothing is known."""
    there = [name for name in _TOKENIZERS if (path / name).is_file()]
    if there and data.tokenizer == "bytes":
        raise ValueError(
            f"{path} has a tokenizer of its own ({there[0]}), {source} reads bytes: name with "
            "--data a run of that tokenizer"
        )
    if TOKENIZER not in there or data.tokenizer == "bytes":
        return
    own = source / TOKENIZER if data.tokenizer == "bpe" else open_outside(data).file
    if own.is_file() and not _vocabulary(own).items() <= _vocabulary(path / TOKENIZER).items():
        raise ValueError(f"{path} has another tokenizer than {source}: they differ in their tokens")


def _vocabulary(file: Path) -> dict[str, int]:
    tokenizers = library(f"{file.parent}, with a tokenizer,")
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # of its own kind
        raise ValueError(f"{file} is no tokenizer: {error}") from None
    return found


@torch.no_grad()
def _sees_ahead(model: Any, window: Tensor) -> bool:
    """Whether another last token changes what the model says before it, by more than rounding."""
    first = window[:, : min(16, window.shape[1])]
    if first.shape[1] < 2:
        return False
    other = first.clone()
    other[:, -1] = torch.where(first[:, -1] == 0, 1, 0)
    a, b = (model(input_ids=t, use_cache=False).logits[:, :-1].float() for t in (first, other))
    return bool((a - b).abs().max() > 0.05 * a.std())
