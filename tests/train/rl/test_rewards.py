from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import Mock

import pytest

from zpp_lab.config.load import load
from zpp_lab.config.rl import RlConfig
from zpp_lab.train.rl import rewards
from zpp_lab.train.rl.rewards import RewardError, Scores, reward, score

PROMPTS = ["3+4=5\n12+30=", "12+30=", "1+2+3="]


def of(name: str, completions: list[str], **columns: Any) -> list[float]:
    found = score({name: reward(name)}, PROMPTS, completions, columns, 5)
    assert found.late == ()
    values: list[float] = found.values[0].tolist()
    return values


def test_shipped_rewards() -> None:
    answers = ["42", "42", "1+2=3;3+3=6"]
    assert of("addition", ["042 ", "41", "6"]) == [1, 0, 1]
    assert of("sums", ["42", "", "1+2=3;3+3=6"]) == [1, 0, 1]
    assert of("exact", ["42 ", "042", answers[2]], completion=answers) == [1, 0, 1]
    assert of("format", ["7", "a", "10+2=30;3+3=61"], completion=answers) == [1, 0, 1]


def test_weights_and_what_a_reward_does_not_judge() -> None:
    rewards = {"a": lambda **_: [1, None, 2], "b": lambda **_: [0, 3, 1]}
    found = score(rewards, PROMPTS, PROMPTS, {}, 5)
    assert found.weighted([1.0, 0.5]).tolist() == [1.0, 1.5, 2.5]
    rl = load(RlConfig, {"rewards": ["exact", "format"], "weights": [1.0, 0.2]})
    assert rl.weighted == {"exact": 1.0, "format": 0.2}


BAD = [lambda **_: [1], lambda **_: [1, 2, float("nan")], lambda: [0], lambda **_: sys.exit()]


@pytest.mark.parametrize("bad", BAD)
def test_a_reward_that_fails_is_named(bad: Any) -> None:
    with pytest.raises(RewardError, match="mine"):
        score({"mine": bad}, PROMPTS, PROMPTS, {}, 5)


def test_a_reward_that_hangs_scores_0() -> None:
    def hangs(**columns: Any) -> list[float]:
        while True:
            try:
                time.sleep(60)
            except Exception:  # what a careless reward does
                continue

    found = score({"mine": hangs, "ours": lambda **_: [1, 1, 1]}, PROMPTS, PROMPTS, {}, 0.2)
    assert found.late == ("mine",)
    assert found.values.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert isinstance(found, Scores)


def test_an_unknown_reward_lists_the_valid_ones() -> None:
    with pytest.raises(
        ValueError, match=r"rl\.rewards.*additoin.*addition, exact, format, learned, sums"
    ):
        reward("additoin")


def test_a_reward_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Mock(value="theirs:reward", load=Mock(side_effect=KeyError("of their own")))
    monkeypatch.setattr(rewards, "_entry_points", lambda: {"theirs": point})
    with pytest.raises(ValueError, match=r"rl\.rewards.*theirs.*of their own"):
        reward("theirs")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"top_p": 0.9}, r"rl\.top_p"),
        ({"top_k": 40}, r"rl\.top_k"),
        ({"rewards": ["a", "a"]}, r"rl\.rewards"),
        ({"rewards": ["a"], "weights": [1.0, 2.0]}, r"rl\.weights"),
        ({"algorithm": "rloo", "normalise": "sequence"}, r"rl\.normalise"),
        ({"algorithm": "rloo", "correction": "token"}, r"rl\.correction"),
    ],
)
def test_settings_that_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load(RlConfig, values)
