"""Where a rank's training state lies, by kind and unit, and what updates it.

`engine.offload` and `train.optimizer_place` are short-hands for it. Whatever needs to know where
something lies asks `Residence.of`, not the settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zpp_lab.config.schema import Config

Place = Literal["device", "host"]
EVERY = 2**31  # more units than a model has


@dataclass(frozen=True)
class Residence:
    """How many units, the last ones, have each part of their state in host memory; 0: none."""

    masters: int = 0
    moments: int = 0
    shards: int = 0  # in the dtype that is gathered, where they exist next to masters
    gradients: int = 0
    updates_on: Place = "device"

    @classmethod
    def of(cls, config: Config) -> Residence:
        if config.engine.offload:
            return cls(EVERY, EVERY, EVERY, EVERY, "host")
        if config.train.optimizer_place == "host":
            return cls(moments=EVERY)
        return cls()

    @property
    def offloads(self) -> bool:
        """Whether FSDP2 keeps its shards in host memory, where they are updated."""
        return self.updates_on == "host"

    @property
    def moments_pass(self) -> bool:
        """Whether moments come from host memory to be updated on the device."""
        return self.moments > 0 and self.updates_on == "device"
