"""Records of JSON-lines files as text to finetune on: what is asked, and what the loss counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zpp_lab.config import DataConfig
from zpp_lab.data.corpus import FileCorpus, text_corpus
from zpp_lab.data_config import RecordConfig

_SUFFIX = ".jsonl"
_TEXTS = ("prompt", "completion")


@dataclass(frozen=True)
class Part:
    """A piece of a record that is encoded on its own. `counted`: a completion's. `marks`: special
    tokens in it are what they say, not text."""

    text: str
    counted: bool
    marks: bool = False


@dataclass(frozen=True)
class RecordCorpus:
    """Lines of JSON in files, in order; one document each. Blank lines are passed over."""

    files: FileCorpus
    fields: RecordConfig

    @property
    def count(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        unused = ("pack", "too_long")  # they decide how tokens are laid out, later
        fields = {k: v for k, v in asdict(self.fields).items() if k not in unused}
        return self.files.identity() | {"fields": fields}

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
                    yield f"{name}:{number}", parts_of(line, self.fields, place)


def record_corpus(cfg: DataConfig) -> RecordCorpus:
    """The file `data.path`, or every *.jsonl below that folder."""
    assert cfg.path is not None, "DataConfig asks for a path"
    path = Path(cfg.path)
    suffix = _SUFFIX if path.expanduser().is_dir() else ""
    return RecordCorpus(text_corpus(path, cfg.max_bytes, suffix), cfg.records)


def parts_of(line: bytes, fields: RecordConfig, place: str) -> list[Part]:
    """The parts of one record; ValueError, with `place`, for one that cannot be used."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"data: {place}: no JSON ({error}); repair or remove the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"data: {place}: {type(record).__name__} is no record; use {{…}}")
    if fields.messages in record:
        parts = _chat(record[fields.messages], fields, place)
    else:
        parts = _completion(record, fields, place)
    if not any(part.counted and not part.marks for part in parts):
        raise ValueError(
            f"data: {place}: the completion is empty, so there is nothing to learn; remove the line"
        )
    if any("\0" in part.text for part in parts):
        raise ValueError(f"data: {place}: a zero byte, so it is no text; repair or remove the line")
    return parts


def _completion(record: dict[str, Any], fields: RecordConfig, place: str) -> list[Part]:
    names = [getattr(fields, kind) for kind in _TEXTS]
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(
            f"data: {place}: no field {' and no '.join(map(repr, missing))}, and no "
            f"{fields.messages!r}; it has {', '.join(map(repr, record)) or 'none'}. Name the "
            "fields with data.records.prompt and data.records.completion, or with "
            "data.records.messages"
        )
    prompt, completion = (_text(record[name], name, place) for name in names)
    return _filled([Part(prompt, counted=False), Part(completion, counted=True)])


def _chat(turns: Any, fields: RecordConfig, place: str) -> list[Part]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"data: {place}: {fields.messages!r} must be a list of messages")
    if not any(isinstance(t, dict) and t.get("role") == "assistant" for t in turns):
        raise ValueError(f"data: {place}: no message of the role 'assistant', so nothing to learn")
    parts: list[Part] = []
    for turn in turns:
        if not isinstance(turn, dict) or not {"role", "content"} <= set(turn):
            raise ValueError(f"data: {place}: a message must have a 'role' and a 'content'")
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


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"data: {place}: {name!r} is {type(value).__name__}, not text")
    return value


def _filled(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.text]
