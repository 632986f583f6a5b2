"""Keys of rounding noise on the device, for steps from a CUDA graph."""

from __future__ import annotations

import torch

from zpp_lab.codecs import Noise, noise_key
from zpp_lab.config.wires import Wire

Draw = tuple[int, Wire, tuple[int, ...], tuple[int, ...]]  # micro-step, wire, ranks, rows


class Words:
    """What a captured step's encoders draw from, on the device: rows and key of each draw."""

    def __init__(self, seed: int, device: torch.device, room: int) -> None:
        """`room`: rows of all draws together, at most."""
        self.seed = seed
        self.device = torch.zeros(room, 2, dtype=torch.int32, device=device)
        self.rows: list[tuple[int, int]] = []
        self.places: dict[Draw, tuple[int, int]] = {}  # first row, and the key's

    def draw(self, micro: int, wire: Wire, ranks: tuple[int, ...], rows: tuple[int, ...]) -> Noise:
        """The noise of a draw, with the key of whichever step `load` was called for."""
        key = micro, wire, ranks, rows
        if key not in self.places:
            self.places[key] = len(self.rows), len(self.rows) + len(rows)
            self.rows += [*zip(ranks, rows, strict=True), (0, 0)]
            assert len(self.rows) <= len(self.device), "more draws than a step has"
        first, last = self.places[key]
        return Noise(0, ranks, rows, self.device[first : last + 1])

    def load(self, step: int) -> None:
        """Take the keys of this step, on the current stream."""
        for (micro, wire, _, _), (_, place) in self.places.items():
            key = noise_key(self.seed, step, micro, wire)
            self.rows[place] = _signed(key & 0xFFFFFFFF), _signed(key >> 32)
        if self.rows:
            new = torch.tensor(self.rows, dtype=torch.int32, pin_memory=self.device.is_cuda)
            self.device[: len(self.rows)].copy_(new, non_blocking=True)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
