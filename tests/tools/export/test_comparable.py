"""A folder whose loss would mean something else than the run's is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import transformers

from tests.models.hf_cases import settings
from tests.small_runs import small
from tests.tools.export.checkpoints import leave
from zpp_lab.models import build_model
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export import export_hf

BPE = ("data.tokenizer=bpe", "data.vocab_size=280")


def folder_of(path: Path, kind: str, **options: object) -> Path:
    """A random model of transformers, saved."""
    model = build_model(settings(kind, {"vocab_size": 300, **options}), 300, "cpu")
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def test_another_tokenizer(tmp_path: Path) -> None:
    own, bpe = tmp_path / "run", tmp_path / "bpe"
    leave(small(tmp_path))
    leave(small(tmp_path, *BPE, f"run.dir={bpe}"))
    tokens = folder_of(tmp_path / "folder", "llama")
    _tokenizer({"a": 0, "b": 1}, tokens)
    with pytest.raises(ValueError, match="--data"):
        evaluate([tokens], data=own)
    _tokenizer({"a": 0, "b": 1}, bpe)
    assert evaluate([tokens], data=bpe)[0].tokens > 0
    _tokenizer({"a": 1, "b": 0}, bpe)
    with pytest.raises(ValueError, match="tokenizer"):
        evaluate([tokens], data=bpe)


def _tokenizer(vocabulary: dict[str, int], folder: Path) -> None:
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))


def test_longer_windows_than_positions(tmp_path: Path) -> None:
    """Learnt positions would be an IndexError, on a GPU one that ends the process."""
    leave(small(tmp_path))
    short = folder_of(tmp_path / "folder", "opt", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"data\.seq_len=8"):
        evaluate([short], data=tmp_path / "run")


def test_a_model_that_sees_what_it_is_to_predict(tmp_path: Path) -> None:
    leave(small(tmp_path))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **sizes, intermediate_size=24, vocab_size=300, initializer_range=0.5
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="causal"):
        evaluate([tmp_path / "folder"], data=tmp_path / "run")


def test_a_damaged_record(tmp_path: Path) -> None:
    """Without it nobody knows what the weights are to be rounded to."""
    leave(small(tmp_path))
    out = tmp_path / "folder"
    export_hf(tmp_path / "run", out)
    (out / "zpp_lab.json").write_text('{"run": {}, "dtype": "fp32"}')
    with pytest.raises(ValueError, match=r"zpp_lab\.json"):
        evaluate([out], data=tmp_path / "run")
