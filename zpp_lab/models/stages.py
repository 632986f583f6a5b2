"""Stages of the decoder: consecutive blocks, the first with the embedding, the last with the head.

Parameters keep the whole model's names. A rank may have several stages that do not follow each
other. Every rank of a pipeline has the batch, so that none but activations travel.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models.cut import PartLlama, check_cut, decoder_sizes, whole_start
from zpp_lab.models.llama import Llama, rows_of_vocabulary, through
from zpp_lab.models.start import Start


def blocks_of(layers: int, stages: int, stage: int) -> range:
    """Return a stage's blocks."""
    return range(stage * layers // stages, (stage + 1) * layers // stages)


def last_blocks(layers: int, stages: int) -> dict[int, int]:
    """Return by its last block each stage that has a next one."""
    return {blocks_of(layers, stages, s)[-1]: s for s in range(stages - 1)}


def check_stages(cfg: ModelConfig, pp: int, chunks: int) -> None:
    """ValueError, naming the setting, where this model has not so many stages, `chunks` a rank."""
    stages = pp * chunks
    for ok, what in (
        (cfg.name == "llama", f"does not cut model.name={cfg.name}: use llama"),
        (not cfg.tied_head, "does not cut model.tied_head=true, which both ends need: use false"),
        (not cfg.scalar_head, "does not cut model.scalar_head=true: use false"),
        (not cfg.lora.on, "does not cut adapters: leave model.lora out"),
        (
            cfg.layers >= stages,
            f"makes {stages} stages of model.layers={cfg.layers}, and each needs a layer: use "
            f"{stages} layers or more, or fewer stages",
        ),
    ):
        if not ok:
            raise ValueError(f"cluster.pp={pp} {what}")


class _Staged(Llama):
    """Some stages of a decoder; others' modules are not there."""

    same_every_step = False  # transfers between stages are part of every step

    def keep(self, own: Sequence[int], stages: int) -> None:
        """Keep the stages `own` of so many."""
        self.own, self.stages = tuple(own), stages
        layers: Any = self.layers
        kept = [i for stage in own for i in blocks_of(self.cfg.layers, stages, stage)]
        self.layers = nn.ModuleDict({str(i): layers[i] for i in kept})  # type: ignore[assignment]
        if 0 not in own:
            self.embed = None  # type: ignore[assignment]
        if stages - 1 not in own:
            self.norm = self.head = None  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        x: Tensor | None,
        tokens: Tensor,
        targets: Tensor,
        share: Tensor | None = None,
        each: bool = False,
        stage: int = 0,
    ) -> Tensor:
        """Run one stage of these: `x` (of the first one None) → what the next stage gets, or the
        last one's loss or scores."""
        self.see(tokens)
        blocks, xs = dict(self.units()), self.enter(tokens) if x is None else [x]
        for i in blocks_of(self.cfg.layers, self.stages, stage):
            xs = through(blocks[f"layers.{i}"], xs)
        return xs[0] if stage < self.stages - 1 else self.leave(xs, targets, share, each)

    def units(self) -> list[tuple[str, nn.Module]]:
        layers: Any = self.layers
        pairs = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
        return [(f"layers.{i}", layer) for i, layer in pairs]


class StageLlama(_Staged):
    """Some stages of the whole decoder."""

    def start(self, seed: int) -> Start:
        return whole_start(self, seed)


class StagePart(_Staged, PartLlama):  # type: ignore[misc]
    """Some stages of a tensor part."""


def build_stage(
    cfg: ModelConfig, vocab_size: int, tp: int, part: int, own: Sequence[int], stages: int
) -> StageLlama | StagePart:
    """Build the stages `own` of so many, of one of `tp` tensor parts, on the meta device."""
    vocab = rows_of_vocabulary(cfg, vocab_size)
    with torch.device("meta"):
        if tp > 1:
            check_cut(cfg, vocab, tp, decoder_sizes(cfg))
            model: Any = StagePart(cfg, vocab, tp, part)
        else:
            model = StageLlama(cfg, vocab)
        model.keep(own, stages)
    return model


def joined_stages(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all stages into the whole model's."""
    found: dict[str, Any] = {}
    for state in states:
        for kind, own in state.items():
            if isinstance(own, dict):
                found[kind] = joined_stages([found.get(kind, {}), own])
            else:
                found[kind] = own
    return found


def stage_state(state: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return what these parameters have of the whole model's state."""
    return {
        name: stage_state(value, names) if isinstance(value, dict) else value
        for name, value in state.items()
        if isinstance(value, dict) or name in names
    }
