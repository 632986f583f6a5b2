"""What a run learns from and how it is read out, by `task`."""

from __future__ import annotations

from pathlib import Path

from zpp_lab.config.schema import Config
from zpp_lab.data import PackedData, TokenData
from zpp_lab.data.prepare import open_tokenizer
from zpp_lab.data.prompts import open_prompts
from zpp_lab.data.source import TextSource
from zpp_lab.engines.base import Engine
from zpp_lab.train.evaluation import LossReadout
from zpp_lab.train.rl.readout import SuccessReadout
from zpp_lab.train.rl.source import Judge, RolloutSource

Source = TextSource | RolloutSource
Readout = LossReadout | SuccessReadout


def open_task(
    config: Config, engine: Engine, data: TokenData | PackedData, folder: Path, rank: int
) -> tuple[Source, Readout]:
    """Open batches and readout of a run in `folder`, before its engine loads a checkpoint."""
    if config.task != "rl":
        return TextSource(config, data), LossReadout(config, engine, data)
    tokenizer, judge = open_tokenizer(config.data, data.folder), Judge(config, folder, rank)
    train, heldout = open_prompts(config, data.folder)
    width = max(len(tokens) for split in (train, heldout) for tokens in split.tokens)
    shared = (tokenizer, judge, folder, width)
    source = RolloutSource(config, engine, train, *shared)
    return source, SuccessReadout(config, engine, heldout, *shared, offset=len(train))
