"""Noise whose key lives on the device, so that a captured CUDA graph can change it on replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zpp_lab.codecs import Noise
from zpp_lab.ops.table import signed


@dataclass(frozen=True)
class DeviceNoise(Noise):
    """`Noise` with its key in `words` int64 [1] on the device; `key` itself is not read there.

    Set the next collective's key with `set_key`: an asynchronous fill, no synchronization.
    """

    words: Tensor | None = None

    @classmethod
    def make(
        cls, key: int, ranks: tuple[int, ...], rows: tuple[int, ...], device: torch.device
    ) -> DeviceNoise:
        return cls(
            key, ranks, rows, torch.full((1,), signed(key), dtype=torch.int64, device=device)
        )

    def set_key(self, key: int) -> None:
        assert self.words is not None
        self.words.fill_(signed(key))

    def uniform(self, parameter: int, numel: int, device: torch.device) -> Tensor:
        assert self.words is not None
        key = int(self.words.item()) % 2**64
        return Noise(key, self.ranks, self.rows).uniform(parameter, numel, device)
