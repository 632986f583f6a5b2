"""How long the parts of a step take the host: the first step's tell what a start waits for."""

from __future__ import annotations

import time


class Laps:
    """Seconds of parts that follow one another; those of parts with one name are added."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
