"""Tensor parts of transformers' Llama, Mistral, Qwen2 and Qwen3.

A part is the whole module of transformers with its matrices cut, as `cut.py` cuts the decoder's:
its attention counts heads by the projections' rows. Norms, attention and MLP are transformers' own,
so are rotary positions of every kind; the order around them, embedding, head and loss are
`cut.py`'s. Other families differ in what surrounds the modules, such as Gemma's scaled embeddings,
although their `base_model_tp_plan` is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models.cut import Parted, PartPieces, PartStart, check_cut, cut_dim, cut_parameters
from zpp_lab.models.hf import build_hf, read_config
from zpp_lab.models.start import Start

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build_hf_part(cfg: ModelConfig, vocab_size: int, tp: int, part: int) -> nn.Module:
    """Build a part of the model that `cfg` names, on the meta device. ValueError where it has no
    such parts."""
    settings = read_config(cfg)
    if settings.model_type not in FAMILIES:
        raise ValueError(
            f"cluster.tp={tp} is not built for model_type={settings.model_type}: use "
            f"{', '.join(FAMILIES)}, or cluster.tp=1"
        )
    sizes = {f"options.{name}": getattr(settings, name) for name in SIZES}
    check_cut(cfg, settings.vocab_size, tp, sizes)
    model: Any = build_hf(cfg, vocab_size)
    for name, p in model.named_parameters():
        if (cut_dim(name) or 0) >= p.ndim:  # every part would add it
            raise ValueError(
                f"cluster.tp={tp} is not built for {name}: use model.options={{attention_bias: "
                "false, mlp_bias: false}, or cluster.tp=1"
            )
    cut_parameters(model, tp)
    embed = model.get_input_embeddings()
    if embed.padding_idx is not None:  # whose row gets no gradient
        own = embed.padding_idx - part * embed.weight.shape[0]
        embed.padding_idx = own if 0 <= own < embed.weight.shape[0] else None
    model.tp, model.part = tp, part
    model.__class__ = _under(PartModel, type(model))
    for _, block in model.units():
        block.__class__ = _under(PartLayer, type(block))
    model.join((model,), None)
    return model  # type: ignore[no-any-return]


def _under(mixin: type, kind: type) -> type:
    return type(kind.__name__, (mixin, kind), {})


class PartModel(Parted):
    """What a part of a causal language model has before its own class."""

    model: Any
    lm_head: nn.Linear
    gives_token_scores = True
    same_every_step = False  # a transfer between parts is part of every forward
    turns: tuple[Tensor, Tensor]  # cosines and sines of positions

    @staticmethod
    def crossing(block: int, xs: list[Tensor]) -> list[Tensor]:
        return xs

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        return self.model.embed_tokens  # type: ignore[no-any-return]

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self.model.norm  # type: ignore[no-any-return]

    def _head(self) -> Tensor:
        return self.lm_head.weight

    def see(self, tokens: Tensor) -> None:
        """Prepare a forward. ValueError where it has more tokens than the model has positions, or
        than its attention sees at once."""
        super().see(tokens)
        own, length = self.model.config, tokens.shape[1]
        for key in ("max_position_embeddings", "sliding_window"):
            most = getattr(own, key, None)
            if most and length > most:
                raise ValueError(
                    f"data.seq_len={length} with {key}={most}: use at most {most}, or "
                    f"model.options={{{key}: …}}"
                )

    def enter(self, tokens: Tensor) -> list[Tensor]:
        xs = super().enter(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self.turns = self.model.rotary_emb(xs[0], positions)
        return xs

    def start(self, seed: int) -> Start:
        return PartStart(super().start(seed), self)  # type: ignore[misc]


class PartLayer(PartPieces):
    """What a layer of a part has before its own class."""

    pieces = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))

    def run(self, body: str, x: Tensor) -> Tensor:
        if body == "mlp":
            return super().run(body, x)
        (model,), attend = self.model, getattr(self, body)
        made: Tensor = attend(x, position_embeddings=model.turns, attention_mask=None)[0]
        return made
