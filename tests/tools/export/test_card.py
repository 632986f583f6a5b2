"""Every export says what it began with, under which licence, and how to load it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.lora.test_export import llama
from tests.small_runs import small
from zpp_lab.cli.main import main
from zpp_lab.config.schema import Config
from zpp_lab.tools.export.card import base_of, write_readme
from zpp_lab.train.trainer import run


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters on a base that has a card and a licence."""
    root = tmp_path_factory.mktemp("adapted")
    config = llama(root, "q4", "train.steps=2")
    (root / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (root / "base" / "LICENSE").write_text("the terms")
    run(config)
    return root


@pytest.mark.parametrize(
    ("words", "library"),
    [
        (["--to", "hf"], "transformers"),
        (["--to", "hf", "--quantized", "--codec", "bits=4,block_size=32"], "transformers"),
        (["--to", "peft"], "peft"),
    ],
    ids=["hf", "quantized", "peft"],
)
def test_base_and_licence_come_along(
    words: list[str], library: str, adapted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(adapted / "run"), *words, "--out", str(out)]) == 0
    facts, text = card(out)
    assert facts == {"library_name": library, "license": "apache-2.0", "base_model": "base"}
    assert "Training began with the weights of base. Licence: apache-2.0." in text
    assert (out / "LICENSE").read_text() == "the terms"
    assert "from_pretrained(" in text
    assert "seed 1, step 2" in text
    assert str(tmp_path) not in text


def test_a_base_is_found_through_the_runs_between(adapted: Path, tmp_path: Path) -> None:
    plain = small(tmp_path)
    later = replace(plain, model=replace(plain.model, start=str(adapted / "run" / "checkpoints")))
    found, said = base_of(later)
    assert found is not None
    assert said == "Training began with the weights of base."
    assert found.resolve() == (adapted / "base").resolve()
    gone = replace(plain.model, start=str(tmp_path / "gone"))
    write_readme(tmp_path, replace(Config(), model=gone), "# Weights", None)
    facts, text = card(tmp_path)
    assert "base_model" not in facts
    assert "The run that it began from is gone; its base is not known. No licence" in text
    assert "random weights" not in text
