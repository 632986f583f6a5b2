"""Prompts of reinforcement learning: records of JSON lines up to where their answer begins.

A prompt has the tokens that finetuning gives it, a chat template's header of the answer included,
and follows an end marker, as every record does. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zpp_lab.config.data import TASKS
from zpp_lab.config.schema import Config
from zpp_lab.data.chat import Findings
from zpp_lab.data.prepare import open_tokenizer
from zpp_lab.data.records import answer_of, encoded, parts_of, record_corpus
from zpp_lab.data.tokenizer import Tokenizer

# arguments of a reward that no field can have
_OURS = ("prompts", "completions", "prompt_ids", "completion_ids")


@dataclass(frozen=True)
class Prompts:
    """One split's prompts. tokens: int64 [n] each, the end marker before it first; texts: without
    it; columns: fields of their records, None where one has no such field."""

    tokens: list[np.ndarray]
    texts: list[str]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, places: list[int]) -> dict[str, list[Any]]:
        """Return the columns of these prompts."""
        return {name: [values[i] for i in places] for name, values in self.columns.items()}


_checked: dict[str, tuple[Prompts, Prompts]] = {}  # those checked last, until they are opened


def check_prompts(config: Config) -> None:
    """Do `open_prompts`, and keep what it returns for the next call: it can take seconds. A study
    checks all its runs; made tasks do not change between them."""
    if config.data.name in TASKS and _key(config) in _checked:
        return
    _checked.clear()
    _checked[_key(config)] = _opened(config, Path())


def open_prompts(config: Config, folder: Path) -> tuple[Prompts, Prompts]:
    """Return the training and the held-out prompts; every `data.heldout_every`-th is held out, as
    in finetuning. folder: of the token files, which has a BPE. ValueError where there are none, or
    one leaves no room for `rl.max_new_tokens` in `data.seq_len`."""
    return _checked.pop(_key(config), None) or _opened(config, folder)


def _key(config: Config) -> str:
    return repr((config.data, config.rl.max_new_tokens))


def _opened(config: Config, folder: Path) -> tuple[Prompts, Prompts]:
    cfg, tokenizer = config.data, open_tokenizer(config.data, folder)
    corpus, found = record_corpus(cfg), Findings()
    splits: tuple[list[Any], list[Any]] = ([], [])
    for count, (_, place, line) in enumerate(corpus.lines(), 1):
        try:
            parts = parts_of(line, cfg.records, place, found, corpus.template)
        except ValueError as error:
            raise ValueError(f"data: {place}: {error}") from None
        tokens, counted = encoded(parts, tokenizer)
        start = 1 + answer_of(counted)  # with the marker
        _check_length(config, place, start)
        own = np.concatenate([[tokenizer.end], tokens[: start - 1]]).astype(np.int64)
        fields = _fields(line, config, tokens[start - 1 :], tokenizer)
        splits[count % cfg.heldout_every == 0].append((own, text_of(tokenizer, own[1:]), fields))
    train, heldout = map(_gathered, splits)
    if not len(heldout) or not len(train):
        raise ValueError(
            f"data: {len(train) + len(heldout)} records are fewer than "
            f"data.heldout_every={cfg.heldout_every}, so no prompt would be held out: use more "
            "records or a smaller data.heldout_every"
        )
    return train, heldout


def text_of(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Return the text of tokens up to the first end marker."""
    ends = np.flatnonzero(tokens == tokenizer.end)
    return tokenizer.decode(tokens[: ends[0] if len(ends) else None].tolist())


def _check_length(config: Config, place: str, prompt: int) -> None:
    most, length = config.rl.max_new_tokens, config.data.seq_len
    if prompt + most > length:
        raise ValueError(
            f"data: {place}: a prompt of {prompt} tokens and rl.max_new_tokens={most} do not fit "
            f"data.seq_len={length}: raise data.seq_len to {prompt + most}, or shorten the prompt"
        )


def _fields(
    line: bytes, config: Config, answer: np.ndarray, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the record's fields without its prompt; `completion` is the answer in any case."""
    fields = config.data.records
    record = {k: v for k, v in json.loads(line).items() if k not in (fields.prompt, *_OURS)}
    return record | {"completion": record.get(fields.completion) or text_of(tokenizer, answer)}


def _gathered(rows: list[Any]) -> Prompts:
    names = dict.fromkeys(name for *_, fields in rows for name in fields)
    columns = {name: [fields.get(name) for *_, fields in rows] for name in names}
    return Prompts([own for own, *_ in rows], [text for _, text, _ in rows], columns)
