"""The built-in decoder under Hugging Face's names: LlamaForCausalLM, or with `model.qk_norm`
Qwen3ForCausalLM, in both directions; with `model.scalar_head` their …ForSequenceClassification.

The two compute the same but turn other pairs of a head's numbers: ours the neighbours
(2i, 2i + 1), theirs i and i + head_dim / 2. So rows of the query and key projections, and of the
scales of their norms, change places inside each head; all else only changes its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.files import damaged, parse_json
from zpp_lab.models.start import SCORE, Start, WeightFiles, drop_heads

_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}
_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    SCORE: "score.weight",  # of a LlamaForSequenceClassification
}


_SETTINGS = {  # their names of what model.… sets
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied_head",
}
# What transformers takes where a config.json is silent.
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}


def hf_name(name: str) -> str:
    """Return LlamaForCausalLM's name of our parameter `name`."""
    if name in _ENDS:
        return _ENDS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_PARTS[rest.removesuffix('.weight')]}.weight"


def turned(name: str) -> bool:
    """Return whether the rows of `name` are rotated by position, so that their order differs."""
    return name.endswith((".wq.weight", ".wk.weight", ".q_norm.weight", ".k_norm.weight"))


def to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads * head_dim, …] from ours to Hugging Face's."""
    heads = weight.shape[0] // head_dim
    return weight.unflatten(0, (heads, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Invert `to_halves`."""
    heads = weight.shape[0] // head_dim
    return weight.unflatten(0, (heads, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def hf_config(cfg: ModelConfig, vocab_size: int, seq_len: int, end: int | None) -> dict[str, Any]:
    """Return config.json for a model of `cfg`; `end` closes a document. A scalar head is read at a
    row's last token that is no padding."""
    head = "SequenceClassification" if cfg.scalar_head else "CausalLM"
    return {
        "architectures": [f"{'Qwen3' if cfg.qk_norm else 'Llama'}For{head}"],
        "model_type": _kind(cfg),
        "max_position_embeddings": seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "rope_scaling": None,
        **_shape(cfg, vocab_size),
        **({"num_labels": 1, "pad_token_id": end} if cfg.scalar_head else {}),
    }


def _shape(cfg: ModelConfig, vocab_size: int | None) -> dict[str, Any]:
    own = {theirs: getattr(cfg, ours) for theirs, ours in _SETTINGS.items()}
    return {**own, "vocab_size": vocab_size, "head_dim": cfg.dim // cfg.heads}


def _kind(cfg: ModelConfig) -> str:
    return "qwen3" if cfg.qk_norm else "llama"


class LlamaStart(Start):
    """Weights of a LlamaForCausalLM folder for the built-in decoder, of a Qwen3ForCausalLM one with
    `model.qk_norm`; rows are read on their own. ValueError when its config.json describes another
    model, or tensors are missing, left over or of another shape; it lists them."""

    def __init__(self, model: nn.Module, cfg: ModelConfig, vocab_size: int, seeded: Start) -> None:
        """seeded: of a scalar head that the folder lacks."""
        assert cfg.path is not None, "ModelConfig asks for a path"
        self.head_dim, self.tied = cfg.dim // cfg.heads, cfg.tied_head
        self.stored = WeightFiles(Path(cfg.path))
        check_config(Path(cfg.path), cfg, vocab_size)
        found = {n for n in self.stored.files if not n.endswith("rotary_emb.inv_freq")}
        found -= {_ENDS["head.weight"]} if self.tied else set()  # some folders hold it twice
        wanted = {hf_name(n): p.shape for n, p in model.named_parameters()}
        there = {n: self.stored.shape(n) for n in found}
        self.seeded = seeded if drop_heads(wanted, there, _ENDS["head.weight"]) else None
        self.stored.check(wanted, there)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        if name == SCORE and self.seeded:
            return self.seeded.rows(name, first, last)
        if not turned(name):
            return self._plain(name, first, last)
        start = first - first % self.head_dim  # whole heads: a head's rows change places
        stop = -(-last // self.head_dim) * self.head_dim
        heads = to_pairs(self.stored.rows(hf_name(name), start, stop), self.head_dim)
        return heads[first - start : last - start]

    def _plain(self, name: str, first: int, last: int) -> Tensor:
        rows = self.stored.rows(hf_name(name), first, last)
        twice = self.tied and name == "embed.weight" and _ENDS["head.weight"] in self.stored.files
        if twice and not torch.equal(rows, self.stored.rows(_ENDS["head.weight"], first, last)):
            raise ValueError(
                f"{self.stored.folder}: embedding and head are one parameter in this model, but "
                "differ; set model.tied_head=false"
            )
        return rows


def check_config(folder: Path, cfg: ModelConfig, vocab_size: int | None) -> None:
    """ValueError where the folder's model has other settings; vocab_size: None where the tokenizer
    is not known yet."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={folder} has no config.json: set a model's folder")
    found = parse_json(path, "download the model again")
    if not isinstance(found, dict):
        raise damaged(path, "no mapping", "download the model again")
    theirs: dict[str, Any] = _DEFAULTS | found
    if theirs.get("model_type") != _kind(cfg):
        other = {"llama": "model.qk_norm=false", "qwen3": "model.qk_norm=true"}
        fix = f"{other.get(str(theirs.get('model_type')), 'model=hf')} to train it"
        raise ValueError(f"{path}: a {theirs.get('model_type')} model; set {fix}")
    if theirs.get("use_sliding_window"):
        raise ValueError(f"{path}: sliding-window attention; set model=hf to train it")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{path}: rotary positions are scaled, {rope}; set model=hf to train it")
    theirs["rope_theta"] = rope.get("rope_theta", theirs["rope_theta"])
    own = {**_shape(cfg, vocab_size), "hidden_act": "silu"}
    wrong = [
        f"{f'model.{_SETTINGS[key]}' if key in _SETTINGS else key} is {theirs[key]} there, "
        f"{value} here"
        for key, value in own.items()
        # theirs, where None, follows from the others
        if value is not None and theirs.get(key) not in (value, None)
    ]
    if wrong:
        raise ValueError(
            f"{path} has other settings than this run: {'; '.join(wrong)}. Set them to the "
            "folder's values, or use model=hf, which reads them there"
        )
