"""Token files: made once, whole or not at all, and recognised when damaged.

    cache_dir/<key>/
      train.bin, heldout.bin                   tokens: uint8, uint16 or uint32, little-endian
      train.offsets.bin, heldout.offsets.bin   int64: where each document starts, then the end
      train.mask.bin, heldout.mask.bin         of records, uint8: 1 where a token is a completion's
      tokenizer.json                           of a BPE
      meta.json                                counts, the data's hash, a checksum of each file

Every document ends with the tokenizer's end marker. The folder is written under
another name, flushed to disk and renamed: it exists only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock

from zpp_lab.config.data import DataConfig
from zpp_lab.data.corpus import Corpus, HubCorpus, installation_corpus, stdlib_corpus, text_corpus
from zpp_lab.data.records import (
    RecordCorpus,
    TokenWriter,
    encode_records,
    record_corpus,
    write_file,
)
from zpp_lab.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    after_character,
    open_outside,
)
from zpp_lab.files import is_full, sync_folder

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
Part = tuple[str, Split, bytes]  # a document's name, its split, and its text there

TOKENIZER = "tokenizer.json"  # the file of a BPE of our own
_FORMAT = 2  # raise it when the files change, so that older ones are made again
_CHUNK = 1 << 20
_CHUNKS = 64
_TOGETHER = 16 << 20  # bytes of text that are encoded at once


def open_corpus(cfg: DataConfig) -> Corpus:
    """Open the corpus that `cfg` names; ValueError when there is none or it is empty."""
    if cfg.name == "stdlib":
        return stdlib_corpus(cfg.max_bytes)
    if cfg.name == "installation":
        extra = Path(cfg.path) if cfg.path else None
        return installation_corpus(extra, cfg.max_bytes, tuple(cfg.suffixes))
    if cfg.has_records:
        return record_corpus(cfg)
    assert cfg.path is not None, "DataConfig asks for a path"
    if cfg.name == "text":
        return text_corpus(Path(cfg.path), cfg.max_bytes)
    return HubCorpus(cfg.path, cfg.subset, cfg.split, cfg.column, cfg.max_bytes)


def prepared(corpus: Corpus, cfg: DataConfig) -> tuple[Path, dict[str, Any]]:
    """Return the folder with the tokens of `corpus` and its meta; made if missing or damaged.
    Several processes may ask at once: one prepares, the others wait for it. Raises ValueError for
    text that cannot be used, OSError when writing fails."""
    folder = Path(cfg.cache_dir) / _key(corpus, cfg)
    meta = _read_meta(folder)
    if meta is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.parent / f".{folder.name}.lock"):
                meta = _read_meta(folder) or _build(corpus, cfg, folder)
        except OSError as error:
            space = "free some space there, or " if is_full(error) else ""
            raise OSError(
                error.errno,
                f"cannot write token files to {folder.parent.absolute()}: "
                f"{error.strerror or error}; {space}set data.cache_dir to another folder",
            ) from error
    return folder, meta


def _key(corpus: Corpus, cfg: DataConfig) -> str:
    vocab_size = cfg.vocab_size if cfg.tokenizer == "bpe" else 256
    parts: list[Any] = [_FORMAT, cfg.name, cfg.tokenizer, vocab_size, cfg.heldout_every]
    parts.append(corpus.identity())
    if cfg.tokenizer == "hf":  # by what it says, wherever it lies
        parts.append(open_outside(cfg).hash)
    if cfg.tokenizer == "bpe" and cfg.bpe_every > 1:
        parts.append(cfg.bpe_every)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{cfg.name}-{cfg.tokenizer}-{digest[:16]}"


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta of a whole folder; None when it is missing, cut short or altered."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        sums = {name: _checksum(folder / name) for name in meta["checksums"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if sums == meta["checksums"] else None


def _checksum(path: Path) -> str:
    """Return sha256 over the size and up to 64 evenly spread MiB: huge files open quickly."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as stream:
        for i in range(_CHUNKS):
            if size > _CHUNK * _CHUNKS:
                stream.seek((size - _CHUNK) * i // (_CHUNKS - 1))
            digest.update(stream.read(_CHUNK))
    return digest.hexdigest()


def _build(corpus: Corpus, cfg: DataConfig, folder: Path) -> dict[str, Any]:
    """Write everything next to `folder`, then rename it. The caller holds the lock."""
    work = folder.parent / f".{folder.name}.tmp"
    if work.exists():  # of a process that was killed
        shutil.rmtree(work)
    work.mkdir()
    try:
        meta = _write(corpus, cfg, work)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
        os.rename(work, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return meta


def _write(corpus: Corpus, cfg: DataConfig, work: Path) -> dict[str, Any]:
    tokenizer = _tokenizer(corpus, cfg)
    encode = encode_records if isinstance(corpus, RecordCorpus) else _encode
    meta = encode(corpus, cfg, tokenizer, work)  # type: ignore[arg-type]
    meta |= {"vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    meta["tokenizer"] = tokenizer.identity
    if cfg.tokenizer == "bpe":
        write_file(work / TOKENIZER, tokenizer.dumps().encode())
    meta["checksums"] = {path.name: _checksum(path) for path in sorted(work.iterdir())}
    write_file(work / "meta.json", json.dumps(meta, indent=1).encode())
    sync_folder(work)
    return meta


def open_tokenizer(cfg: DataConfig, folder: Path) -> Tokenizer:
    """Open the tokenizer that encoded the token files in `folder`."""
    if cfg.tokenizer == "bpe":
        return BpeTokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
    return open_outside(cfg) if cfg.tokenizer == "hf" else ByteTokenizer()


def _tokenizer(corpus: Corpus, cfg: DataConfig) -> Tokenizer:
    if cfg.tokenizer != "bpe":
        return open_tokenizer(cfg, Path())
    texts = (text for _, split, text in parts(corpus, cfg) if split == "train")
    return BpeTokenizer.train(islice(texts, 0, None, cfg.bpe_every), cfg.vocab_size)


def parts(corpus: Corpus, cfg: DataConfig) -> Iterator[Part]:
    """Yield (name, split, text) in the order of the token files: every n-th document is held out.
    With fewer than n documents the last n-th of each one's bytes is held out instead."""
    n = cfg.heldout_every
    for index, (name, text) in enumerate(corpus.documents()):
        if corpus.count is None or corpus.count >= n:
            yield name, "heldout" if index % n == n - 1 else "train", text
        else:
            cut = after_character(text, len(text) - len(text) // n)
            yield name, "train", text[:cut]
            if text[cut:]:
                yield name, "heldout", text[cut:]


def _encode(corpus: Corpus, cfg: DataConfig, tokenizer: Tokenizer, work: Path) -> dict[str, Any]:
    digest = hashlib.sha256(f"{tokenizer.dumps()}\n{cfg.heldout_every}\n".encode())
    files, last = 0, ""
    with open(work / "train.bin", "wb") as train, open(work / "heldout.bin", "wb") as heldout:
        writers = {"train": TokenWriter(train, tokenizer)}
        writers["heldout"] = TokenWriter(heldout, tokenizer)
        for group in _groups(parts(corpus, cfg)):
            encoded = tokenizer.encode_all([text for _, _, text in group])
            for (name, split, text), tokens in zip(group, encoded, strict=True):
                digest.update(json.dumps([name, split, len(text)]).encode() + text)
                writers[split].add(tokens)
                files, last = files + (name != last), name
        for kind, writer in writers.items():
            writer.close(work / f"{kind}.offsets.bin")
    return {
        "hash": digest.hexdigest(),
        "files": files,
        "tokens": {kind: writer.offsets[-1] for kind, writer in writers.items()},
    }


def _groups(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Group the parts in order, some MiB of text at a time: enough for every core."""
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part[2])
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group
