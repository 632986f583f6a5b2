"""From a run's folder to a folder with config.json and safetensors.

The built-in decoder becomes a LlamaForCausalLM; a model of transformers keeps its own names.
The weights are the fp32 masters, so that what is written does not depend on the recipe's wires.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zpp_lab.config import Config, load
from zpp_lab.export.merged import merge_adapters
from zpp_lab.export.saved import SavedWeights, newest
from zpp_lab.export.shards import LIMIT, write_safetensors
from zpp_lab.export.tokenizer import closing_token, write_tokenizer
from zpp_lab.models.build import build_model
from zpp_lab.models.llama_hf import hf_config, hf_name, to_halves, turned
from zpp_lab.tracking.folder import CONFIG, read_yaml

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Target:
    """What a folder will hold: its config.json, and of each tensor the shape and how to read it."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Exported:
    step: int
    tensors: int
    nbytes: int


def export_hf(run: Path, out: Path, dtype: str = "fp32", limit: int = LIMIT) -> Exported:
    """Write the newest weights of the run in `run` to the new folder `out`.

    dtype: fp32, bf16 or fp16; limit: bytes of one file. The folder appears when it is whole.
    Adapters are added to their frozen base.
    ValueError when there is no run or checkpoint, or `out` is there already.
    """
    if out.exists():
        raise ValueError(f"{out} is there already: name a new folder, or delete it")
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is no run's folder: it has no {CONFIG}")
    config = load(Config, read_yaml(run / CONFIG))
    config, saved = merge_adapters(config, newest(run))
    target = (_hf if config.model.name == "hf" else _llama)(config, saved)
    partial_folder = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        nbytes = write_safetensors(
            partial_folder, target.shapes, lambda n: target.read[n](), EXPORT_DTYPES[dtype], limit
        )
        _write_config(partial_folder, target.config, dtype)
        write_tokenizer(config.data, partial_folder)
        partial_folder.rename(out)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return Exported(saved.step, len(target.shapes), nbytes)


def _write_config(folder: Path, config: dict[str, Any], dtype: str) -> None:
    text = json.dumps(
        {**config, "dtype": str(EXPORT_DTYPES[dtype]).removeprefix("torch.")},
        indent=2,
        sort_keys=True,
    )
    (folder / "config.json").write_text(text + "\n")


def _llama(config: Config, saved: SavedWeights) -> Target:
    model = config.model
    vocabulary = saved.shapes["embed.weight"][0]
    _same_names(saved, build_model(model, model.vocab_size or vocabulary, "meta"))
    head_dim = model.dim // model.heads

    def read(name: str) -> Tensor:
        value = saved.read(name)
        return to_halves(value, head_dim) if turned(name) else value

    return Target(
        hf_config(model, vocabulary, config.data.seq_len, closing_token(config.data)),
        {hf_name(n): shape for n, shape in saved.shapes.items()},
        {hf_name(n): partial(read, n) for n in saved.shapes},
    )


def _hf(config: Config, saved: SavedWeights) -> Target:
    """Weights by their own names, once where they are tied, and the buffers that a folder holds."""
    model = build_model(config.model, 0, "meta")
    _same_names(saved, model)
    read: dict[str, Callable[[], Tensor]] = {n: partial(saved.read, n) for n in saved.shapes}
    shapes = dict(saved.shapes)
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    kept = {n: b for n, b in model.state_dict().items() if n not in parameters}
    if kept:
        start = model.start(config.seed)
        for name, value in kept.items():
            own = start.buffer(name)
            found = value if own is None else own
            shapes[name], read[name] = tuple(found.shape), partial(_itself, found)
    return Target(_hf_config(model), shapes, read)


def _hf_config(model: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(model.config.to_json_string())
    return {**values, "architectures": [type(model).__name__]}


def _itself(value: Tensor) -> Tensor:
    return value


def _same_names(saved: SavedWeights, model: Any) -> None:
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    differing = sorted(n for n in {*shapes, *saved.shapes} if shapes.get(n) != saved.shapes.get(n))
    if differing:
        raise ValueError(
            f"the checkpoint is of another model than the run's config; it differs in "
            f"{', '.join(differing)}"
        )
