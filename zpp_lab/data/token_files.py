"""The binary files of prepared tokens, written one after the other and flushed to disk."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zpp_lab.data.tokenizer import Tokenizer, token_dtype


class TokenWriter:
    """Appends documents to one split's token file and remembers where they start."""

    def __init__(self, stream: BinaryIO, tokenizer: Tokenizer) -> None:
        self.stream = stream
        self.end = tokenizer.end
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.offsets = array("q", [0])

    def add(self, tokens: np.ndarray) -> None:
        """One document, tokens [n] without its end marker."""
        closed = np.append(tokens, self.end).astype(self.dtype)
        self.stream.write(closed.data)
        self.offsets.append(self.offsets[-1] + len(closed))

    def close(self, offsets: Path) -> None:
        """Put everything on the disk; int64 offsets go to a file of their own."""
        flush(self.stream)
        write_file(offsets, np.array(self.offsets, "<i8").tobytes())


def write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        flush(stream)


def flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
