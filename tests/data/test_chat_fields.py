"""Fields of chats beside their text: rendered by the template, refused by name, or named once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_chat import CHAT, CHATML, MARKED, counted_text, first, packed, saved
from tests.data.test_records import PLAIN, lines, opened, rows

CALLS = (  # as Qwen's: tools in front, thoughts and calls within turns
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}</call>{% endfor %}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MENTIONING = CALLS.replace("{{ tools | tojson }}", "Use tools.")
PLAIN_CALLS = CALLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
BRANCHING = (  # as vLLM's for Mistral: that there are calls shows, but not which
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}[CALLS]{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
NEEDING = (  # as DeepSeek's, which adds calls to content
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEAVING = (  # as Hermes', which has one or the other, and takes an empty list for calls
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL: dict[str, Any] = {"function": {"name": "add", "arguments": {"a": 1}}}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "add 1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2"},
]


def changed(at: int, **fields: Any) -> list[dict[str, Any]]:
    """AGENT with other fields in one turn; `...` takes one out."""
    turn = {k: v for k, v in (AGENT[at] | fields).items() if v is not ...}
    return [*AGENT[:at], turn, *AGENT[at + 1 :]]


@pytest.mark.parametrize("template", [CALLS, PLAIN_CALLS], ids=["marked", "unmarked"])
@pytest.mark.parametrize("content", ["", None, ...], ids=["empty", "null", "absent"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None], ids=["list", "text", "none"])
def test_tools_and_calls_are_learnt_as_transformers_renders_them(
    template: str, content: Any, tools: Any, tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "tokenizer", template)
    turns = changed(1, content=content)
    tokens, mask = first(data := packed(tmp_path, [{"messages": turns, "tools": tools}]))
    given = TOOLS if tools else None
    want = theirs.apply_chat_template(changed(1, content=""), tools=given)["input_ids"]
    assert tokens[: len(want)] == want
    assert tokens[len(want) :] in ([], [theirs.eos_token_id])
    said = [text.strip() for text in counted_text(theirs, tokens, mask)]
    assert said == ['<call>add {"a": 1}</call><|im_end|>', "It is 2<|im_end|>"]
    assert ("<|im_start|>tools" in theirs.decode(tokens)) == bool(tools)
    assert data.notes == ()


@pytest.mark.parametrize("template", [NEEDING, LEAVING], ids=["needing", "leaving"])
@pytest.mark.parametrize("content", ["", None, ...], ids=["empty", "null", "absent"])
def test_templates_that_ask_for_content_get_an_empty_one(
    template: str, content: Any, tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "tokenizer", template)
    own = [turn | {"tool_calls": []} if i != 1 else turn for i, turn in enumerate(AGENT)]
    own[1] = changed(1, content=content)[1]
    data = packed(tmp_path, [{"messages": own}])
    said = counted_text(theirs, *first(data))
    assert said == ["<call>add</call><|im_end|>\n", "It is 2<|im_end|>\n"]
    assert data.notes == ()


def test_content_that_a_template_omits_next_to_calls_is_noted(tmp_path: Path) -> None:
    turns = changed(1, content="I add")
    saved(tmp_path / "tokenizer", LEAVING)
    (note,) = packed(tmp_path, [{"messages": turns}]).notes
    assert "tool_calls" in note
    (tmp_path / "own.jinja").write_text(NEEDING)
    assert packed(tmp_path, [{"messages": turns}], template=str(tmp_path / "own.jinja")).notes == ()


def test_thoughts_are_learnt(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "tokenizer", CALLS)
    turns = changed(3, reasoning_content="so it is")
    said = counted_text(theirs, *first(packed(tmp_path, [{"messages": turns}])))
    assert said[1] == "<think>so it is</think>It is 2<|im_end|>"


@pytest.mark.parametrize(
    ("template", "record", "field"),
    [
        (CHATML, {"messages": CHAT, "tools": TOOLS}, "tools"),
        (CALLS, {"messages": CHAT, "tools": {"a": 1}}, "tools"),
        (CALLS, {"messages": CHAT, "tools": "[{"}, "tools"),
        (CHATML, {"messages": AGENT}, "tool_calls"),
        (CHATML, {"messages": changed(1, content=None)}, "tool_calls"),
        (CHATML, {"messages": changed(1, content="I add", tool_calls=[CALL])}, "tool_calls"),
        (CALLS, {"messages": changed(1, tool_calls=..., function_call={"a": 1})}, "function_call"),
        (CHATML, {"messages": [CHAT[1] | {"reasoning_content": "x"}]}, "reasoning_content"),
        (CHATML, {"messages": [CHAT[0], CHAT[1] | {"thinking": "x"}]}, "thinking"),
        (CALLS, {"messages": changed(1, tool_calls=None)}, "content"),
        (CALLS, {"messages": changed(2, content=None)}, "content"),
        (BRANCHING, {"messages": AGENT}, "tool_calls"),
        (MENTIONING, {"messages": CHAT, "tools": TOOLS}, "tools"),
        (CALLS.replace("a if a is string else a", "a + 1"), {"messages": AGENT}, "template"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_render_is_refused_by_name(
    template: str, record: Any, field: str, tmp_path: Path
) -> None:
    saved(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=rf"line 1: .*\b{field}\b"):
        packed(tmp_path, [record])


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"messages": CHAT, "tools": TOOLS}, "tools"),
        ({"messages": AGENT}, "tool_calls"),
        ({"messages": changed(1, content=None)}, "tool_calls"),
        ({"messages": [CHAT[0], CHAT[1] | {"reasoning_content": "x"}]}, "reasoning_content"),
        ({"messages": changed(1, tool_calls=..., name="x")}, "name"),
    ],
)
def test_marks_around_turns_refuse_what_they_cannot_show(
    record: Any, field: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"line 1: .*'{field}'"):
        opened(lines(tmp_path, [record] * 4), seq_len=96)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
@pytest.mark.parametrize("field", ["weight", "train", "training", "loss", "loss_mask"])
def test_a_turn_that_is_switched_off_is_read_and_not_learnt(
    template: str, field: str, tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "tokenizer", template)
    whole, _ = first(packed(tmp_path, [{"messages": CHAT}]))
    turns = [CHAT[0] | {field: 0}, CHAT[1] | {field: False}, CHAT[2] | {field: None}, CHAT[3]]
    tokens, mask = first(data := packed(tmp_path, [{"messages": turns}]))
    assert tokens == whole
    said = counted_text(theirs, tokens, mask)
    assert [text.strip() for text in said] == ["return x + 1<|im_end|>"]
    assert data.notes == ()


def test_a_turn_with_two_marked_stretches_is_off_as_a_whole(tmp_path: Path) -> None:
    two = MARKED.replace("{{ m.content }}<|im_end|>{% endg", "{{ m.content }}{% endg").replace(
        "{% endgeneration %}", "{% endgeneration %} {% generation %}<|im_end|>{% endgeneration %}"
    )
    theirs = saved(tmp_path / "tokenizer", two)
    turns = [*CHAT[:3], CHAT[3] | {"weight": 0}]
    said = counted_text(theirs, *first(packed(tmp_path, [{"messages": turns}])))
    assert said == ["return x * 3", "<|im_end|>"]


def test_turns_that_a_template_marks_as_one_cannot_be_told_apart(tmp_path: Path) -> None:
    bare = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation"
    bare += " %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    saved(tmp_path / "tokenizer", bare)
    turns = [CHAT[0], CHAT[1], CHAT[3] | {"weight": 0}]
    with pytest.raises(ValueError, match=r"line 1: .*\bweight\b"):
        packed(tmp_path, [{"messages": turns}])


def test_marks_around_turns_follow_switches(tmp_path: Path) -> None:
    turns = [CHAT[0], CHAT[1] | {"weight": 0}, CHAT[2], CHAT[3] | {"weight": 1.0}]
    marks = {"turn_open": "", "turn_close": ";"}
    data = opened(lines(tmp_path, [{"messages": turns}] * 4), marks, seq_len=64)
    assert rows(data)[0][1].strip("_") == "return x + 1;|"


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        (1, {"weight": 0.5}),
        (1, {"weight": "0"}),
        (1, {"loss_mask": [0, 1]}),
        (2, {"train": True}),
        (1, {"train": True, "weight": 0}),
    ],
)
def test_a_switch_that_cannot_be_followed_is_refused_by_name(
    at: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    turns = [*CHAT[:at], CHAT[at] | fields, *CHAT[at + 1 :]]
    with pytest.raises(ValueError, match=rf"line 1: .*'{next(iter(fields))}'"):
        opened(lines(tmp_path, [{"messages": turns}] * 4), seq_len=96)


def test_a_record_whose_turns_are_all_off_is_refused(tmp_path: Path) -> None:
    turns = [turn | {"weight": 0} for turn in CHAT]
    with pytest.raises(ValueError, match="line 1: "):
        opened(lines(tmp_path, [{"messages": turns}] * 4), seq_len=96)


def test_fields_that_nothing_reads_are_named_once(tmp_path: Path) -> None:
    odd = [PLAIN[0] | {"id": 3, "weight": 0.5}, {"messages": [t | {"name": "x"} for t in CHAT]}]
    data = opened(lines(tmp_path, [*odd * 2, PLAIN[1]]), seq_len=96)
    (note,) = data.notes
    for name in ("id", "weight", "messages.name"):
        assert note.count(f"'{name}'") == 1
    assert "line 1" in note
    again = opened(tmp_path / "some.jsonl", seq_len=96)
    assert again.notes == data.notes, "from the files that are there"
    assert opened(lines(tmp_path, PLAIN, "other.jsonl")).notes == ()


def test_what_a_template_reads_is_not_named(tmp_path: Path) -> None:
    saved(tmp_path / "tokenizer", CHATML.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}"))
    named = [turn | {"name": "x", "id": 7} for turn in CHAT]
    (note,) = packed(tmp_path, [{"messages": named, "source": "s"}]).notes
    assert "'messages.id'" in note
    assert "'source'" in note
    assert "name" not in note


def test_arguments_as_text_in_quotes_are_noted(tmp_path: Path) -> None:
    saved(tmp_path / "tokenizer", CALLS.replace("a if a is string else a", "a"))
    text = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    (note,) = packed(tmp_path, [{"messages": changed(1, tool_calls=[text])}]).notes
    assert "tool_calls" in note
    assert packed(tmp_path, [{"messages": AGENT}]).notes == ()


@pytest.mark.parametrize("text", [r"a\ud800b", r"a\udc00b", "a\udfffb"], ids=["high", "low", "raw"])
def test_lone_surrogates_are_noted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    odd = f'{{"prompt": "", "completion": "{text}"}}\n'
    pair = '{"prompt": "", "completion": "\\ud83d\\ude00"}\n'
    path.write_bytes((pair + odd * 2 + pair).encode(errors="surrogatepass"))
    data = opened(path)
    (note,) = data.notes
    assert "2 records" in note
    assert "line 2" in note
    assert "a?b|" in rows(data)[0][1]


def test_lone_surrogates_go_through_a_template(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "tokenizer", CHATML)
    data = packed(tmp_path, [{"messages": [CHAT[0], CHAT[1] | {"content": "a\ud800b"}]}])
    assert counted_text(theirs, *first(data)) == ["a?b<|im_end|>\n"]
    assert len(data.notes) == 1


@pytest.mark.parametrize("at", ["content", "tool_calls"])
def test_a_zero_byte_is_named(at: str, tmp_path: Path) -> None:
    saved(tmp_path / "tokenizer", CALLS)
    bad = {"function": {"name": "a\0", "arguments": {}}}
    turns = changed(1, tool_calls=[bad]) if at == "tool_calls" else changed(3, content="\0")
    with pytest.raises(ValueError, match=r"line 1: .*zero byte"):
        packed(tmp_path, [{"messages": turns}])
