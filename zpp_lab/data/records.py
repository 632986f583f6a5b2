"""Records of JSON-lines files, text to finetune on: read, encoded, and written as token files.

A record says what is asked and what is answered. Beside each token stands whether it belongs to a
completion, which alone the loss counts. Files are written one after the other (`TokenWriter`) and
flushed to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zpp_lab.config.data import DataConfig, RecordConfig
from zpp_lab.data.chat import ChatTemplate, chat_template
from zpp_lab.data.corpus import FileCorpus, text_corpus
from zpp_lab.data.tokenizer import Tokenizer, token_dtype

_SUFFIX = ".jsonl"
_TEXTS = ("prompt", "completion")
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Part:
    """A piece of a record that is encoded on its own. `counted`: a completion's. `marks`: special
    tokens in it are what they say, not text. `tokens`: what a chat template has made of it."""

    text: str
    counted: bool
    marks: bool = False
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RecordCorpus:
    """Lines of JSON in files, in order; one document each. Blank lines are passed over."""

    files: FileCorpus
    fields: RecordConfig
    template: ChatTemplate | None = None

    @property
    def count(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        unused = ("pack", "too_long", "template")  # how tokens are laid out; a file's name
        fields = {k: v for k, v in asdict(self.fields).items() if k not in unused}
        source = self.template.source if self.template else None
        return self.files.identity() | {"fields": fields} | ({"chat": source} if source else {})

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """(file:line, the record's whole text): what a BPE learns from."""
        for name, parts in self.records():
            yield name, "".join(part.text for part in parts).encode(errors="replace")

    def records(self) -> Iterator[tuple[str, list[Part]]]:
        """(file:line, parts). ValueError names the file and the line of a record that is none."""
        for file, (name, content) in zip(self.files.files, self.files.documents(), strict=True):
            lines = content.split(b"\n")
            if file.take < file.size:  # cut by data.max_bytes, most likely inside a line
                lines.pop()
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{self.files.root / name}, line {number}"
                    yield f"{name}:{number}", parts_of(line, self.fields, place, self.template)


def record_corpus(cfg: DataConfig) -> RecordCorpus:
    """The file `data.path`, or every *.jsonl below that folder."""
    assert cfg.path is not None, "DataConfig asks for a path"
    path = Path(cfg.path)
    suffix = _SUFFIX if path.expanduser().is_dir() else ""
    files = text_corpus(path, cfg.max_bytes, suffix)
    return RecordCorpus(files, cfg.records, chat_template(cfg))


def parts_of(
    line: bytes, fields: RecordConfig, place: str, template: ChatTemplate | None = None
) -> list[Part]:
    """The parts of one record; ValueError, with `place`, for one that cannot be used."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"data: {place}: invalid JSON ({error}); repair or remove the line"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(
            f"data: {place}: expected an object {{…}}, not "
            f"{type(record).__name__}; repair or remove the line"
        )
    if fields.messages in record:
        turns = record[fields.messages]
        parts = _chat(turns, fields, place)
    else:
        parts = _completion(record, fields, place)
    if not any(part.counted and not part.marks for part in parts):
        raise ValueError(
            f"data: {place}: the completion is empty, so there is nothing to learn; remove the line"
        )
    if any("\0" in part.text for part in parts):
        raise ValueError(
            f"data: {place}: contains a zero byte, so it is not text; repair or remove the line"
        )
    if template is not None and fields.messages in record:
        return _rendered(turns, template, place)
    return parts


def _completion(record: dict[str, Any], fields: RecordConfig, place: str) -> list[Part]:
    names = [getattr(fields, kind) for kind in _TEXTS]
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(
            f"data: {place}: missing field {' and '.join(map(repr, missing))}, and no "
            f"{fields.messages!r}; it has {', '.join(map(repr, record)) or 'none'}. Name the "
            "fields with data.records.prompt and data.records.completion, or with "
            "data.records.messages"
        )
    prompt, completion = (_text(record[name], name, place) for name in names)
    return _filled([Part(prompt, counted=False), Part(completion, counted=True)])


def _chat(turns: Any, fields: RecordConfig, place: str) -> list[Part]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            f"data: {place}: {fields.messages!r}: expected a list of messages; "
            "repair or remove the line"
        )
    if not any(isinstance(t, dict) and t.get("role") == "assistant" for t in turns):
        raise ValueError(
            f"data: {place}: no message of the role 'assistant', so there is "
            "nothing to learn; remove the line"
        )
    parts: list[Part] = []
    for turn in turns:
        if not isinstance(turn, dict) or not {"role", "content"} <= set(turn):
            raise ValueError(
                f"data: {place}: a message needs 'role' and 'content'; repair or remove the line"
            )
        role = _text(turn["role"], "role", place)
        content = _text(turn["content"], "content", place)
        own = role == "assistant"
        if own and not content:
            raise ValueError(
                f"data: {place}: an assistant's content is empty, so there is nothing to learn; "
                "remove the line"
            )
        parts.append(Part(fields.turn_open.replace("{role}", role), counted=False, marks=True))
        parts.append(Part(content, counted=own))
        parts.append(Part(fields.turn_close, counted=own, marks=True))
    return _filled(parts)


def _rendered(turns: Any, template: ChatTemplate, place: str) -> list[Part]:
    try:
        tokens, own = template.tokens(turns)
    except ValueError as error:
        raise ValueError(f"data: {place}: {error}") from None
    if not any(own):
        raise ValueError(
            f"data: {place}: the chat template leaves no assistant text to learn; remove the line"
        )
    whole = groupby(zip(tokens, own, strict=True), key=itemgetter(1))
    return [Part("", counted, tokens=tuple(t for t, _ in some)) for counted, some in whole]


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"data: {place}: {name!r} is {type(value).__name__}, not text; repair "
            "or remove the line"
        )
    return value


def _filled(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.text]


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
            said = [[p.tokens or p.text, p.counted, p.marks] for p in parts]
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

    Parts are encoded one by one, as a prompt is before its completion is known. After a chat
    template the marker counts as the template's own at the end does, which it replaces.
    """
    pieces = [
        tokenizer.encode(p.text.encode(errors="replace"), marks=p.marks)
        if p.tokens is None
        else np.array(p.tokens)
        for p in parts
    ]
    each = [np.full(len(t), p.counted, np.uint8) for p, t in zip(parts, pieces, strict=True)]
    tokens = np.concatenate(pieces).astype(token_dtype(tokenizer.vocab_size))
    counted = np.concatenate(each)
    if parts[-1].tokens is None:
        return tokens, np.append(counted, np.uint8(parts[-1].counted))
    if tokens[-1] == tokenizer.end:
        return tokens[:-1], counted
    return tokens, np.append(counted, np.uint8(0))
