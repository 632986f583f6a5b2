"""Tokens of a Hugging Face tokenizer: as transformers gives them, and known by its contents."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import transformers

from tests.small_runs import CORPUS, small
from zpp_lab.config.data import DataConfig
from zpp_lab.data import open_data
from zpp_lab.data.prepare import open_corpus, prepared
from zpp_lab.data.tokenizer import OutsideTokenizer
from zpp_lab.models import build_model

END = "</s>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that marks the start of a text, cuts long ones, and has an eos_token."""
    lib = tokenizers
    model = lib.Tokenizer(lib.models.BPE())
    model.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = lib.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", END],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([CORPUS], trainer)
    model.decoder = lib.decoders.ByteLevel()
    model.post_processor = lib.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    model.enable_truncation(8)
    path = tmp_path / "tokenizer"
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END)
    whole.save_pretrained(path)
    return path


def data_of(tmp_path: Path, folder: Path, *more: str) -> DataConfig:
    words = ["data.tokenizer=hf", f"data.tokenizer_path={folder}", *more]
    return small(tmp_path, *words).data


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    tokenizer = OutsideTokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = CORPUS[:3000] + "ünïcode"
    tokens = tokenizer.encode(text.encode())
    assert tokens.tolist() == theirs(text, add_special_tokens=False, truncation=False).input_ids
    assert theirs.decode(tokens.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.end) == (300, theirs.eos_token_id)


def test_documents_end_with_its_end(tmp_path: Path, folder: Path) -> None:
    data = open_data(data_of(tmp_path, folder))
    ends = data.offsets["train"][1:] - 1
    assert data.vocab_size == 300
    assert set(data.streams["train"][ends].tolist()) == {1}
    other = open_data(data_of(tmp_path, folder, 'data.end_token="<s>"'))
    assert set(other.streams["train"][ends].tolist()) == {0}
    assert other.hash != data.hash


def test_prepared_tokens_are_known_by_its_contents(tmp_path: Path, folder: Path) -> None:
    cfg = data_of(tmp_path, folder)
    first, _ = prepared(open_corpus(cfg), cfg)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    cfg = replace(cfg, tokenizer_path=str(moved / "tokenizer.json"))
    assert prepared(open_corpus(cfg), cfg)[0] == first
    definition = moved / "tokenizer.json"
    said = json.loads(definition.read_text())
    said["model"]["merges"] = said["model"]["merges"][:-1]
    definition.write_text(json.dumps(said))
    assert prepared(open_corpus(cfg), cfg)[0] != first


def test_a_model_with_fewer_tokens_is_refused(tmp_path: Path, folder: Path) -> None:
    config = small(
        tmp_path,
        "data.tokenizer=hf",
        f"data.tokenizer_path={folder}",
        "model.vocab_size=256",
    )
    with pytest.raises(ValueError, match=r"256.*300"):
        build_model(config.model, open_data(config.data).vocab_size)
