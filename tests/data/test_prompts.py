from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.data.prompts import open_prompts
from zpp_lab.data.tasks import task_files


def made(folder: Path, records: list[dict[str, Any]], *overrides: str) -> Config:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = compose(["experiment=rl_addition", *overrides])
    own = replace(config.data, name="jsonl", path=str(path), seq_len=57, heldout_every=4)
    return replace(config, data=own)


def test_prompts_end_where_the_answer_begins(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": f"{i}+{i}=", "completion": str(2 * i), "level": i} for i in range(8)
    ]
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    records[1] = {"messages": [{"role": role, "content": text} for role, text in turns]}
    train, heldout = open_prompts(made(tmp_path, records), tmp_path)
    assert [len(train), len(heldout)] == [6, 2]
    assert train.tokens[0].tolist() == [0, *b"0+0="]
    assert train.texts[1].endswith("c\n<|assistant|>\n")
    assert train.of([0, 1])["completion"] == ["0", "d\n"]
    assert heldout.columns["level"] == [3, 7]
    assert train.columns["level"][:2] == [0, None]


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    one = {"prompt": "a" * 53, "completion": "b"}
    with pytest.raises(ValueError, match=r"line 1.*rl\.max_new_tokens.*data\.seq_len"):
        open_prompts(made(tmp_path, [one] * 8), tmp_path)
    with pytest.raises(ValueError, match=r"data\.heldout_every"):
        open_prompts(made(tmp_path, [one | {"prompt": "a"}] * 3), tmp_path)


@pytest.mark.parametrize("name", ["addition", "sums"])
def test_a_made_task_is_right_where_no_digit_is_random(name: str) -> None:
    right = compose([f"data={name}"]).data
    wrong = replace(right, wrong=0.5)
    sets = [[json.loads(x) for x in task_files(c).content.splitlines()] for c in (right, wrong)]
    for record in sets[0]:
        terms = [int(n) for n in record["prompt"].rstrip("=").split("+")]
        assert int(record["completion"].rpartition("=")[2]) == sum(terms)
        assert all(eval(s.replace("=", "==")) for s in record["completion"].split(";") if "=" in s)
    differ = np.mean([a != b for a, b in zip(*sets, strict=True)])
    assert 0.42 < differ < 0.48  # a tenth of the random digits is the right one
    assert [a["prompt"] for a in sets[0]] == [b["prompt"] for b in sets[1]]
    assert task_files(right).identity() != task_files(wrong).identity()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["task=rl"], "data.name"),
        (["experiment=rl_addition", "rl.rewards=[]"], "rl.rewards"),
        (["experiment=rl_addition", "rl.prompts=31"], "rl.prompts"),
        (["experiment=rl_addition", "model.z_loss=0.1"], "model.z_loss"),
        (["experiment=rl_addition", "engine=deepspeed"], "engine"),
        (
            ["experiment=rl_addition", "model=hf", "model.path=x", "rl.temperature=0.5"],
            "rl.temperature",
        ),
        (["experiment=rl_addition", "engine=fsdp", "rl.timeout=300"], "rl.timeout"),
        (["experiment=rl_addition", "rl.kl=0.1", "run.start_from=x"], "rl.kl"),
        (["data.wrong=0.5"], "data.wrong"),
    ],
)
def test_settings_that_do_not_go_together(overrides: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        compose(overrides)
