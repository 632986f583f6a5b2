"""Tiny models of several families of transformers, as settings."""

from __future__ import annotations

from typing import Any

from zpp_lab.config.model import ModelConfig

VOCAB = 37
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 24, "num_key_value_heads": 1},
    "gpt_neox": {"intermediate_size": 24},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32, "dropout": 0},
    "qwen2": {"intermediate_size": 24, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
}
NAMED_OTHERWISE = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": VOCAB,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
}


def settings(kind: str, options: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """A model of `kind`; `options` change its own config."""
    own = {"model_type": kind, **(NAMED_OTHERWISE.get(kind) or {**SMALL, **CASES[kind]})}
    if "path" in changes:  # the folder says it
        own = {}
    own |= options or {}
    return ModelConfig(name="hf", preset="hf", options=own or None, **changes)
