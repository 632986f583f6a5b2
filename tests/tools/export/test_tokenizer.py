"""An exported folder has the tokenizer whose tokens the run has seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers

from tests.small_runs import CORPUS, small
from zpp_lab.data import open_data
from zpp_lab.data.tokenizer import BpeTokenizer
from zpp_lab.tools.export import export_hf
from zpp_lab.train.trainer import run

BPE = ("data.tokenizer=bpe", "data.vocab_size=280", "train.steps=2")


def test_a_bpe_of_ours(tmp_path: Path) -> None:
    config = small(tmp_path, *BPE)
    run(config)
    export_hf(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer(CORPUS).input_ids
    data = open_data(config.data)
    first = data.streams["train"][: data.offsets["train"][1]].tolist()
    assert [*tokens, tokenizer.eos_token_id] == first
    assert tokenizer.decode(tokens) == CORPUS
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.vocab_size, model.config.eos_token_id) == (280, tokenizer.eos_token_id)


def test_the_run_has_its_bpe_and_one_that_is_gone_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path, *BPE))
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    export_hf(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    (tmp_path / "run" / "tokenizer.json").unlink()
    export_hf(tmp_path / "run", tmp_path / "without")
    assert "the export has no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_one_of_hugging_face(tmp_path: Path) -> None:
    made = BpeTokenizer.train([CORPUS.encode()], 290).model
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    whole.chat_template = "{{ messages[0].content }}"
    whole.save_pretrained(tmp_path / "theirs")
    words = ["data.tokenizer=hf", f"data.tokenizer_path={tmp_path / 'theirs'}", "train.steps=2"]
    run(small(tmp_path, *words))
    export_hf(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(CORPUS).input_ids == whole(CORPUS).input_ids
    assert tokenizer.chat_template == whole.chat_template
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.vocab_size, model.config.eos_token_id) == (290, 0)
