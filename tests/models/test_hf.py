"""Hugging Face models: random starts, safetensors, units, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.hf_cases import CASES, NAMED_OTHERWISE, VOCAB, settings
from tests.small_runs import small
from zpp_lab.models import build_model
from zpp_lab.models.hf_start import SavedStart
from zpp_lab.models.start import places
from zpp_lab.runs.checkpoint.tensor_file import read_layout
from zpp_lab.train.trainer import run

KINDS = [*CASES, *NAMED_OTHERWISE]
QUICK = ("gpt2", "qwen2")  # in several files


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def saved(kind: str, folder: Path, **how: Any) -> Any:
    """A model of transformers with random weights, written to `folder`; returns it."""
    made = build_model(settings(kind), VOCAB, "meta")
    plain = transformers.AutoModelForCausalLM.from_config(made.config, dtype=torch.float32)
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_(0, 0.05)
    plain.save_pretrained(folder, **how)
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_start_has_the_spread_that_transformers_gives(kind: str) -> None:
    model = build_model(settings(kind), VOCAB, seed=4)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        mine, other = torch.std_mean(p.detach()), torch.std_mean(theirs[name].detach())
        assert mine[0].item() == pytest.approx(other[0].item(), rel=0.25), name
        assert mine[1].item() == pytest.approx(other[1].item(), abs=0.01), name


def test_rows_are_those_of_the_whole() -> None:
    model = build_model(settings("opt"), VOCAB, seed=4)
    start = model.start(4)
    for name, p in model.named_parameters():
        cut = p.shape[0] // 3
        parts = [start.rows(name, 0, cut), start.rows(name, cut, p.shape[0])]
        assert torch.equal(torch.cat(parts), p), name


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        *(("one", kind) for kind in KINDS),
        *(("several", kind) for kind in QUICK),
        *(pytest.param("several", k, marks=pytest.mark.slow) for k in KINDS if k not in QUICK),
    ],
)
def test_a_folder_of_safetensors(kind: str, files: str, tmp_path: Path) -> None:
    plain = saved(kind, tmp_path, max_shard_size="4KB" if files == "several" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "several")
    model = build_model(settings(kind, path=str(tmp_path), weights="pretrained"), VOCAB)
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    x = tokens()
    loss = model(x[:, :-1], x[:, 1:])
    theirs = plain(input_ids=x, labels=x).loss
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert torch.equal(model(x), plain.train()(input_ids=x).logits)


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    cfg = settings("qwen2", path=str(tmp_path), weights="pretrained")
    for model in (build_model(cfg, VOCAB), build_model(settings("qwen2"), VOCAB)):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert max(len(p) for p in places(model).values()) == 2
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, file)
    build_model(cfg, VOCAB)  # said twice, and alike
    state["lm_head.weight"] += 1
    save_file(state, file)
    with pytest.raises(ValueError):
        build_model(cfg, VOCAB)


def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    """The file may end after them."""
    saved("llama", tmp_path)
    start = build_model(settings("llama", path=str(tmp_path), weights="pretrained"), VOCAB, "meta")
    made, name = start.start(0), "model.embed_tokens.weight"
    assert isinstance(made, SavedStart)
    file = tmp_path / "model.safetensors"
    wanted, place = load_file(file)[name][3:7], read_layout(file)[name]
    made.rows(name, 0, 1)
    os.truncate(file, place.start + 7 * place.row)
    assert torch.equal(made.rows(name, 3, 7), wanted)
    with pytest.raises(OSError, match="shorter"):
        made.rows(name, 3, 8)


def test_units_are_the_layers_or_what_is_named() -> None:
    names = {
        kind: [n for n, _ in build_model(settings(kind), VOCAB, "meta").units()] for kind in KINDS
    }
    assert names["opt"] == ["model.decoder.layers.0", "model.decoder.layers.1"]
    assert names["gpt2"] == ["transformer.h.0", "transformer.h.1"]
    named = build_model(settings("llama", units="model.layers"), VOCAB, "meta")
    assert [n for n, _ in named.units()] == names["llama"]
    with pytest.raises(ValueError, match=r"model\.layers"):
        build_model(settings("llama", units="layers"), VOCAB, "meta")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("opt", {"dropout": 0.1}, r"model\.options=\{dropout: 0\.0\}"),
        ("llama", {"hidden": 4}, r"model\.options: .*hidden_size"),
        ("llama", {"vocab_size": 30}, "vocabulary of 30 is smaller than the tokenizer's 37"),
        ("llama", {"model_type": "lama"}, r"model\.options\.model_type='lama'"),
    ],
)
def test_mistakes_name_the_fix(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_model(settings(kind, options), VOCAB, "meta")


def test_a_run_trains_one(tmp_path: Path) -> None:
    config = replace(small(tmp_path), model=settings("llama", {"vocab_size": 256}))
    summary = run(config)
    assert summary["heldout_loss"] < 5.54  # ln 256
    assert summary["model_parameters"] == 2 * 256 * 16 + 2 * (3 * 16 * 16 + 3 * 24 * 16 + 32) + 16
