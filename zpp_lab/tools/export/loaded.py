"""A folder's model by transformers, its weights rounded as training rounded them.

A packed weight is unpacked by the first forward, in the dtype of its scales. A run in bf16 rounds
each weight to bf16 after decoding, so a folder with fp32 scales holds numbers that become the run's
weights by that same rounding. It must not touch the scales before, nor the buffers ever: a model's
`.to(torch.bfloat16)` rounds the rotary frequencies too, and with them every position.

`check_comparable` asks whether such a model can be measured on a run's held-out tokens. A model of
another tokenizer reads other words into the same numbers, one that sees the tokens it is asked for
needs no language at all, and both give a loss like any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.data import DataConfig
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import library, open_outside
from zpp_lab.tools.export.card import RECORD, rounded_to

_TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "spiece.model")


def check_comparable(
    model: Any, path: Path, source: Path, data: DataConfig, window: Tensor
) -> None:
    """ValueError when the model in `path` cannot read the held-out tokens of the run `source`,
    or cannot be asked for them. window: int64 [1, T], some of those tokens."""
    _same_tokenizer(path, source, data)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < window.shape[1]:
        raise ValueError(
            f"{path} knows {limit} positions, the windows of {source} have {window.shape[1]}: name "
            f"with --data a run with data.seq_len={limit} or less"
        )
    if _sees_ahead(model, window):
        raise ValueError(
            f"{path} is no causal language model: it sees the tokens that it is to predict"
        )


def _same_tokenizer(path: Path, source: Path, data: DataConfig) -> None:
    """Of a folder without a tokenizer nothing is known."""
    there = [name for name in _TOKENIZERS if (path / name).is_file()]
    if there and data.tokenizer == "bytes":
        raise ValueError(
            f"{path} has a tokenizer of its own ({there[0]}), {source} reads bytes: name with "
            "--data a run of that tokenizer"
        )
    if TOKENIZER not in there or data.tokenizer == "bytes":
        return
    own = source / TOKENIZER if data.tokenizer == "bpe" else open_outside(data).file
    if own.is_file() and not _vocabulary(own).items() <= _vocabulary(path / TOKENIZER).items():
        raise ValueError(f"{path} has another tokenizer than {source}: they differ in their tokens")


def _vocabulary(file: Path) -> dict[str, int]:
    tokenizers = library(f"{file.parent}, with a tokenizer,")
    try:
        found: dict[str, int] = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # of its own kind
        raise ValueError(f"{file} is no tokenizer: {error}") from None
    return found


@torch.no_grad()
def _sees_ahead(model: Any, window: Tensor) -> bool:
    """Whether another last token changes what the model says before it, by more than rounding."""
    first = window[:, : min(16, window.shape[1])]
    if first.shape[1] < 2:
        return False
    other = first.clone()
    other[:, -1] = torch.where(first[:, -1] == 0, 1, 0)
    a, b = (model(input_ids=t, use_cache=False).logits[:, :-1].float() for t in (first, other))
    return bool((a - b).abs().max() > 0.05 * a.std())


def load_folder(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The model in `path` on the CPU, in evaluation mode.

    Packed weights are unpacked, and of a folder that we quantized they are those that training
    computed with. dtype: what it computes in, whatever the weights were rounded to; None: as the
    folder says, or as training did. ValueError when it cannot be loaded, or lacks weights.
    """
    model = _whole_model(path).eval()
    own = folder_record(path)
    _unpack(model)
    if own:
        _round(model, DTYPES[rounded_to(own["dtype"], own["computed_in"])])
    if dtype is not None:
        _round(model, dtype)
    return model


def folder_record(path: Path) -> dict[str, Any]:
    """What a folder that we quantized says of itself; of another one nothing."""
    file = path / RECORD
    if not file.is_file():
        return {}
    try:
        said = dict(json.loads(file.read_text(encoding="utf-8")))
        if {said["dtype"], said["computed_in"]} <= set(DTYPES) and isinstance(said["run"], dict):
            return said
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{file} does not say how the folder's weights were made: export the run again"
    )


def _whole_model(path: Path) -> Any:
    """transformers draws weights that are not there at random and goes on: here that is an
    error."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{path} is a model for transformers: pip install 'zpp_lab[hf]'") from None
    library: Any = transformers
    try:
        model, told = library.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    except Exception as error:  # of several libraries; an absent package for a quantized one too
        said = str(error).strip().partition("\n")[0]  # some go on to list every model there is
        raise ValueError(
            f"{path}: transformers cannot load it ({type(error).__name__}: {said}); "
            "fetch it again, or let a release of transformers that knows it"
        ) from None
    for what, key in (("missing", "missing_keys"), ("of another shape", "mismatched_keys")):
        names = sorted(str(name) for name in told[key])
        if names:
            raise ValueError(f"{path}: {len(names)} tensors {what}: {', '.join(names)}")
    return model


@torch.no_grad()
def _unpack(model: Any) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)


def _round(model: Any, dtype: torch.dtype) -> None:
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
