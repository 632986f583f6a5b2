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
    """Mark a model of transformers as one that was sharded at load time, over so many ranks.

    Trainer then wraps nothing, reduces a step's gradients once, and saves whole weights; `generate`
    runs equally often on all ranks.
    """
    for module in model.modules():  # the outermost, which peft may have wrapped
        if hasattr(type(module), "_is_distributed_loading_by_transformers"):
            break
    else:
        return
    from transformers.distributed import DistributedConfig

    own: Any = module
    own._is_distributed_loading_by_transformers = own._is_fsdp_managed_module = True
    before = getattr(own.config, "distributed_config", None) or DistributedConfig()
    # from one rank it would save DTensors, which safetensors refuses
    own.config.distributed_config = replace(before, fsdp_size=max(ranks, 2))
    model.register_load_state_dict_pre_hook(_take_whole)
    register_fsdp_forward_method(model, "generate")  # calls an encoder alone


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
        config = states.AcceleratorState().parallelism_config
        if config is not None and config.tp_size == 1:  # Trainer sets it for a model under TP
            told.append("parallelism_config")
    if told:
        raise ValueError(
            f"{told[0]} was set in TrainingArguments or accelerate, but zpp_lab.shard has sharded "
            f"the model: leave {told[0]} out"
        )
