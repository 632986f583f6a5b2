"""A run's folder without a run: the settings and a checkpoint, as training leaves them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from torch import Tensor

from zpp_lab.config.schema import Config
from zpp_lab.data import open_data
from zpp_lab.engines.build import build_engine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models.cut import merged_state, part_of
from zpp_lab.runs.checkpoint.read import newest
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving
from zpp_lab.train.evaluation import open_heldout


def leave(config: Config, step: int = 3) -> VirtualEngine:
    """Write the run's folder; returns the engine, the gathered weights of `step` in it."""
    data = open_data(config.data)
    engine = build_engine(config, data.vocab_size, torch.device("cpu"))
    assert isinstance(engine, VirtualEngine)
    with torch.no_grad():
        whole = merged_state([cell.master for cell in engine.cells])
        for part, cell in enumerate(engine.cells):
            for name, p in cell.master.items():  # norms and biases start as ones and zeros
                noise = torch.Generator().manual_seed(len(name))
                more = torch.randn(whole[name].shape, generator=noise) * 0.1
                p.add_(part_of(name, more, len(engine.cells), part))
    assert config.run.dir is not None
    folder = Path(config.run.dir)
    Checkpoints(folder / "checkpoints", 1, Saving(host=None)).save(step, engine.state_dict())
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    heldout_losses(engine, config, step)
    return engine


def restored(config: Config) -> VirtualEngine:
    """The run's engine after its newest checkpoint, that step's gathered weights in it."""
    engine = build_engine(config, open_data(config.data).vocab_size, torch.device("cpu"))
    assert isinstance(engine, VirtualEngine)
    assert config.run.dir is not None
    saved = newest(Path(config.run.dir))
    engine.enter(saved.step)
    engine.load_state_dict(saved.state())
    heldout_losses(engine, config, saved.step)
    return engine


def heldout_losses(engine: VirtualEngine, config: Config, step: int = 3) -> Tensor:
    """By the engine's own gather: fp32 [tokens]."""
    batches = open_heldout(config, open_data(config.data)).batches
    return engine.token_losses(step, batches, wire=True)


def gathered(engine: VirtualEngine) -> dict[str, Tensor]:
    cells = [{n: p.detach() for n, p in cell.weights.items()} for cell in engine.cells]
    return merged_state(cells) if len(cells) > 1 else cells[0]
