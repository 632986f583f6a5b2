"""Records of JSON-lines files, text to finetune on: read, encoded, and written as token files.

A mask says which tokens belong to a completion, which alone the loss counts. Fields that nothing
reads are listed once. Files are written one after the other (`TokenWriter`) and flushed to disk.
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

from zpp_lab.config.data import TASKS, DataConfig, RecordConfig
from zpp_lab.data.chat import (
    ChatTemplate,
    Findings,
    Turn,
    chat_template,
    check_plain,
    counts,
    extras,
    tools_of,
)
from zpp_lab.data.corpus import FileCorpus, text_corpus
from zpp_lab.data.tasks import task_files
from zpp_lab.data.tokenizer import Tokenizer, token_dtype
from zpp_lab.files import named_once

_FIX = "repair or remove the line"
_NOTHING = "so there is nothing to learn; remove the line"
_TEXTS = ("prompt", "completion")
_READING = 2  # raise it when a record's tokens or marks change, so that they are made again
SPLITS = ("train", "heldout")
Record = dict[str, Any]  # as JSON has it


@dataclass(frozen=True)
class Part:
    """A part of a record that is encoded on its own. `counted`: a completion's. `marks`: special
    tokens in it are those tokens, not text. `tokens`: a chat template's result."""

    text: str
    counted: bool
    marks: bool = False
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RecordCorpus:
    """Lines of JSON in files, in order; one document each. Blank lines are skipped."""

    files: FileCorpus
    fields: RecordConfig
    template: ChatTemplate | None = None
    pairs: bool = False  # a line is two documents: the prompt with either completion

    @property
    def count(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        unused = ["pack", "too_long", "template"]  # how tokens are laid out; a file's name
        unused += [] if self.pairs else ["chosen", "rejected"]
        fields = {k: v for k, v in asdict(self.fields).items() if k not in unused}
        source = self.template.source if self.template else None
        own = {"fields": fields, "reading": _READING}
        more = ({"chat": source} if source else {}) | ({"pairs": True} if self.pairs else {})
        return self.files.identity() | own | more

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Yield (file:line, the record's whole text): what a BPE learns from."""
        for name, parts in self.records():
            yield name, "".join(part.text for part in parts).encode(errors="replace")

    def records(self, found: Findings | None = None) -> Iterator[tuple[str, list[Part]]]:
        """Yield (file:line, parts); ValueError names both. `found` collects notes for users."""
        found = found or Findings()
        for name, place, line in self.lines():
            given = (line, self.fields, place, found, self.template)
            try:
                each = pair_of(*given) if self.pairs else (parts_of(*given),)
            except ValueError as error:
                raise ValueError(f"data: {place}: {error}") from None
            yield from ((name, parts) for parts in each)

    def lines(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield (file:line, the place for messages, its content) of each record."""
        for file, (name, content) in zip(self.files.files, self.files.documents(), strict=True):
            lines = content.split(b"\n")
            if file.take < file.size:  # cut by data.max_bytes, most likely inside a line
                lines.pop()
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{name}:{number}", f"{self.files.root / name}, line {number}", line


def record_corpus(cfg: DataConfig) -> RecordCorpus:
    """Open the file `data.path`, every *.jsonl below that folder, or a made task."""
    if cfg.name in TASKS:
        return RecordCorpus(task_files(cfg), cfg.records, pairs=cfg.pairs)
    assert cfg.path is not None, "DataConfig asks for a path"
    path = Path(cfg.path)
    files = text_corpus(path, cfg.max_bytes, ".jsonl" if path.expanduser().is_dir() else "")
    return RecordCorpus(files, cfg.records, chat_template(cfg), cfg.pairs)


def parts_of(
    line: bytes, fields: RecordConfig, place: str, found: Findings, template: ChatTemplate | None
) -> list[Part]:
    """Return the parts of one record; ValueError for one that cannot be used."""
    return _parts(_whole(line, place, found), fields, place, found, template)


def pair_of(
    line: bytes, fields: RecordConfig, place: str, found: Findings, template: ChatTemplate | None
) -> tuple[list[Part], list[Part]]:
    """Return the parts of a pair's chosen and rejected text, as finetuning on either would read it.
    ValueError for a pair that cannot be used."""
    record, names = _whole(line, place, found), (fields.chosen, fields.rejected)
    if missing := [name for name in names if name not in record]:
        raise ValueError(
            f"missing field {' and '.join(map(repr, missing))} of a pair (data.pairs); it has "
            f"{', '.join(map(repr, record)) or 'none'}. Set data.records.chosen and "
            "data.records.rejected"
        )
    chosen, rejected = (record.pop(name) for name in names)
    if chosen == rejected:
        raise ValueError(f"{names[0]!r} and {names[1]!r} are equal, {_NOTHING}")
    each = (_with_completion(record, fields, completion) for completion in (chosen, rejected))
    first, second = (_parts(own, fields, place, found, template) for own in each)
    return first, second


def _with_completion(record: Record, fields: RecordConfig, completion: Any) -> Record:
    """Return a pair's record with one of its completions: a text after the prompt, or messages.
    Messages that begin with an assistant's follow the prompt, others are the whole chat."""
    rest = {name: value for name, value in record.items() if name != fields.messages}
    if not isinstance(completion, list):
        return rest | {fields.completion: completion}
    before = rest.pop(fields.prompt, [])
    if isinstance(before, str):
        before = [{"role": "user", "content": before}]
    first = completion[0] if completion else None
    follows = isinstance(first, dict) and first.get("role") == "assistant"
    return rest | {fields.messages: [*before, *completion] if follows else completion}


def _whole(line: bytes, place: str, found: Findings) -> Record:
    try:
        record = json.loads(line, object_pairs_hook=named_once)
    except ValueError as error:
        raise ValueError(f"invalid JSON ({error}); {_FIX}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object {{…}}, not {type(record).__name__}; {_FIX}")
    whole = _unicode(record) if b"\\u" in line or b"\xed" in line else record
    if whole != record:
        found.count("have lone surrogates (\\ud800 to \\udfff), read as '?'", place)
    return dict(whole)


def _parts(
    whole: Record, fields: RecordConfig, place: str, found: Findings, template: ChatTemplate | None
) -> list[Part]:
    if fields.messages in whole:
        parts = _chat(whole, fields, place, found, template)
    else:
        parts = _completion(whole, fields, place, found)
    if not any(part.counted and not part.marks for part in parts):
        raise ValueError(f"the completion is empty, {_NOTHING}")
    return parts


def _unicode(value: Any) -> Any:
    """Return `value` with ? in place of each lone surrogate, which UTF-8 does not have."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_unicode(one) for one in value]
    if isinstance(value, dict):
        return {_unicode(key): _unicode(one) for key, one in value.items()}
    return value


def _completion(record: Record, fields: RecordConfig, place: str, found: Findings) -> list[Part]:
    names = [getattr(fields, kind) for kind in _TEXTS]
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(
            f"missing field {' and '.join(map(repr, missing))}, and no {fields.messages!r}; it has "
            f"{', '.join(map(repr, record)) or 'none'}. Set data.records.prompt and "
            "data.records.completion, or data.records.messages"
        )
    prompt, completion = (_text(record[name], name) for name in names)
    found.leave([name for name in record if name not in names], place)
    return _filled([Part(prompt, counted=False), Part(completion, counted=True)])


def _chat(
    record: Record, fields: RecordConfig, place: str, found: Findings, template: ChatTemplate | None
) -> list[Part]:
    turns = record[fields.messages]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{fields.messages!r}: expected a list of messages; {_FIX}")
    if not any(isinstance(t, dict) and t.get("role") == "assistant" for t in turns):
        raise ValueError(f"no message of the role 'assistant', {_NOTHING}")
    for turn in turns:
        _check_turn(turn)
    if not any(map(counts, turns)):
        raise ValueError(f"none of the assistant's messages counts, {_NOTHING}")
    tools = tools_of(record)
    if template is None:
        check_plain(turns, tools)
        unread = [key for turn in turns for key in extras(turn)]
        parts = _with_marks(turns, fields)
    else:
        turns = template.given(turns, tools)
        unread = template.check(turns, tools, place, found)
        parts = _rendered(turns, tools, template)
    read = {key for turn in turns for key in extras(turn)} - {*unread}
    found.read.update(f"{fields.messages}.{key}" for key in read)
    found.leave([name for name in record if name not in (fields.messages, "tools")], place)
    found.leave([f"{fields.messages}.{key}" for key in unread], place)
    return parts


def _check_turn(turn: Any) -> None:
    """ValueError for a message without a role, or without text and anything in its place."""
    if not isinstance(turn, dict) or "role" not in turn:
        raise ValueError(f"a message needs 'role'; {_FIX}")
    own = _text(turn["role"], "role") == "assistant"
    if own and extras(turn) and turn.get("content") is None:
        return  # it calls a tool
    if "content" not in turn:
        raise ValueError(f"a message needs 'content'; {_FIX}")
    content = _text(turn["content"], "content")
    if own and not content and not extras(turn):
        raise ValueError(f"an assistant's content is empty, {_NOTHING}")


def _with_marks(turns: Sequence[Turn], fields: RecordConfig) -> list[Part]:
    parts: list[Part] = []
    for turn in turns:
        role, content, on = turn["role"], turn.get("content"), counts(turn)
        if not content and role == "assistant":
            raise ValueError(
                f"an assistant's content is empty, and {extras(turn)[0]!r} is not read, {_NOTHING}"
            )
        parts.append(Part(fields.turn_open.replace("{role}", role), counted=False, marks=True))
        parts.append(Part(content or "", counted=on))
        parts.append(Part(fields.turn_close, counted=on, marks=True))
    return _filled(parts)


def _rendered(turns: Sequence[Turn], tools: list[Any] | None, template: ChatTemplate) -> list[Part]:
    tokens, own = template.tokens(turns, tools)
    if not any(own):
        raise ValueError("the chat template leaves no assistant text to learn; remove the line")
    whole = groupby(zip(tokens, own, strict=True), key=itemgetter(1))
    return [Part("", counted, tokens=tuple(t for t, _ in some)) for counted, some in whole]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, not text; {_FIX}")
    if "\0" in value:
        raise ValueError(f"{name!r} contains a zero byte, so it is not text; {_FIX}")
    return value


def _filled(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.text]


class TokenWriter:
    """Appends documents to one split's token file and records where they start."""

    def __init__(self, stream: BinaryIO, tokenizer: Tokenizer) -> None:
        self.stream = stream
        self.end = tokenizer.end
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.offsets = array("q", [0])

    def add(self, tokens: np.ndarray) -> None:
        """Write one document, tokens [n] without its end marker."""
        closed = np.append(tokens, self.end).astype(self.dtype)
        self.stream.write(closed.data)
        self.offsets.append(self.offsets[-1] + len(closed))

    def close(self, offsets: Path) -> None:
        """Flush everything to the disk; int64 offsets go to a file of their own."""
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
    """Write SPLIT.bin, SPLIT.offsets.bin and SPLIT.mask.bin (uint8 [tokens], 1: counted). Every
    n-th record is held out. A record's end marker belongs to its last part; of a pair's texts it
    alone counts, and its place is where they are scored. Returns the meta; ValueError for fewer
    records than n, and for one that cannot be used."""
    digest = hashlib.sha256(f"{tokenizer.dumps()}\n{cfg.heldout_every}\n".encode())
    found = Findings()
    with ExitStack() as stack:
        writers, masks = {}, {}
        for split in SPLITS:
            stream = stack.enter_context(open(work / f"{split}.bin", "wb"))
            writers[split] = TokenWriter(stream, tokenizer)
            masks[split] = stack.enter_context(open(work / f"{split}.mask.bin", "wb"))
        count = 0
        for i, (name, parts) in enumerate(corpus.records(found)):
            count = 1 + i // (1 + corpus.pairs)
            split = "train" if count % cfg.heldout_every else "heldout"
            tokens, counted = encoded(parts, tokenizer)
            if corpus.pairs:
                tokens = _generated(tokens, counted, tokenizer.end)
                counted = np.zeros(len(tokens) + 1, np.uint8)
                counted[-1] = 1
            given = [[p.tokens or p.text, p.counted, p.marks] for p in parts]
            digest.update(json.dumps([name, split, given]).encode())
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
        "notes": found.notes(),
        "tokens": {split: writers[split].offsets[-1] for split in SPLITS},
    }


def _generated(tokens: np.ndarray, counted: np.ndarray, end: int) -> np.ndarray:
    """Return a text as a policy that generates its last answer would leave it, without the end
    marker and what a chat template has behind it."""
    start = answer_of(counted)
    ends = start + np.flatnonzero(tokens[start:] == end)
    return tokens[: ends[0]] if len(ends) else tokens


def answer_of(counted: np.ndarray) -> int:
    """Return where the last answer begins."""
    return int(np.flatnonzero(np.diff(counted, prepend=0) == 1)[-1])


def encoded(parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [n], counted uint8 [n + 1]): the end marker, which the writer adds, has a mark
    too. Parts are encoded one by one, as a prompt is before its completion is known. After a chat
    template the marker counts as the template's own final token does, which it replaces."""
    each_tokens = [
        tokenizer.encode(p.text.encode(errors="replace"), marks=p.marks)
        if p.tokens is None
        else np.array(p.tokens)
        for p in parts
    ]
    each = [np.full(len(t), p.counted, np.uint8) for p, t in zip(parts, each_tokens, strict=True)]
    tokens = np.concatenate(each_tokens).astype(token_dtype(tokenizer.vocab_size))
    counted = np.concatenate(each)
    if parts[-1].tokens is None:
        return tokens, np.append(counted, np.uint8(parts[-1].counted))
    if tokens[-1] == tokenizer.end:
        return tokens[:-1], counted
    return tokens, np.append(counted, np.uint8(0))
