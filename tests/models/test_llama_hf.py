"""The built-in decoder and LlamaForCausalLM are one function under two orders of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model

VOCAB = 37
OURS = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24}
THEIRS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}


def saved(folder: Path, **changes: Any) -> Any:
    """A LlamaForCausalLM with weights large enough that positions matter, also in `folder`."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIRS, **changes))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="5KB")
    return model.eval()


def normed(folder: Path) -> Any:
    torch.manual_seed(0)
    shape = {**THEIRS, "head_dim": 8}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


def ours(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**OURS, **changes}, path=str(folder), weights="pretrained")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 70.0])
def test_a_folder_of_transformers(tied: bool, theta: float, tmp_path: Path) -> None:
    theirs = saved(tmp_path, tie_word_embeddings=tied, rope_theta=theta)
    model = build_model(ours(tmp_path, tied_head=tied, rope_theta=theta), VOCAB)
    x = torch.randint(0, VOCAB, (2, 15))
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


def test_a_folder_with_normed_queries_and_keys(tmp_path: Path) -> None:
    theirs = normed(tmp_path)
    model = build_model(ours(tmp_path, qk_norm=True), VOCAB)
    x = torch.randint(0, VOCAB, (2, 15))
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"model\.qk_norm=true"):
        build_model(ours(tmp_path), VOCAB)
    saved(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"model\.qk_norm=false"):
        build_model(ours(tmp_path / "llama", qk_norm=True), VOCAB)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"use_sliding_window": false', '"use_sliding_window": true')
    )
    with pytest.raises(ValueError, match="model=hf"):
        build_model(ours(tmp_path, qk_norm=True), VOCAB)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rows_are_those_of_the_whole(tmp_path: Path, qk_norm: bool) -> None:
    """At any place, inside a head too."""
    (normed if qk_norm else saved)(tmp_path)
    model = build_model(ours(tmp_path, qk_norm=qk_norm), VOCAB)
    start = model.start(0)
    for name, p in model.named_parameters():
        for cut in (0, 3, p.shape[0] // 3, p.shape[0]):
            parts = [start.rows(name, 0, cut), start.rows(name, cut, p.shape[0])]
            assert torch.equal(torch.cat(parts), p), name


@pytest.mark.parametrize(
    ("changes", "vocab", "says"),
    [
        ({"dim": 64}, VOCAB, r"model\.dim is 32 there, 64 here"),
        ({"norm_eps": 1e-6}, VOCAB, r"model\.norm_eps is 1e-05 there"),
        ({"rope_theta": 5.0}, VOCAB, r"model\.rope_theta is 10000\.0 there"),
        ({"tied_head": True}, VOCAB, r"model\.tied_head is False there"),
        ({}, 256, r"model\.vocab_size is 37 there, 256 here"),
    ],
)
def test_another_shape_is_named(
    changes: dict[str, Any], vocab: int, says: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    with pytest.raises(ValueError, match=says):
        build_model(ours(tmp_path, **changes), vocab)
