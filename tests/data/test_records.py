"""JSON lines as token files: what counts, what is cut, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zpp_lab.config.data import DataConfig, RecordConfig
from zpp_lab.data import PackedData, open_data
from zpp_lab.data.packed import IGNORED, _next_fit

PLAIN = [{"prompt": f"p{i}?", "completion": f"c{i}!"} for i in range(8)]


def lines(folder: Path, records: list[Any], name: str = "some.jsonl") -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    (folder / name).write_text(text)
    return folder / name


def config(path: Path, records: dict[str, Any] | None = None, **values: Any) -> DataConfig:
    values = {"heldout_every": 4, "seq_len": 16, "cache_dir": str(path.parent / "cache")} | values
    made = RecordConfig(**(records or {}))
    return DataConfig(name="jsonl", path=str(path), records=made, **values)


def opened(path: Path, records: dict[str, Any] | None = None, **values: Any) -> PackedData:
    data = open_data(config(path, records, **values))
    assert isinstance(data, PackedData)
    return data


def said(row: Any) -> str:
    """Targets as text: end markers as |, what does not count as _."""
    return "".join("_" if t == IGNORED else "|" if t == 0 else chr(t) for t in row.tolist())


def rows(data: PackedData, split: str = "train") -> list[tuple[str, str]]:
    own = data.train if split == "train" else data.held
    found = [own.row(i, data.seq_len, data.end) for i in range(len(own))]
    return [(said(inputs), said(targets)) for inputs, targets, _ in found]


def test_prompts_are_masked_and_records_packed_whole(tmp_path: Path) -> None:
    data = opened(lines(tmp_path, PLAIN))  # 7 tokens a record with its end: two fit 16
    assert rows(data) == [
        ("|p0?c0!|p1?c1!|||"[:16], "___c0!|___c1!|__"),
        ("|p2?c2!|p4?c4!|||"[:16], "___c2!|___c4!|__"),
        ("|p5?c5!|p6?c6!|||"[:16], "___c5!|___c6!|__"),
    ]
    assert rows(data, "heldout") == [("|p3?c3!|p7?c7!||", "___c3!|___c7!|__")]
    assert (data.tokens, data.heldout_tokens, data.files) == (42, 14, 1)
    assert data.facts["padding"] == pytest.approx(6 / 48)
    assert data.facts["counted"] == 24


def test_without_the_mask_or_without_packing(tmp_path: Path) -> None:
    path = lines(tmp_path, PLAIN)
    whole = opened(path, mask_prompt=False)
    assert rows(whole)[0][1] == "p0?c0!|p1?c1!|__"
    alone = opened(path, {"pack": False})
    assert [t for _, t in rows(alone)][:2] == ["___c0!|_________", "___c1!|_________"]
    assert len(list((tmp_path / "cache").glob("jsonl-*"))) == 1, "tokens are the same files"


def test_a_chat(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    path = lines(tmp_path, [{"messages": turns}] * 4)
    marks = {"turn_open": "<{role}>", "turn_close": ";"}
    data = opened(path, marks, seq_len=48)
    ((inputs, targets), *_) = rows(data)
    text = "<user>a;<assistant>bc;<user>d;<assistant>e;"
    assert inputs[: len(text)] == "|" + text[:-1]
    counts = text.replace("<user>a;<assistant>", "_" * 19).replace("<user>d;<assistant>", "_" * 19)
    assert targets == f"{counts}|".ljust(48, "_")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x", "completion": }', r"some\.jsonl, line 3: .*\(Expecting value"),
        ('{"prompt": "x", "completion": "y", "completion": "z"}', "line 3: .*'completion'"),
        ('{"messages": [{"role": "user", "role": "assistant"}]}', "line 3: .*'role'"),
        ({"text": "x"}, r"'prompt' .*'completion', .*'messages'; .*'text'"),
        ({"prompt": "x"}, r"line 3: .*'completion', .*data\.records"),
        ({"prompt": "x", "completion": 3}, "line 3: 'completion' is int, not text"),
        ({"prompt": "x\0", "completion": "y"}, "line 3: "),
        ({"messages": [{"role": "user"}]}, "line 3: no message of the role 'assistant'"),
        (
            {"messages": [{"role": "assistant", "content": ""}]},
            "line 3: an assistant's content is empty",
        ),
    ],
)
def test_a_bad_record_is_named(line: Any, says: str, tmp_path: Path) -> None:
    path = lines(tmp_path, [PLAIN[0], "", line, *PLAIN])
    with pytest.raises(ValueError, match=says):
        open_data(config(path))
    assert not list((tmp_path / "cache").glob("jsonl-*"))


def test_too_few_records_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.heldout_every=4"):
        open_data(config(lines(tmp_path, PLAIN[:3])))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"\*\.jsonl"):
        open_data(config(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"data\.records: .*\bmessages\b"):
        RecordConfig(prompt="a", completion="a")


LONG = [{"prompt": "0123456789", "completion": "abc"}, {"prompt": "01", "completion": "abcdefghij"}]


def test_long_records_lose_the_left_of_their_prompt(tmp_path: Path) -> None:
    path = lines(tmp_path, [*LONG, PLAIN[0], PLAIN[0]])
    data = opened(path, seq_len=8)
    assert rows(data)[:2] == [("|6789abc", "____abc|"), ("|abcdefg", "abcdefgh")]
    assert data.notes == (
        "training records longer than data.seq_len=8: 1 cut at the left of their prompt, "
        "1 cut at the end of their completion too",
    )
    assert data.train.counted.tolist() == [4, 8, 4]
    dropped = opened(path, {"too_long": "drop"}, seq_len=8)
    assert [t for _, t in rows(dropped)] == ["___c0!|_"]
    assert "2 dropped" in dropped.notes[0]
    with pytest.raises(ValueError, match=r"data\.records\.too_long"):
        opened(path, {"too_long": "refuse"}, seq_len=8)
    with pytest.raises(ValueError, match=r"data\.seq_len=4"):
        opened(path, {"too_long": "drop"}, seq_len=4)


def test_a_step_takes_every_sequence_once_an_epoch(tmp_path: Path) -> None:
    data = opened(lines(tmp_path, [{"prompt": "", "completion": f"{i:03}"} for i in range(64)]))
    count = len(data.train)
    assert count == 12
    seen = []
    for step in range(2):  # 2 micro-steps × 3 ranks × 2 sequences
        batches = data.step(5, step, 3, 2, 2, 16)
        turns = [batches(rank, micro) for micro in range(2) for rank in range(3)]
        seen += [said(row) for _, y, _ in turns for row in y]
        shares = {tuple(share.tolist()) for *_, share in turns}
        counted = sum(int((y != IGNORED).sum()) for _, y, _ in turns)
        assert shares == {(6, counted)}
    assert sorted(seen[:12]) == sorted(seen[12:]) == sorted(t for _, t in rows(data))
    assert seen[:12] != seen[12:]
    other = [said(row) for row in data.step(6, 0, 3, 2, 2, 16)(0, 0)[1]]
    assert other != seen[:2]


def test_heldout_targets_know_their_record(tmp_path: Path) -> None:
    records = [{"prompt": "x" * (i % 3), "completion": f"{i:02}"} for i in range(40)]
    data = opened(lines(tmp_path, records))
    batches = list(data.heldout(10**6, 2, 16))
    targets = torch.cat([y.flatten() for _, y in batches]).numpy()
    documents = data.heldout_documents(10**6, 16)
    assert len(documents) == (targets != IGNORED).sum() == 10 * 3
    assert documents.tolist() == sorted(documents.tolist()) == [i for i in range(10) for _ in "abc"]
    numbers = "".join(map(chr, targets[targets != IGNORED])).split("\0")[:-1]
    assert numbers == [f"{i:02}" for i in range(3, 40, 4)]


def test_a_bpe_knows_marks_and_does_not_find_them_in_text(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "say <|end|>"}, {"role": "assistant", "content": "end"}]
    path = lines(tmp_path, [{"messages": chat}] * 8)
    marks = {"turn_open": "<|end|>{role}:", "turn_close": ""}
    data = opened(path, marks, tokenizer="bpe", vocab_size=262, seq_len=64)
    tokens = data.train.tokens[: data.train.fitted.stops[0]]
    assert (tokens == data.end).sum() == 3  # two turns and the record, not the user's text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_keeps_order_and_room(lengths: list[int]) -> None:
    first = _next_fit(np.array(lengths), 20)
    assert first[0] == 0
    assert first[-1] == len(lengths)
    sums = [sum(lengths[a:b]) for a, b in pairwise(first)]
    assert all(0 < s <= 20 for s in sums)
    for s, b in zip(sums, first[1:-1], strict=False):
        assert s + lengths[b] > 20, "the next record did not fit"
