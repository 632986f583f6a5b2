"""What is known of a run before it starts: asked before a token is read or a file written.

Light until a run asks for something: plain ZeRO-3 of the built-in decoder is looked at without
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zpp_lab.config import WIRES, CodecConfig, Config
from zpp_lab.inputs import check_inputs
from zpp_lab.tracking.wandb_mode import resolve

if TYPE_CHECKING:
    from zpp_lab.collectives.plan import Plan


def check_run(config: Config, tracked: bool = True) -> None:
    """ValueError for what would end the run before, or in, its first step: files that are not
    there, a wandb mode that this machine cannot do, a recipe that the cluster or this model does
    not allow. tracked: this process writes the run down; of several ranks one does."""
    check_inputs(config)
    if tracked and not config.run.study:  # a study sends its runs itself
        resolve(config.tracking.wandb)
    check_recipe(config)
    planned(config)


def check_recipe(config: Config) -> None:
    """ValueError for a codec that is not known or refuses its settings, and for a recipe that the
    cluster or the engine does not allow. Reads no file."""
    if _plain(config):
        return
    from zpp_lab.engines.build import check_engine

    check_engine(config)


def planned(config: Config) -> Plan | None:
    """The run's plan, None where nothing of it could be wrong. ValueError where the model gets
    less than the recipe asks for (`Plan.build`), or is none to train (`build_model`)."""
    if _plain(config):
        return None
    from zpp_lab.cost.model import plan_of

    return plan_of(config)


def _plain(config: Config) -> bool:
    """Whether nothing but FSDP2's own collectives, of the built-in decoder, is asked for."""
    recipe, model = config.recipe, config.model
    codecs = any(recipe.wire(wire) != CodecConfig() for wire in WIRES)
    asked = codecs or recipe.exempt.names or recipe.rules or recipe.shard != "world"
    ours = config.engine.name != "deepspeed" and model.name == "llama" and not model.lora.on
    return ours and not asked
