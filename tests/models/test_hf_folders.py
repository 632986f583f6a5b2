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
    left = {n: t for n, t in state.items() if n not in gone}
    save_file(left, file)
    cfg = settings(kind, path=str(tmp_path), weights="pretrained")
    with pytest.raises(ValueError, match=", ".join(gone)):
        build_model(cfg, VOCAB)
    extra = {f"{name}.odd": torch.ones(2) for name in gone}
    both = f"2 tensors missing: {', '.join(gone)}; 2 tensors not in the model: {', '.join(extra)}"
    save_file(left | extra, file)
    with pytest.raises(ValueError, match=both):
        build_model(cfg, VOCAB)
    save_file(state | extra, file)
    with pytest.raises(ValueError, match=", ".join(extra)):
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


def pretrained(folder: Path) -> None:
    build_model(settings("llama", path=str(folder), weights="pretrained"), VOCAB)


@pytest.mark.parametrize("keep", [0, 5, 100, -7])
def test_a_file_that_is_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    """A header that is cut, and tensors that are."""
    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        pretrained(tmp_path)


def test_a_shard_that_is_cut_short_or_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_size="4KB")
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = load_file(first)
    gone = sorted(whole)[0]
    save_file({n: t for n, t in whole.items() if n != gone}, first)
    with pytest.raises(ValueError, match=f"{gone} in {first.name}"):
        pretrained(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(ValueError, match=first.name):
        pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    with pytest.raises(ValueError, match=r"index\.json"):
        pretrained(tmp_path)


def test_pointers_and_pickles_are_told_from_weights(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        pretrained(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        pretrained(tmp_path)
