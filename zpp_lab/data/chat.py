"""Chats through a tokenizer's own template: transformers' tokens, and which the loss counts.

A template that marks the assistant's text (`{% generation %}`) is followed. With any other an
assistant's turn is what it adds to the turns before it, less the header that asks for an answer.

Other fields of a record are rendered, refused by name, or listed once as left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from zpp_lab.config.data import DataConfig
from zpp_lab.data.tokenizer import TEMPLATE, definition_file
from zpp_lab.files import missing, package, parse_json, read_text

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = "26 Jul 2024"  # default of templates that write today's unless one is given
_OWN = "data.records.template=FILE.jinja"
_SWITCHES = ("weight", "train", "training", "loss", "loss_mask")  # OpenAI, axolotl, ms-swift, verl
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_KNOWN = {"role", "content", *_SWITCHES}
_NAMED = 20  # fields in one note
_BROKEN = (TypeError, ValueError, AttributeError, LookupError)  # by values a template cannot take

Turn = dict[str, Any]


@dataclass
class Findings:
    """Notes on how records were read. `unread`: fields and where each came first; `read`: fields
    that a template has rendered; `counts`: a remark → (records, first place)."""

    unread: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def leave(self, names: Iterable[str], place: str) -> None:
        for name in names:
            self.unread.setdefault(name, place)

    def count(self, remark: str, place: str) -> None:
        number, first = self.counts.get(remark, (0, place))
        self.counts[remark] = (number + 1, first)

    def notes(self) -> list[str]:
        notes = [f"data: {n} records {what} (first: {at})" for what, (n, at) in self.counts.items()]
        names = [name for name in self.unread if name not in self.read]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = ", ".join(map(repr, names[:_NAMED]))
            first = self.unread[names[0]]  # what the text leaves out, rewards get
            notes.append(f"data: fields left out of the text: {listed}{more} (first: {first})")
        return notes


def counts(turn: Turn) -> bool:
    """Return whether the loss counts `turn`: an assistant's that no switch of its own turns off."""
    own = turn["role"] == "assistant"
    given = {name: turn[name] for name in _SWITCHES if turn.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{name!r}: {json.dumps(value)[:40]}: use 0 or 1")
        if value and not own:
            raise ValueError(
                f"{name!r}: {json.dumps(value)} in a message of the role {turn['role']!r}: the "
                "loss counts the assistant's alone; remove the field, or set "
                "data.mask_prompt=false to count all"
            )
    if len(set(map(bool, given.values()))) > 1:
        raise ValueError(f"{' and '.join(map(repr, given))} contradict each other; keep one")
    return own and all(given.values())


def extras(turn: Turn) -> list[str]:
    """Return the fields of `turn` besides its text that are not empty."""
    return [key for key, value in turn.items() if key not in _KNOWN and _filled(value)]


def tools_of(record: dict[str, Any]) -> list[Any] | None:
    """Return what `tools` of a record lists, parsed where it is JSON text; None for nothing."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"'tools': invalid JSON ({error}); repair it") from None
    if not _filled(tools):
        return None
    if not isinstance(tools, list):
        raise ValueError(f"'tools': expected a list, not {type(tools).__name__}; repair it")
    return tools


def check_plain(turns: Sequence[Turn], tools: list[Any] | None) -> None:
    """ValueError for fields that marks around turns cannot show."""
    names = ["tools"] if tools else []
    names += [key for turn in turns for key in extras(turn) if key in (*_CALLS, *_THOUGHTS)]
    if names:
        raise ValueError(
            f"{names[0]!r}: marks around turns (data.records.turn_open) do not show it: use a chat "
            "template that does (data.tokenizer=hf), or remove the field"
        )


def _filled(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `file`: the tokenizer.json; `source`: Jinja, None without one."""

    file: Path
    source: str | None

    def tokens(
        self, turns: Sequence[Turn], tools: list[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Return (tokens, whether the loss counts each); ValueError for refused turns."""
        on = [counts(turn) for turn in turns]
        if self._marks:
            whole, marks = self._marked(turns, tools)
            if all(on[i] for i in self._answers(turns)):
                return whole, marks
            return whole, self._switched(turns, tools, marks, on)
        whole = self._apply(turns, tools)["input_ids"]
        own = [False] * len(whole)
        for i in self._answers(turns):
            if on[i]:
                start = self._until(whole, turns[:i], tools, asking=True)
                stop = self._until(whole, turns[: i + 1], tools, asking=False)
                own[start:stop] = [True] * (stop - start)
        return whole, own

    def given(self, turns: Sequence[Turn], tools: list[Any] | None) -> list[Turn]:
        """Return `turns` without fields that are null, as transformers does from 5.23 on, and
        without empty lists of calls, which some templates take for calls. An answer without text
        gets an empty one where the template asks for it."""
        self._check()
        plain = [
            {k: v for k, v in t.items() if _filled(v) or not (v is None or k in _CALLS)}
            for t in turns
        ]
        if all("content" in turn for turn in plain):
            return plain
        try:
            self._text(plain, tools)
        except ValueError:
            return [{"content": ""} | turn for turn in plain]
        return plain

    def check(
        self, turns: Sequence[Turn], tools: list[Any] | None, place: str, found: Findings
    ) -> list[str]:
        """Return the fields of `turns` that the template does not render. ValueError for tools,
        calls and reasoning among them, and for an answer without any text."""
        names = list(dict.fromkeys(key for turn in turns for key in extras(turn)))
        if not names and not tools:
            return []
        text = self._text(turns, tools)
        if "\0" in text:
            raise ValueError("it contains a zero byte, so it is not text; repair the line")
        if tools and not self._differs(text, turns, _renamed(tools)):
            raise ValueError(_not_rendered("tools"))
        for i, turn in enumerate(turns):
            for key in (key for key in extras(turn) if key in _CALLS):
                other = [*turns[:i], turn | {key: _renamed(turn[key])}, *turns[i + 1 :]]
                if not self._differs(text, other, tools):
                    raise ValueError(_not_rendered(key))
            if turn["role"] != "assistant":
                continue
            if not turn.get("content"):
                if not self._differs(text, _without(turns, extras(turn), i), tools):
                    raise ValueError(_not_rendered(extras(turn)[0]))
            elif extras(turn) and not self._differs(
                text,
                [*turns[:i], turn | {"content": turn["content"] + "~"}, *turns[i + 1 :]],
                tools,
            ):
                found.count(f"have content next to {extras(turn)[0]}, which is not rendered", place)
        for key in (key for key in names if key in _THOUGHTS):
            if not re.search(rf"\b{key}\b", self.source or "") and not self._differs(
                text, _without(turns, [key]), tools
            ):
                raise ValueError(_not_rendered(key))
        if any(json.dumps(one, ensure_ascii=False) in text for one in _text_arguments(turns)):
            found.count(
                "have arguments of tool_calls as text, which the chat template puts in quotes; "
                "give an object",
                place,
            )
        rest = [key for key in names if key not in (*_CALLS, *_THOUGHTS)]
        return [key for key in rest if not self._differs(text, _without(turns, [key]), tools)]

    @property
    def _marks(self) -> bool:
        return bool(_MARKED.search(self.source or ""))

    def _check(self) -> None:
        if self.source is None:
            raise ValueError(
                f"{self.file.parent} has no chat template: set one, {_OWN}, or "
                "data.records.template=turns for data.records.turn_open and turn_close"
            )
        if "strftime_now" in self.source and "date_string" not in self.source:
            raise ValueError(f"the chat template inserts today's date: set another, {_OWN}")

    def _answers(self, turns: Sequence[Turn]) -> list[int]:
        return [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]

    def _marked(
        self, turns: Sequence[Turn], tools: list[Any] | None
    ) -> tuple[list[int], list[bool]]:
        found = self._apply(turns, tools, return_assistant_tokens_mask=True)
        return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]

    def _switched(
        self, turns: Sequence[Turn], tools: list[Any] | None, marks: list[bool], on: list[bool]
    ) -> list[bool]:
        """Return `marks` without those of turns that are off; a turn owns the spans it adds."""
        stretches = _stretches(marks)
        before, own = 0, list(marks)
        for i in self._answers(turns):
            after = len(_stretches(self._marked(turns[: i + 1], tools)[1]))
            if not before < after <= len(stretches):
                raise ValueError(
                    "the chat template does not mark each of the assistant's messages on its own, "
                    f"so {', '.join(_SWITCHES)} cannot be followed: set one that does, {_OWN}"
                )
            for start, stop in stretches[before:after] if not on[i] else ():
                own[start:stop] = [False] * (stop - start)
            before = after
        return own

    def _until(
        self, whole: list[int], turns: Sequence[Turn], tools: list[Any] | None, asking: bool
    ) -> int:
        """Return how many of the first tokens of `whole` belong to `turns`; `asking`: with the
        header of an answer. The last token may merge with text that follows."""
        if not turns:
            raise ValueError(
                "the first turn is the assistant's, and the chat template does not show where "
                "its header ends: begin with another role, or set a template that marks the "
                f"assistant's text with {{% generation %}}, {_OWN}"
            )
        part = self._apply(turns, tools, add_generation_prompt=asking)["input_ids"]
        same = sum(1 for _ in takewhile(bool, map(int.__eq__, part, whole)))
        if same < len(part) - 1:
            raise ValueError(
                "the chat template changes earlier turns when later ones follow: set one that "
                f"marks the assistant's text with {{% generation %}}, {_OWN}"
            )
        return same

    def _text(self, turns: Sequence[Turn], tools: list[Any] | None) -> str:
        return str(self._apply(turns, tools, tokenize=False))

    def _differs(self, text: str, turns: Sequence[Turn], tools: list[Any] | None) -> bool:
        """Return whether `turns` are rendered as another text, or are refused."""
        try:
            return self._text(turns, tools) != text
        except ValueError:
            return True

    def _apply(self, turns: Sequence[Turn], tools: list[Any] | None, **how: Any) -> Any:
        """Render `turns` as transformers does."""
        tokenizer = self._tokenizer
        from jinja2 import TemplateError  # transformers' own needs it too

        try:
            return tokenizer.apply_chat_template(
                list(turns),
                tools=tools,
                chat_template=self.source,
                **{"date_string": _DATE, "return_dict": True} | how,
            )
        except (TemplateError, *_BROKEN) as error:
            fix = "; give arguments of tool_calls as an object" if _text_arguments(turns) else ""
            raise ValueError(f"the chat template failed: {error}; repair the line{fix}") from None

    @cached_property
    def _tokenizer(self) -> Any:
        package("jinja2", "a chat template")
        # not AutoTokenizer: some classes make another tokenizer than tokenizer.json says
        kind = package("transformers", "a chat template").PreTrainedTokenizerFast
        found = kind.from_pretrained(self.file.parent, tokenizer_file=str(self.file))
        found.backend_tokenizer.no_truncation()
        return found


def _not_rendered(name: str) -> str:
    return f"{name!r}: the chat template omits it: set one that renders it, {_OWN}, or remove it"


def _without(turns: Sequence[Turn], keys: Sequence[str], only: int | None = None) -> list[Turn]:
    """Return `turns` without `keys`, or with `only` that turn changed."""
    return [
        {k: v for k, v in turn.items() if k not in keys} if only in (None, i) else turn
        for i, turn in enumerate(turns)
    ]


def _renamed(value: Any, name: str = "") -> Any:
    """Rename tools or calls, to see whether a template renders them."""
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    if isinstance(value, dict):
        return {k: _renamed(v, k) for k, v in value.items()}
    return f"{value}~" if name == "name" or (isinstance(value, str) and not name) else value


def _text_arguments(turns: Sequence[Turn]) -> list[str]:
    """Return arguments of calls that are JSON text, as in OpenAI's answers."""
    calls = [c for t in turns for c in t.get("tool_calls") or () if isinstance(c, dict)]
    own = [call.get("function") or call for call in calls]
    arguments = [one.get("arguments") for one in own if isinstance(one, dict)]
    return [one for one in arguments if isinstance(one, str)]


def _stretches(marks: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *marks, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def chat_template(cfg: DataConfig) -> ChatTemplate | None:
    """Return the template by which `cfg` encodes chats; None: marks around turns."""
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
    """Return the tokenizer's default template; newer tokenizers have it in a file of its own."""
    again = "save the tokenizer again"
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE, again)
    config_file = folder / "tokenizer_config.json"
    settings = parse_json(config_file, again) if config_file.is_file() else {}
    found: Any = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None
