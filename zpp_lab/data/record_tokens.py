"""Records as token files: beside each token, whether it belongs to a completion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from zpp_lab.config import DataConfig
from zpp_lab.data.records import Part, RecordCorpus
from zpp_lab.data.token_files import TokenWriter, flush
from zpp_lab.data.tokenizer import Tokenizer, token_dtype

SPLITS = ("train", "heldout")


def encode_records(
    corpus: RecordCorpus, cfg: DataConfig, tokenizer: Tokenizer, work: Path
) -> dict[str, Any]:
    """Write SPLIT.bin, SPLIT.offsets.bin and SPLIT.mask.bin (uint8 [tokens], 1: counted).

    Every n-th record is held out. A record's end marker belongs to its last part. Returns the
    meta; ValueError for fewer records than n, and for one that cannot be used.
    """
    digest = hashlib.sha256(f"{tokenizer.dumps()}\n{cfg.heldout_every}\n".encode())
    with ExitStack() as stack:
        writers, masks = {}, {}
        for split in SPLITS:
            stream = stack.enter_context(open(work / f"{split}.bin", "wb"))
            writers[split] = TokenWriter(stream, tokenizer)
            masks[split] = stack.enter_context(open(work / f"{split}.mask.bin", "wb"))
        count = 0
        for name, parts in corpus.records():
            count += 1
            split = "train" if count % cfg.heldout_every else "heldout"
            tokens, counted = encoded(parts, tokenizer)
            said = [[p.text, p.counted, p.marks] for p in parts]
            digest.update(json.dumps([name, split, said]).encode())
            writers[split].add(tokens)
            masks[split].write(counted.data)
        for split in SPLITS:
            flush(masks[split])
            writers[split].close(work / f"{split}.offsets.bin")
    if count < cfg.heldout_every:
        raise ValueError(
            f"data: {count} records are fewer than data.heldout_every={cfg.heldout_every}, so none "
            "would be held out: use more records or a smaller data.heldout_every"
        )
    return {
        "hash": digest.hexdigest(),
        "files": len(corpus.files.files),
        "tokens": {split: writers[split].offsets[-1] for split in SPLITS},
    }


def encoded(parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n], counted uint8 [n + 1]): the end marker, which the writer adds, has a mark too.

    Parts are encoded one by one, as a prompt is before its completion is known.
    """
    pieces = [tokenizer.encode(p.text.encode(errors="replace"), marks=p.marks) for p in parts]
    counted = [np.full(len(t), p.counted, np.uint8) for p, t in zip(parts, pieces, strict=True)]
    tokens = np.concatenate(pieces).astype(token_dtype(tokenizer.vocab_size))
    return tokens, np.append(np.concatenate(counted), np.uint8(parts[-1].counted))
