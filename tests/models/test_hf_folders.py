"""Folders of the families that people finetune: what is missing or left over is listed, tables that
older versions saved are passed over, and a base model's names are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.hf_cases import CASES, VOCAB, settings
from tests.models.test_hf import saved
from zpp_lab.models import build_model

pytest.importorskip("transformers")
LEFT = {  # tensors that published folders hold beside the model's own
    "llama": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "gpt_neox": "gpt_neox.layers.1.attention.rotary_emb.inv_freq",
    "qwen2": "model.layers.1.self_attn.rotary_emb.inv_freq",
}


@pytest.mark.parametrize("kind", CASES)
def test_missing_and_left_over_tensors_are_listed(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    gone = sorted(name for name in state if "layers.1." in name)[:2]
    save_file({n: t for n, t in state.items() if n not in gone}, file)
    cfg = settings(kind, path=str(tmp_path), weights="pretrained")
    with pytest.raises(ValueError, match=f"2 tensors missing: {', '.join(gone)}"):
        build_model(cfg, VOCAB)
    extra = {f"{name}.odd": torch.ones(2) for name in gone}
    save_file(state | extra, file)
    with pytest.raises(ValueError, match=f"2 tensors not in the model: {', '.join(extra)}"):
        build_model(cfg, VOCAB)


@pytest.mark.parametrize("kind", LEFT)
def test_tables_of_older_versions_are_passed_over(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {LEFT[kind]: torch.ones(4)}
    if kind == "gpt_neox":
        state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(state, file)
    build_model(settings(kind, path=str(tmp_path), weights="pretrained"), VOCAB)


def test_a_base_models_names_are_known(tmp_path: Path) -> None:
    """As OPT's published folders have them, without `model.` in front."""
    plain = saved("opt", tmp_path)
    file = tmp_path / "model.safetensors"
    state = {n.removeprefix("model."): t for n, t in load_file(file).items()}
    save_file(state, file)
    model = build_model(settings("opt", path=str(tmp_path), weights="pretrained"), VOCAB)
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
