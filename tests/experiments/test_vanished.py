"""experiments/finetune_1b/vanished.py: embeddings that rounding takes away, in a small model."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.experiments.scripts import loaded

PATH = "experiments/finetune_1b/vanished.py"


def test_a_byte_without_an_embedding_at_a_texts_begin_makes_its_gradient_explode() -> None:
    script = loaded(PATH)
    config = script.of_arm("finetune_1b_mini", "broken")
    assert (config.recipe.name, config.data.suffixes) == ("broken", [".py"])
    model = script.rounded(config)
    embedding = model.get_parameter("embed.weight")
    blocks = embedding.detach().view(-1, 8192)  # of the recipe's
    assert all(len(block.abs().unique()) == 2 for block in blocks), "0 and a scale"
    byte = ord("}")
    with torch.no_grad():
        embedding[byte - 1 : byte + 1] = 1.0
        embedding[byte] = 0.0
    assert byte in script.vanished(embedding)
    assert byte - 1 not in script.vanished(embedding)
    text = script.TEXT
    plain, none = script.gradient(model, byte, text)
    norm, own = script.gradient(model, byte, b"}" + text[1:])
    second, _ = script.gradient(model, byte, text[:1] + b"}" + text[2:])
    assert none == 0
    assert own == pytest.approx(norm, rel=1e-2)
    assert norm > 20 * max(plain, second)
    assert script.row(model, byte, b"}" + text[1:], "first")[3] >= "0.98"


def test_it_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded(PATH)
    monkeypatch.setattr(sys, "argv", ["vanished.py", "finetune_1b_mini", "w8"])
    assert script.main() == 0
    assert capsys.readouterr().out == "\n0 of 256 bytes have no embedding left.\n"
