"""What a prediction of time is made of: tasks on lanes that share resources.

A lane is a stream: its tasks run in the order they were added. Lanes that use the same resource
(the GPU, a link) take turns, the one that has been ready longest first. A task starts when those
before it have ended, and is not interrupted. `Timeline` says when each runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """`uses`: the resource it has for itself, None for a mark that takes nothing. `kind`: under
    which name its seconds are added up."""

    kind: str
    lane: str
    uses: str | None
    seconds: float
    after: tuple[int, ...]


@dataclass
class Timeline:
    """Tasks, known by their number; `run` says when each ends."""

    tasks: list[Task] = field(default_factory=list)

    def add(
        self,
        kind: str,
        lane: str,
        uses: str | None,
        seconds: float,
        after: Iterable[int | None] = (),
    ) -> int:
        """The new task's number. `after` may name tasks that were added before."""
        waits = tuple(number for number in after if number is not None)
        assert all(0 <= number < len(self.tasks) for number in waits), (
            "a task waits for a later one"
        )
        assert seconds >= 0, f"{kind} takes {seconds} s"
        self.tasks.append(Task(kind, lane, uses, seconds, waits))
        return len(self.tasks) - 1

    def run(self) -> list[float]:
        """Seconds from the start until each task has ended."""
        lanes: dict[str, list[int]] = defaultdict(list)
        for number in reversed(range(len(self.tasks))):
            lanes[self.tasks[number].lane].append(number)
        ends = [-1.0] * len(self.tasks)
        lane_free: dict[str, float] = defaultdict(float)
        free: dict[str, float] = defaultdict(float)
        while lanes:
            ready, number = min(self._ready(lanes, ends, lane_free))
            task = self.tasks[number]
            begin = max(ready, free[task.uses]) if task.uses else ready
            ends[number] = lane_free[task.lane] = begin + task.seconds
            if task.uses:
                free[task.uses] = ends[number]
            lanes[task.lane].pop()
            if not lanes[task.lane]:
                del lanes[task.lane]
        return ends

    def _ready(
        self, lanes: dict[str, list[int]], ends: list[float], lane_free: dict[str, float]
    ) -> Iterable[tuple[float, int]]:
        """First tasks of the lanes that wait for nothing unknown: since when, and their number."""
        for lane, numbers in lanes.items():
            waits = [ends[before] for before in self.tasks[numbers[-1]].after]
            if min(waits, default=0.0) >= 0:
                yield max(lane_free[lane], max(waits, default=0.0)), numbers[-1]

    def busy(self) -> dict[str, float]:
        """Seconds of all tasks, by resource."""
        return self._added(lambda task: task.uses)

    def kinds(self) -> dict[str, float]:
        """Seconds of all tasks, by kind."""
        return self._added(lambda task: task.kind)

    def _added(self, key) -> dict[str, float]:  # type: ignore[no-untyped-def]
        found: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            if key(task) is not None:
                found[key(task)] += task.seconds
        return dict(found)
