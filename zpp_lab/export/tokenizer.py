"""The run's tokenizer beside its weights, as transformers reads it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from zpp_lab.config import DataConfig
from zpp_lab.data.outside_tokenizer import files_of, open_outside
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import END, library


def write_tokenizer(run: Path, data: DataConfig, folder: Path) -> None:
    """Bytes have no such file; a run without its BPE, of an older version, is named on stderr."""
    if data.tokenizer == "hf":
        for file in files_of(open_outside(data).file):
            shutil.copy(file, folder / file.name)
    elif data.tokenizer == "bpe":
        _write_bpe(run / TOKENIZER, folder)


def closing_token(data: DataConfig) -> int:
    """Of bytes it is 0, and a BPE of ours begins with it."""
    return open_outside(data).end if data.tokenizer == "hf" else 0


def _write_bpe(found: Path, folder: Path) -> None:
    if not found.is_file():
        print(f"the run has no {found}: the export has no tokenizer", file=sys.stderr)
        return
    model = library("data.tokenizer=bpe").Tokenizer.from_file(str(found))
    model.decoder = library("data.tokenizer=bpe").decoders.ByteLevel()
    model.save(str(folder / TOKENIZER))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2) + "\n")
