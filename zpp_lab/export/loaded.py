"""A folder's model by transformers, its weights rounded as training rounded them.

A packed weight is unpacked by the first forward, in the dtype of its scales. A run in bf16 rounds
each weight to bf16 after decoding, so a folder with fp32 scales holds numbers that become the run's
weights by that same rounding. It must not touch the scales before, nor the buffers ever: a model's
`.to(torch.bfloat16)` rounds the rotary frequencies too, and with them every position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.export.card import RECORD
from zpp_lab.export.instructions import rounded_to


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
