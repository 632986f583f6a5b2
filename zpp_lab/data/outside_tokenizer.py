"""A tokenizer of Hugging Face, so that pretrained weights see the tokens that they know."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from zpp_lab.config import DataConfig
from zpp_lab.data.tokenizer import LibraryTokenizer, library
from zpp_lab.files import damaged, parse_json, read_text

_FILE = "tokenizer.json"
_AGAIN = "set data.tokenizer_path to a tokenizer's, or save it again"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


class OutsideTokenizer(LibraryTokenizer):
    """What a tokenizer.json says, without the marks that it would put around a text.

    `vocab_size` is the largest token plus one. Text that is not UTF-8 is read with replacement
    characters, and a special token spelt out in a text is text.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        """`path`: a tokenizer.json or its folder; `end`: the token that closes a document, None
        for the one that the files beside it call eos_token. ValueError when it cannot be."""
        self.file = definition_file(path)
        self.definition = read_text(self.file, _AGAIN)
        try:
            self.model = library("data.tokenizer=hf").Tokenizer.from_str(self.definition)
        except ValueError:
            raise
        except Exception as error:  # of its own kind
            raise damaged(self.file, f"no tokenizer: {error}", _AGAIN) from None
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
            what = "no eos_token beside it" if name is None else f"no token {name!r}"
            raise ValueError(
                f"data.tokenizer_path={self.file} has {what}: name the token that closes a "
                "document, 'data.end_token=\"TOKEN\"'"
            )
        return int(number)


def open_outside(cfg: DataConfig) -> OutsideTokenizer:
    assert cfg.tokenizer_path is not None, "DataConfig asks for a path"
    return OutsideTokenizer(Path(cfg.tokenizer_path), cfg.end_token)


def definition_file(path: Path) -> Path:
    """The tokenizer.json that `path`, a file or a folder, means. ValueError when there is none."""
    file = path.expanduser()
    file = file / _FILE if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"data.tokenizer_path={path}: no {_FILE} there; save the tokenizer first "
            "(AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER))"
        )
    return file


def files_of(file: Path) -> list[Path]:
    """The tokenizer.json, and what lies beside it, that transformers reads."""
    beside = [file.parent / name for name in _BESIDE]
    return [file, *(path for path in beside if path.is_file())]


def _end_of(file: Path) -> str | None:
    for path in files_of(file)[1:]:
        said = parse_json(path, _AGAIN)
        token: Any = said.get("eos_token") if isinstance(said, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
