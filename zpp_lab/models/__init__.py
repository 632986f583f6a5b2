"""Models that can be trained: the decoder, Hugging Face models, first weights, adapters.

A **start** gives the first weights, any rows of any parameter: from a seed, from safetensors, or
from a run. The **base** is what stays frozen under **adapters** (LoRA). A parameter's **class** is
its kind (attention, mlp, norm ...), found by its name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from zpp_lab.config.model import LoraConfig, ModelConfig
from zpp_lab.models.cut import (
    PartBlock,
    Parted,
    PartLlama,
    check_cut,
    cut_parameters,
    decoder_sizes,
    under,
)
from zpp_lab.models.init import initial_value
from zpp_lab.models.llama import Llama, rows_of_vocabulary
from zpp_lab.models.lora import add_adapters
from zpp_lab.models.params import PARAM_CLASSES, ParamClass, param_class
from zpp_lab.models.start import fill, materialize, whole

__all__ = [
    "PARAM_CLASSES",
    "Llama",
    "ParamClass",
    "build_model",
    "build_parts",
    "cut_model",
    "initial_value",
    "param_class",
]


def build_model(
    cfg: ModelConfig, vocab_size: int, device: str | torch.device = "cpu", seed: int = 0
) -> Any:
    """Build the module that `cfg` describes, in fp32 on `device`, its weights from `seed` or a
    folder.

    It maps tokens and targets to the loss, and has `units()`, the modules whose parameters travel
    together, and `start(seed)`, its first weights. With `cfg.lora` the model is frozen and its
    linear layers have adapters. `vocab_size` is the tokenizer's. On the meta device the parameters
    have shapes only and nothing is initialised. ValueError when the model's vocabulary is too small
    for the tokenizer.
    """
    base = partial(_plain, replace(cfg, lora=LoraConfig()), vocab_size)
    model = base()
    if cfg.lora.on:
        add_adapters(model, cfg.lora, base)
    if torch.device(device).type == "meta":
        return model
    materialize(model, device)
    fill(model, model.start(seed), whole, lambda p: p)
    return model


def _plain(cfg: ModelConfig, vocab_size: int) -> Any:
    if cfg.name == "hf":
        from zpp_lab.models.hf import build_hf

        return build_hf(cfg, vocab_size)
    with torch.device("meta"):
        return Llama(cfg, rows_of_vocabulary(cfg, vocab_size))


def build_parts(
    cfg: ModelConfig, vocab_size: int, tp: int, device: str | torch.device, seed: int = 0
) -> list[Parted]:
    """Build all parts of the model in fp32 on `device`, with the whole model's first weights; on
    the meta device shapes alone. ValueError where the model has no such parts."""
    parts: list[Any]
    if cfg.name == "hf":
        from zpp_lab.models.hf_cut import build_hf_part

        parts = [build_hf_part(cfg, vocab_size, tp, part) for part in range(tp)]
    else:
        vocab = rows_of_vocabulary(cfg, vocab_size)
        check_cut(cfg, vocab, tp, decoder_sizes(cfg))
        with torch.device("meta"):
            parts = [PartLlama(cfg, vocab, tp, part) for part in range(tp)]
    for model in parts if torch.device(device).type != "meta" else ():
        materialize(model, device)
        fill(model, model.start(seed), whole, lambda p: p)
    return parts


def cut_model(model: Any, tp: int, part: int) -> None:
    """Turn a whole model, with its weights, into part `part` of `tp`, in place: the decoder, or one
    of transformers. ValueError where it has no such parts."""
    changed = {name for name, m in model.named_modules() if "forward" in vars(m)}
    changed |= {n for n, m in model.named_modules() if getattr(m, "_compiled_call_impl", None)}
    if changed:
        raise ValueError(
            f"tp={tp}: the forward of {min(changed) or 'the model'} was replaced, as compile() or "
            "activation checkpointing do, which tensor parts do not have: leave that out"
        )
    if getattr(type(model), "forward", None) is not Llama.forward:
        from zpp_lab.models.hf_cut import cut_hf

        return cut_hf(model, tp, part)
    check_cut(model.cfg, model.vocab_size, tp, decoder_sizes(model.cfg))
    cut_parameters(model, tp, part)
    own: Any = model
    own.__class__ = PartLlama if type(model) is Llama else under(PartLlama, type(model))
    own.tp, own.part = tp, part
    for _, block in model.units():
        block.__class__ = PartBlock
    own.join((own,), None)
