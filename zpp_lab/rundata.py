"""What a run knows of its data, kept beside its checkpoints: whoever starts from them must read
text with the same tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from zpp_lab.config import DataConfig
from zpp_lab.data import PackedData, TokenData
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import END
from zpp_lab.files import write_atomic
from zpp_lab.tracking.jsonl import read_object

FILE = "data.json"


def note_data(folder: Path, cfg: DataConfig, data: TokenData | PackedData) -> None:
    """Write data.json: the data's hash, the tokenizer's identity and its number of tokens. A BPE
    of the run's own is kept beside it, for data.tokenizer=hf to read."""
    said = {"hash": data.hash, "tokenizer": data.tokenizer, "vocab_size": data.vocab_size}
    write_atomic(folder / FILE, json.dumps(said, indent=1) + "\n")
    if cfg.tokenizer == "bpe":
        trained = (data.folder / TOKENIZER).read_text(encoding="utf-8")
        write_atomic(folder / TOKENIZER, trained)
        write_atomic(folder / "tokenizer_config.json", json.dumps({"eos_token": END}) + "\n")


def check_same_data(folder: Path, data: TokenData | PackedData, resumed: bool) -> None:
    """ValueError when the run in `folder` had other tokens before: a corpus changes with the
    machine it is read from."""
    path = folder / FILE
    if not resumed or not path.is_file():
        return
    before = read_object(path)["hash"]
    if before != data.hash:
        raise ValueError(
            f"{folder} was trained on other tokens (data {before[:16]} there, {data.hash[:16]} "
            "now): go on where the same files are, or start over in another folder"
        )


def check_start(start: Path, data: TokenData | PackedData) -> None:
    """ValueError when the run of the checkpoint `start` had another tokenizer than `data`.

    A checkpoint without its run's data.json cannot be checked, which stderr is told.
    """
    file = next((f / FILE for f in (start, *start.parents[:2]) if (f / FILE).is_file()), None)
    if file is None:
        print(f"model.start={start}: no {FILE}, so tokenizers are not compared", file=sys.stderr)
        return
    said = read_object(file)
    if said["tokenizer"] != data.tokenizer:
        raise ValueError(
            f"model.start={start} was trained with another tokenizer ({said['vocab_size']} tokens, "
            f"here {data.vocab_size}): its weights would read noise. Set data.tokenizer as its "
            "config.yaml has it; for a BPE of its own data.tokenizer=hf with "
            "data.tokenizer_path=RUN_FOLDER"
        )


def check_reads(run: Path, data: TokenData | PackedData) -> None:
    """ValueError when the run in `run` had another tokenizer than `data`: a BPE learns from its
    corpus, which may have changed since. A run of an older version, without data.json, is taken."""
    said = _said(run)
    if said and said["tokenizer"] != data.tokenizer:
        raise ValueError(
            f"{run} was trained with another tokenizer ({said['vocab_size']} tokens) than the "
            f"{data.vocab_size} tokens here: its weights would read noise. Evaluate it where its "
            "corpus is as it was"
        )


def warn_of_change(run: Path, data: TokenData | PackedData) -> None:
    """Tell stderr when the corpus of `run` reads as other tokens now."""
    said = _said(run)
    if said and said["hash"] != data.hash:
        print(
            f"{run} was trained on other tokens (data {said['hash'][:16]} there, {data.hash[:16]} "
            "now): the losses are no held-out losses if it saw some of these in training",
            file=sys.stderr,
        )


def vocab_size(run: Path) -> int | None:
    """How many tokens the tokenizer of the run in `run` has; None: it does not say."""
    return _said(run).get("vocab_size")


def _said(run: Path) -> dict[str, Any]:
    path = run / FILE
    return read_object(path) if path.is_file() else {}
