"""Chats through a tokenizer's own template: transformers' tokens, and masks of the assistant's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from tests.data.test_records import config, lines
from tests.small_runs import CORPUS
from zpp_lab.config.data import RecordConfig
from zpp_lab.data import PackedData, open_data
from zpp_lab.data.tokenizer import BpeTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
)
LLAMA2 = (  # no header asks for an answer, and the record ends with the end marker
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "def f0(x):"},
    {"role": "assistant", "content": "return x * 3"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "return x + 1"},
]


def saved(folder: Path, template: str | None) -> Any:
    lib = BpeTokenizer.train([CORPUS.encode()], 290).model
    lib.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=lib, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def packed(tmp_path: Path, records: list[Any], **fields: Any) -> PackedData:
    data = open_data(
        config(
            lines(tmp_path, records * 4), fields,
            tokenizer="hf", tokenizer_path=str(tmp_path / "tokenizer"), seq_len=256,
        )
    )  # fmt: skip
    assert isinstance(data, PackedData)
    return data


def first(data: PackedData) -> tuple[list[int], list[int]]:
    piece = slice(0, data.train.fitted.stops[0])
    assert data.train.mask is not None
    return data.train.tokens[piece].tolist(), data.train.mask[piece].tolist()


def counted_text(theirs: Any, tokens: list[int], mask: list[int]) -> list[str]:
    """The counted stretches of a record, as text."""
    found, before = [], 0
    for token, mark in zip(tokens, mask, strict=True):
        if mark and not before:
            found.append([])
        if mark:
            found[-1].append(token)
        before = mark
    return [theirs.decode(part) for part in found]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["return x * 3<|im_end|>\n", "return x + 1<|im_end|>\n"]),
        (MARKED, ["return x * 3<|im_end|>", "return x + 1<|im_end|>"]),
        (LLAMA2, [" return x * 3<|im_end|>", " return x + 1<|im_end|>"]),
    ],
    ids=["chatml", "marked", "llama2"],
)
def test_tokens_are_transformers_and_the_assistants_count(
    template: str, said: list[str], tmp_path: Path
) -> None:
    theirs = saved(tmp_path / "tokenizer", template)
    data = packed(tmp_path, [{"messages": CHAT}])
    tokens, mask = first(data)
    want = theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert tokens == (want if want[-1] == theirs.eos_token_id else [*want, theirs.eos_token_id])
    assert counted_text(theirs, tokens, mask) == said
    if template == MARKED:
        marked = theirs.apply_chat_template(
            CHAT, return_dict=True, return_assistant_tokens_mask=True
        )
        assert mask == marked["assistant_masks"]


def test_a_template_of_ones_own_and_marks_in_its_place(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "tokenizer", CHATML)
    (tmp_path / "own.jinja").write_text(LLAMA2)
    own = first(packed(tmp_path, [{"messages": CHAT}], template=str(tmp_path / "own.jinja")))
    assert theirs.decode(own[0]).startswith("[INST] def f0(x): [/INST] return x * 3<|im_end|>")
    turns = first(packed(tmp_path, [{"messages": CHAT}], template="turns"))
    assert theirs.decode(turns[0]).startswith("<|user|>\ndef f0(x):\n<|assistant|>\nreturn")
    marked = first(packed(tmp_path, [{"messages": CHAT}], turn_open="{role}: "))
    assert theirs.decode(marked[0]).startswith("user: def f0(x):\nassistant: return")
    assert len(list((tmp_path / "cache").glob("jsonl-*"))) == 3


def test_other_records_need_no_template(tmp_path: Path) -> None:
    saved(tmp_path / "tokenizer", None)
    tokens, mask = first(packed(tmp_path, [{"prompt": "a", "completion": "b"}]))
    assert (len(tokens), mask) == (3, [0, 1, 1])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, r"data\.records\.template=FILE\.jinja, or .*=turns"),
        ("{{ strftime_now('%d') }}" + CHATML, "date"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[-1].content }}", "generation"),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "assistant"),
    ],
    ids=["none", "date", "refused", "otherwise", "nobody"],
)
def test_what_cannot_be_learnt_from_is_named(
    template: str | None, says: str, tmp_path: Path
) -> None:
    saved(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=rf"some\.jsonl, line 1: .*{says}"):
        packed(tmp_path, [{"messages": CHAT}])


def test_an_assistant_that_speaks_first_needs_a_template_that_marks(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "tokenizer", CHATML)
    with pytest.raises(ValueError, match=r"line 1: .*\{% generation %\}"):
        packed(tmp_path, [{"messages": CHAT[1:]}])
    (tmp_path / "own.jinja").write_text(MARKED)
    data = packed(tmp_path, [{"messages": CHAT[1:]}], template=str(tmp_path / "own.jinja"))
    assert counted_text(theirs, *first(data))[0] == "return x * 3<|im_end|>"


def test_a_date_is_the_templates_own(tmp_path: Path) -> None:
    """Of a template that asks for today's only where it is told none: runs repeat to the bit."""
    asks = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
    )
    theirs = saved(tmp_path / "tokenizer", asks + "{{ date_string }}" + CHATML)
    tokens, _ = first(packed(tmp_path, [{"messages": CHAT}]))
    assert theirs.decode(tokens).startswith("26 Jul 2024<|im_start|>user")


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"turn_open.*turn_close"):
        RecordConfig(template="own.jinja", turn_open="x")
    with pytest.raises(ValueError, match=r"own\.jinja.*data\.tokenizer=hf"):
        config(tmp_path / "x.jsonl", {"template": "own.jinja"})
    saved(tmp_path / "tokenizer", CHATML)
    with pytest.raises(ValueError, match=r"data\.records\.template=.*gone\.jinja"):
        packed(tmp_path, [{"messages": CHAT}], template=str(tmp_path / "gone.jinja"))


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "tokenizer", CHATML)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'zpp_lab\[hf\]'"):
        packed(tmp_path, [{"messages": CHAT}])


@pytest.mark.parametrize("template", [CHATML, LLAMA2], ids=["chatml", "llama2"])
def test_a_pair_is_scored_where_a_policy_would_end(template: str, tmp_path: Path) -> None:
    """The prompt as generation gets it, the answer without what the template has behind it, and the
    end marker, whose place alone counts."""
    theirs = saved(tmp_path / "tokenizer", template)
    prompt, answers = CHAT[:1], ["return x * 3", "no"]
    sides = [[{"role": "assistant", "content": text}] for text in answers]
    pair = {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
    path = lines(tmp_path, [pair] * 4)
    own = {"tokenizer": "hf", "tokenizer_path": str(tmp_path / "tokenizer"), "seq_len": 256}
    data = open_data(config(path, pairs=True, **own))
    assert isinstance(data, PackedData)
    for i, side in enumerate(sides):
        piece = slice(data.train.fitted.starts[i], data.train.fitted.stops[i])
        asked = theirs.apply_chat_template([*prompt, *side], return_dict=True)["input_ids"]
        stop = len(asked) - 1 - asked[::-1].index(theirs.eos_token_id)
        assert data.train.tokens[piece].tolist() == [*asked[:stop], theirs.eos_token_id]
        assert data.train.mask is not None
        assert data.train.mask[piece].tolist() == [0] * stop + [1]
