"""A run's adapters alone, in the files that peft writes and loads.

    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [rank, in], lora_B [out, rank]
    adapter_config.json         the settings of peft.LoraConfig

Modules have transformers' names, so the built-in decoder's adapters fit the LlamaForCausalLM that
it started from. Whoever loads them on an unquantized base gets another base than the run trained
on, unless the run had none quantized: `--to hf` writes the two together as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.schema import Config
from zpp_lab.models import build_model
from zpp_lab.models.llama_hf import hf_name, to_halves, turned
from zpp_lab.models.lora import A, inputs_first, is_adapter
from zpp_lab.runs.checkpoint.read import SavedWeights, newest
from zpp_lab.tools.export.card import adapter_text, write_readme
from zpp_lab.tools.export.model import Exported, new_folder, run_config
from zpp_lab.tools.export.shards import write_safetensors

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def export_peft(run: Path, out: Path, license: str | None = None) -> Exported:
    """Write the newest adapters of the run in `run` to the new folder `out`, in fp32.

    ValueError when there is no run or checkpoint, no adapters, or `out` is there already.
    """
    with new_folder(out) as folder:
        config = run_config(run)
        if not config.model.lora.on:
            raise ValueError(f"{run} has no adapters (model.lora.rank=0): use --to hf")
        saved = newest(run)
        names = {_their_name(config, n): n for n in saved.shapes if is_adapter(n)}
        shapes = {theirs: saved.shapes[n] for theirs, n in names.items()}
        nbytes = write_safetensors(
            folder, shapes, _reader(config, saved, names), torch.float32, limit=2**62
        )
        (folder / "model.safetensors").rename(folder / WEIGHTS)
        text = json.dumps(_settings(config, saved, sorted(names)), indent=2, sort_keys=True)
        (folder / SETTINGS).write_text(text + "\n")
        write_readme(folder, config, adapter_text(config, saved.step), license, library="peft")
    return Exported(saved.step, len(names), nbytes)


def _their_name(config: Config, name: str) -> str:
    module, _, which = name.rpartition(".")
    return f"base_model.model.{_their_module(config, module)}.{which}.weight"


def _their_module(config: Config, module: str) -> str:
    if config.model.name == "hf":
        return module
    return hf_name(f"{module}.weight").removesuffix(".weight")


def _reader(config: Config, saved: SavedWeights, names: dict[str, str]) -> Callable[[str], Tensor]:
    """B's rows are the layer's own, in the order that the folder's model wants."""
    ours = config.model.name == "llama"

    def read(theirs: str) -> Tensor:
        module, _, which = names[theirs].rpartition(".")
        value = saved.read(names[theirs])
        rows_move = ours and which != A and turned(f"{module}.weight")
        return to_halves(value, config.model.dim // config.model.heads) if rows_move else value

    return read


def _settings(config: Config, saved: SavedWeights, names: list[str]) -> dict[str, Any]:
    """The fields of peft.LoraConfig that say how to load; the others have their defaults."""
    lora = config.model.lora
    vocabulary = int(saved.marks["embed.weight"][1]) if "embed.weight" in saved.marks else 0
    model = build_model(config.model, vocabulary, "meta")
    adapted = [n for n, m in model.named_modules() if hasattr(m, A)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(inputs_first(model, f"{n}.weight") for n in adapted),
        "target_modules": _targets(config, model, adapted),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _targets(config: Config, model: nn.Module, adapted: list[str]) -> list[str]:
    """The layers' last names where these name no others, else their whole names."""
    short = {_last(_their_module(config, n)) for n in adapted}
    others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in adapted]
    clash = any(_last(_their_module(config, n)) in short for n in others)
    return sorted({_their_module(config, n) for n in adapted} if clash else short)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
