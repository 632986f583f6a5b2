"""Which kind of parameter a name stands for.

Telemetry, reports and recipes speak of "the attention weights" or "the norms".
This file maps a parameter's dotted name to that kind, for the built-in decoder
and for the usual names of Hugging Face models.
"""

from __future__ import annotations

from typing import Literal, get_args

ParamClass = Literal["embedding", "attention", "mlp", "norm", "head", "other"]
PARAM_CLASSES: tuple[ParamClass, ...] = get_args(ParamClass)

_HEADS = {"head", "lm_head", "embed_out", "output", "score"}
_EMBEDDINGS = {"wte", "wpe"}
_NORMS = {"ln", "ln_f", "ln_1", "ln_2"}
# Last projections of a block's two halves: ours, Llama's and Qwen's, OPT's, GPT-2's, GPT-J's,
# GPT-NeoX's and BLOOM's, whose attention ends with a `dense`.
_RESIDUAL = {"wo", "w_down", "o_proj", "down_proj", "out_proj", "fc2", "c_proj", "fc_out"}
_RESIDUAL |= {"dense_4h_to_h"}
_ATTENTION = {"attention", "self_attention", "self_attn"}


def param_class(name: str) -> ParamClass:
    """Return the kind of the parameter called `name`, such as "layers.0.attention.wq.weight". A
    name that fits no kind is "other"."""
    parts = name.lower().split(".")
    if any("norm" in part or part in _NORMS for part in parts):
        return "norm"  # first: "attention_norm" is a norm
    if parts[0] in _HEADS:
        return "head"
    if any("attn" in part or "attention" in part for part in parts):
        return "attention"
    if any("mlp" in part or "feed_forward" in part or "ffn" in part for part in parts):
        return "mlp"
    if any("embed" in part or part in _EMBEDDINGS for part in parts):
        return "embedding"
    return "other"


def feeds_residual(name: str) -> bool:
    """Return whether the output of the parameter `name` is added to the residual stream. Experts in
    one parameter have their projection's name themselves ("mlp.experts.down_proj")."""
    *_, parent, module, own = ["", "", *name.split(".")]
    return bool(_RESIDUAL & {module, own}) or (module == "dense" and parent in _ATTENTION)
