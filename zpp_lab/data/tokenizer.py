"""Text to tokens: raw bytes, a byte-pair encoding of the corpus itself, or one from outside.

One from outside is a tokenizer.json of Hugging Face, so that pretrained weights see the tokens
that they know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zpp_lab.config.data import DataConfig
from zpp_lab.files import damaged, package, parse_json, read_text

_CHUNK = 1 << 20  # bytes that a BPE encodes at once; bounds its memory for one huge document
END = "<|end|>"
_FILE = "tokenizer.json"
_AGAIN = "set data.tokenizer_path to a tokenizer's, or save it again"
TEMPLATE = "chat_template.jinja"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENIZERS = (_FILE, "tokenizer.model", "vocab.json", "spiece.model")  # one of them is there


class Tokenizer(Protocol):
    """Text to tokens and back. `end` is the token that closes a document."""

    vocab_size: int
    end: int

    def encode(self, text: bytes, marks: bool = False) -> np.ndarray:
        """Encode `text` without the end marker, as `token_dtype(vocab_size)` [tokens]. marks:
        special tokens that `text` spells out are those tokens, not text."""

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encode each text, on as many cores as there are."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, end markers included; invalid UTF-8 is replaced. So are tokens
        from `vocab_size` on, which a model with a padded vocabulary samples; an outside tokenizer
        leaves them out."""

    def dumps(self) -> str:
        """Return everything that decides how text is encoded, as text."""

    @property
    def identity(self) -> str:
        """sha256; equal for tokenizers that give a text the same tokens, wherever they lie."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds every token, little-endian."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


class ByteTokenizer:
    """A token is a byte. Text has no zero bytes, so zero ends a document."""

    vocab_size = 256
    end = 0

    def encode(self, text: bytes, marks: bool = False) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        invalid = 0xFF  # in no UTF-8
        return bytes(min(token, invalid) for token in tokens).decode(errors="replace")

    def dumps(self) -> str:
        return "bytes"

    @property
    def identity(self) -> str:
        return hashlib.sha256(b"bytes").hexdigest()


class LibraryTokenizer:
    """Encodes with a model of the tokenizers package."""

    model: Any
    vocab_size: int
    end: int

    def encode(self, text: bytes, marks: bool = False) -> np.ndarray:
        self.model.encode_special_tokens = not marks
        return encode_together(self.model, [text], token_dtype(self.vocab_size))[0]

    def encode_all(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        self.model.encode_special_tokens = True
        return encode_together(self.model, texts, token_dtype(self.vocab_size))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens), skip_special_tokens=False))

    @property
    def identity(self) -> str:
        """sha256 of what turns text into tokens, not of what turns them back."""
        found = json.loads(self.model.to_str())
        used = {key: found[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
        return hashlib.sha256(json.dumps([used, self.end], sort_keys=True).encode()).hexdigest()


class BpeTokenizer(LibraryTokenizer):
    """Byte-level BPE. Text that is not UTF-8 is read with replacement characters."""

    def __init__(self, definition: str) -> None:
        self.model = package("tokenizers", "data.tokenizer=bpe").Tokenizer.from_str(definition)
        self.vocab_size = self.model.get_vocab_size()
        end = self.model.token_to_id(END)
        assert end is not None, "a definition that `train` made"
        self.end = end

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Learn `vocab_size` tokens, the end marker and the 256 bytes among them. ValueError when
        the texts do not hold that many."""
        lib = package("tokenizers", "data.tokenizer=bpe")
        byte_level = lib.pre_tokenizers.ByteLevel
        model = lib.Tokenizer(lib.models.BPE())
        model.pre_tokenizer = byte_level(add_prefix_space=False)
        trainer = lib.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator((p for t in texts for p in chunks(t)), trainer)
        if model.get_vocab_size() != vocab_size:
            raise ValueError(
                f"data.vocab_size={vocab_size}: the training text is too short; use 257 to "
                f"{model.get_vocab_size()}, or more text"
            )
        return cls(model.to_str())

    def decode(self, tokens: Sequence[int]) -> str:
        named = [self.model.id_to_token(token) or "\ufffd" for token in tokens]
        return str(package("tokenizers", "data.tokenizer=bpe").decoders.ByteLevel().decode(named))

    def dumps(self) -> str:
        return self.model.to_str()


def text_bytes(cfg: DataConfig, folder: Path) -> np.ndarray | None:
    """Return the bytes of text that each token stands for, int64 [largest token + 1]; 0 for marks.
    folder: where the tokens were prepared, with a BPE's tokenizer.json. Read without the tokenizers
    package. None for an outside tokenizer that is not byte-level: its tokens alone do not determine
    their bytes."""
    if cfg.tokenizer == "bytes":
        sizes = np.ones(ByteTokenizer.vocab_size, np.int64)
        sizes[ByteTokenizer.end] = 0
        return sizes
    outside = cfg.tokenizer == "hf" and cfg.tokenizer_path is not None
    file = definition_file(Path(str(cfg.tokenizer_path))) if outside else folder / _FILE
    found = parse_json(file, _AGAIN)
    vocabulary = (found.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict) or "ByteLevel" not in _parts(found.get("pre_tokenizer")):
        return None
    added = {entry["id"]: entry for entry in found.get("added_tokens") or []}
    sizes = np.zeros(1 + max([*vocabulary.values(), *added]), np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token)  # a character of a byte-level token is a byte
    for number, entry in added.items():
        sizes[number] = 0 if entry["special"] else len(entry["content"].encode())
    return sizes


def _parts(step: Any) -> set[str]:
    """Return the kinds of a tokenizer.json's step, such as its pre_tokenizer, and of its parts."""
    if not isinstance(step, dict):
        return set()
    inner = [part for key in ("pretokenizers", "decoders") for part in step.get(key) or []]
    return {str(step.get("type"))}.union(*map(_parts, inner))


def encode_together(model: Any, texts: Sequence[bytes], dtype: np.dtype) -> list[np.ndarray]:
    """Encode each text; the library shares the chunks of all texts out to its threads."""
    cut = [list(chunks(text)) for text in texts]
    whole = [chunk for own in cut for chunk in own]
    found = iter(model.encode_batch(whole, add_special_tokens=False))
    return [np.array([t for _ in own for t in next(found).ids], dtype) for own in cut]


def chunks(text: bytes) -> Iterator[str]:
    """Yield `text` cut after line ends into parts of at most about `_CHUNK` bytes."""
    start = 0
    while start < len(text):
        stop = start + _CHUNK
        if stop < len(text):
            line = text.rfind(b"\n", start, stop) + 1
            stop = line if line > start else after_character(text, stop)
        yield text[start:stop].decode(errors="replace")
        start = stop


def after_character(text: bytes, position: int) -> int:
    """Return `position`, or the next place in UTF-8 `text` that lies between two characters."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position


class OutsideTokenizer(LibraryTokenizer):
    """A tokenizer.json, without the marks that it would put around a text. `vocab_size` is the
    largest token plus one. Text that is not UTF-8 is read with replacement characters, and a
    special token spelt out in a text is text."""

    def __init__(self, path: Path, end: str | None = None) -> None:
        """Open `path`, a tokenizer.json or its folder. `end`: the token that closes a document,
        None for the eos_token of the files next to it. ValueError when it is invalid."""
        self.file = definition_file(path)
        self.definition = read_text(self.file, _AGAIN)
        library = package("tokenizers", "data.tokenizer=hf")
        try:
            self.model = library.Tokenizer.from_str(self.definition)
        except Exception as error:  # of its own kind
            raise damaged(self.file, f"not a tokenizer: {error}", _AGAIN) from None
        self.model.no_truncation()
        self.model.no_padding()
        self.vocab_size = 1 + max(self.model.get_vocab(with_added_tokens=True).values())
        self.end = self._token(end or _end_of(self.file))

    def dumps(self) -> str:
        return f"{self.definition}\n{self.end}"

    @property
    def hash(self) -> str:
        """sha256 of all that decides how text is encoded."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()

    def _token(self, name: str | None) -> int:
        number = None if name is None else self.model.token_to_id(name)
        if number is None:
            what = "no eos_token next to it" if name is None else f"no token {name!r}"
            raise ValueError(
                f"data.tokenizer_path={self.file} has {what}: set the token that ends a document, "
                "'data.end_token=\"TOKEN\"'"
            )
        return int(number)


def open_outside(cfg: DataConfig) -> OutsideTokenizer:
    assert cfg.tokenizer_path is not None, "DataConfig asks for a path"
    return OutsideTokenizer(Path(cfg.tokenizer_path), cfg.end_token)


def definition_file(path: Path) -> Path:
    """Return the tokenizer.json at `path`, a file or a folder; ValueError without one."""
    file = path.expanduser()
    file = file / _FILE if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"data.tokenizer_path={path}: {_FILE} not found; save the tokenizer first "
            "(AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER))"
        )
    return file


def check_folder(path: Path, own: Path | None, fix: str) -> None:
    """ValueError where the model folder `path` has another tokenizer than the tokenizer.json `own`;
    None: bytes. Of a folder without a tokenizer nothing is known."""
    there = [name for name in _TOKENIZERS if (path / name).is_file()]
    if there and own is None:
        raise ValueError(
            f"{path} has a tokenizer of its own ({there[0]}), but bytes are read: {fix}"
        )
    if own is None or _FILE not in there or not own.is_file():
        return
    if not _vocabulary(own).items() <= _vocabulary(path / _FILE).items():
        raise ValueError(f"{path} has another tokenizer than {own}: {fix}")


def _vocabulary(file: Path) -> dict[str, int]:
    tokenizers = package("tokenizers", f"{file.parent}, with a tokenizer,")
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # of its own kind
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    return found


def files_of(file: Path) -> list[Path]:
    """Return the tokenizer.json, and the files next to it that transformers reads."""
    others = [file.parent / name for name in (*_SETTINGS, TEMPLATE)]
    return [file, *(path for path in others if path.is_file())]


def _end_of(file: Path) -> str | None:
    for path in (file.parent / name for name in _SETTINGS):
        found = parse_json(path, _AGAIN) if path.is_file() else {}
        token: Any = found.get("eos_token") if isinstance(found, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
