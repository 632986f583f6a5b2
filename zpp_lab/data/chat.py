"""Chats through a tokenizer's own template: the tokens that transformers gives, and whose they are.

A template that marks the assistant's text (`{% generation %}`) is believed. Of any other an
assistant's turn is what it adds to the turns before it, with the header that asks for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from zpp_lab.config.data import DataConfig
from zpp_lab.data.tokenizer import TEMPLATE, definition_file
from zpp_lab.files import missing, parse_json, read_text

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = "26 Jul 2024"  # of templates that write today's unless they are told one: their own default
_OWN = "data.records.template=FILE.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """`file`: the tokenizer.json; `source`: Jinja, None where the tokenizer has none."""

    file: Path
    source: str | None

    def tokens(self, turns: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is the assistant's). ValueError for what the template refuses."""
        if self.source is None:
            raise ValueError(
                f"{self.file.parent} has no chat template: set one, {_OWN}, or "
                "data.records.template=turns for data.records.turn_open and turn_close"
            )
        if "strftime_now" in self.source and "date_string" not in self.source:
            raise ValueError(
                "the chat template inserts today's date, so a run would not repeat: set one "
                f"without a date, {_OWN}"
            )
        if _MARKED.search(self.source):
            found = self._apply(turns, return_dict=True, return_assistant_tokens_mask=True)
            return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]
        whole = self._apply(turns)["input_ids"]
        own = [False] * len(whole)
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant":
                start = self._until(whole, turns[:i], asking=True)
                stop = self._until(whole, turns[: i + 1], asking=False)
                own[start:stop] = [True] * (stop - start)
        return whole, own

    def _until(self, whole: list[int], turns: Sequence[dict[str, Any]], asking: bool) -> int:
        """How many of the first tokens of `whole` are those of `turns`; `asking`: with the header
        of an answer. Where text goes on, the last token may take some of it up."""
        if not turns:
            raise ValueError(
                "the first turn is the assistant's, and the chat template does not show where "
                "its header ends: begin with another role, or set a template that marks the "
                f"assistant's text with {{% generation %}}, {_OWN}"
            )
        part = self._apply(turns, add_generation_prompt=asking)["input_ids"]
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, part, whole)))
        if same < len(part) - 1:
            raise ValueError(
                "the chat template changes earlier turns when later ones follow, so the "
                "assistant's text cannot be located: set one that marks it with {% generation "
                f"%}}, {_OWN}"
            )
        return same

    def _apply(self, turns: Sequence[dict[str, Any]], **how: Any) -> Any:
        from jinja2 import TemplateError  # transformers' own needs it too

        try:
            return self._tokenizer.apply_chat_template(
                list(turns),
                chat_template=self.source,
                **{"date_string": _DATE, "return_dict": True} | how,
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template failed: {error}; repair or remove the line"
            ) from None

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            import jinja2  # noqa: F401
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ValueError(
                f"chat templates need the package {error.name}: pip install 'zpp_lab[hf]'"
            ) from None
        # not AutoTokenizer: some classes make another tokenizer than tokenizer.json says
        found = PreTrainedTokenizerFast.from_pretrained(
            self.file.parent, tokenizer_file=str(self.file)
        )
        found.backend_tokenizer.no_truncation()
        return found


def chat_template(cfg: DataConfig) -> ChatTemplate | None:
    """The template by which `cfg` encodes chats; None: marks around turns do."""
    if cfg.records.marks_turns or cfg.tokenizer_path is None:
        return None
    file = definition_file(Path(cfg.tokenizer_path))
    if cfg.records.template is None:
        return ChatTemplate(file, _own(file.parent))
    path = Path(cfg.records.template).expanduser()
    if not path.is_file():
        there = missing(path, "file")
        raise ValueError(f"data.records.template={path}: {there}; give a Jinja file")
    return ChatTemplate(file, read_text(path, "name another"))


def _own(folder: Path) -> str | None:
    """What transformers calls the default one; newer tokenizers keep it in a file of its own."""
    again = "save the tokenizer again"
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE, again)
    beside = folder / "tokenizer_config.json"
    said = parse_json(beside, again) if beside.is_file() else {}
    found: Any = said.get("chat_template") if isinstance(said, dict) else None
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None
