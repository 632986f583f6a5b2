"""The batches that a run trains on, by its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zpp_lab.config.schema import Config
from zpp_lab.data.packed import Batch, PackedData
from zpp_lab.data.tokens import TokenData


@dataclass(frozen=True)
class TextSource:
    """Batches of a text. They follow from seed and step alone: a source has to answer the same
    again, since a step that is not finite is repeated, and a resumed run repeats steps too."""

    config: Config
    data: TokenData | PackedData
    ahead: ClassVar[bool] = True  # whether a step's batches are known before the step before ends

    def step(self, step: int) -> Callable[[int, int], Batch]:
        """Return (rank, micro-step) → the batch of one step, which counts from 0."""
        return self.data.step(self.config.seed, step, *self._shape())

    def record(self) -> dict[str, Any]:
        """Return what the last step's record says of its batches besides: nothing."""
        return {}

    def turns(self, step: int) -> np.ndarray:
        """Return where a step's sequences are, int64 [ranks, micro-steps, batch_size]."""
        return self.data.turns(self.config.seed, step, *self._shape())

    def _shape(self) -> tuple[int, int, int, int]:
        config, train = self.config, self.config.train
        return config.cluster.readers, train.micro_steps, train.batch_size, config.data.seq_len
