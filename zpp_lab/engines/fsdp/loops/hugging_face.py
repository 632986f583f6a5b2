"""What the Trainer and accelerate of Hugging Face must know of a model that is sharded already."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor


def mark(model: nn.Module, ranks: int) -> None:
    """Mark a model as one that transformers has sharded over so many ranks.

    Trainer then wraps nothing, and saves and loads whole weights of models of transformers.
    """
    for module in model.modules():  # the outermost, which peft may have wrapped
        if hasattr(type(module), "_is_distributed_loading_by_transformers"):
            from transformers.distributed import DistributedConfig

            own: Any = module
            own._is_distributed_loading_by_transformers = True
            before = getattr(own.config, "distributed_config", None) or DistributedConfig()
            # from one rank it would save DTensors, which safetensors refuses
            own.config.distributed_config = replace(before, fsdp_size=max(ranks, 2))
            model.register_load_state_dict_pre_hook(_take_whole)
            if hasattr(model, "generate"):  # which calls an encoder alone
                register_fsdp_forward_method(model, "generate")
            break
    name = "is_distributed_loading_by_transformers"
    if not hasattr(model, name):  # Trainer takes other modules too
        setattr(model, name, True)


def _take_whole(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shard whole tensors that are about to be loaded, as Trainer's files have them."""
    for name, own in module.state_dict().items():
        given = state.get(prefix + name)
        if isinstance(own, DTensor) and given is not None and not isinstance(given, DTensor):
            mesh, placements = own.device_mesh, own.placements
            state[prefix + name] = distribute_tensor(given, mesh, placements, src_data_rank=None)


def refuse() -> None:
    """Raise ValueError where TrainingArguments or accelerate were told to distribute the model."""
    names = ("deepspeed", "fsdp", "megatron_lm", "parallelism_config")
    told = [n for n in names if os.environ.get(f"ACCELERATE_USE_{n.upper()}", "").lower() == "true"]
    states = sys.modules.get("accelerate.state")
    if states is not None and states.is_initialized():
        config = getattr(states.AcceleratorState(), "parallelism_config", None)
        if config is not None and config.tp_size == 1:  # Trainer sets it for a model under TP
            told.append("parallelism_config")
    if told:
        raise ValueError(
            f"{told[0]} was set in TrainingArguments or accelerate, but zpp_lab.shard has sharded "
            f"the model: leave {told[0]} out"
        )
