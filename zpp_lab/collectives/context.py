"""Where in training a collective runs, and who looks at what it carries.

Noise is keyed by (seed, step, micro-step, wire), so a collective must know the moment. The
engine, or the hooks of a wrapped model, move the clock; collectives only read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zpp_lab.codecs import Noise, noise_key
from zpp_lab.codecs.layout import Layout
from zpp_lab.config.schema import Wire


class Observer(Protocol):
    """Sees one rank's values before they go on a wire, with the payload that carries them.

    Telemetry needs no look: `kernels.encode` fills what `room` gives, and `encoded` takes it. Who
    `looks` gets values too.
    """

    @property
    def looks(self) -> bool: ...

    def room(self, wire: Wire, layout: Layout, payload: Tensor) -> Tensor | None:
        """For the `errors` of `kernels.encode` of this payload, where they are wanted."""
        ...

    def encoded(self, wire: Wire, layout: Layout, errors: Tensor | None) -> None:
        """What `room` has given, filled."""
        ...

    def weights(self, wire: Wire, layout: Layout, shards: Sequence[Tensor], row: Tensor) -> None:
        """This rank's padded shards, and its payload row uint8 [1, nbytes]."""
        ...

    def gradients(self, layout: Layout, grads: Sequence[Tensor]) -> None:
        """Whole gradients before any wire."""
        ...

    def rows(
        self, wire: Wire, layout: Layout, before: Sequence[Tensor], payload: Tensor, rank: int
    ) -> None:
        """Rows [R, n] of each segment that `rank` sends, and their payload uint8 [R, nbytes].
        For sums that were encoded again, without `room`, this is telemetry's place too."""
        ...


@dataclass
class Clock:
    """The present moment of training."""

    seed: int
    step: int = 0
    micro: int = 0
    grad: bool = True  # a backward follows this forward: keep what it needs
    master: bool = False  # gathers bring the master weights' own bytes, not the recipe's
    observer: Observer | None = None

    def weights_noise(self, wire: Wire, rank: int) -> Noise:
        """Every micro-step of a step gathers the same weights with the same noise."""
        return Noise(noise_key(self.seed, self.step, 0, wire), (rank,), (rank,))

    def grads_noise(self, wire: Wire, rank: int, rows: Sequence[int]) -> Noise:
        """`rank` encodes one row for each shard in `rows`."""
        key = noise_key(self.seed, self.step, self.micro, wire)
        return Noise(key, (rank,) * len(rows), tuple(rows))
