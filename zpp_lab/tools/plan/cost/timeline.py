"""Tasks of a step, and what they add up to.

A prediction is made of tasks on streams, which run in order and share resources (the GPU, a link):
the stream that has been ready longest goes first. A task is not interrupted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

IN, OUT = "bus in", "bus out"
HOST = "host"  # a bound


@dataclass(frozen=True)
class Task:
    """`uses`: the resource that it occupies, or None; `kind`: under which it is added up."""

    kind: str
    stream: str
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
        stream: str,
        uses: str | None,
        seconds: float,
        after: Iterable[int | None] = (),
    ) -> int:
        """Return the new task's number. `after` may name tasks that were added before."""
        waits = tuple(number for number in after if number is not None)
        assert all(0 <= number < len(self.tasks) for number in waits), (
            "a task waits for a later one"
        )
        assert seconds >= 0, f"{kind} takes {seconds} s"
        self.tasks.append(Task(kind, stream, uses, seconds, waits))
        return len(self.tasks) - 1

    def run(self) -> list[float]:
        """Return seconds from the start until each task has ended."""
        streams: dict[str, list[int]] = defaultdict(list)
        for number in reversed(range(len(self.tasks))):
            streams[self.tasks[number].stream].append(number)
        ends = [-1.0] * len(self.tasks)
        stream_free: dict[str, float] = defaultdict(float)
        free: dict[str, float] = defaultdict(float)
        while streams:
            ready, number = min(self._ready(streams, ends, stream_free))
            task = self.tasks[number]
            begin = max(ready, free[task.uses]) if task.uses else ready
            ends[number] = stream_free[task.stream] = begin + task.seconds
            if task.uses:
                free[task.uses] = ends[number]
            streams[task.stream].pop()
            if not streams[task.stream]:
                del streams[task.stream]
        return ends

    def _ready(
        self, streams: dict[str, list[int]], ends: list[float], stream_free: dict[str, float]
    ) -> Iterable[tuple[float, int]]:
        """First tasks of streams that wait for nothing unknown: since when, and their number."""
        for stream, numbers in streams.items():
            waits = [ends[before] for before in self.tasks[numbers[-1]].after]
            if min(waits, default=0.0) >= 0:
                yield max(stream_free[stream], max(waits, default=0.0)), numbers[-1]

    def busy(self) -> dict[str, float]:
        """Return seconds of all tasks, by resource."""
        return _added((task.uses, task.seconds) for task in self.tasks)

    def kinds(self) -> dict[str, float]:
        """Return seconds of all tasks, by kind."""
        return _added((task.kind, task.seconds) for task in self.tasks)


def _added(each: Iterable[tuple[str | None, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, seconds in each:
        if name is not None:
            found[name] += seconds
    return dict(found)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: compute_s + codec_s + optimizer_s + exposed_s = step_s.

    codec_s has what the model loses during transfers too; exposed_s is the time in which the GPU
    waits for links, bus or host. intra_s, inter_s, host_s, bus_s: how long links, host and the
    busier way of the bus are busy, hidden or not. flush_s: of an update that no forward hides, as
    after the last step and before an evaluation. parts_s: that exchanges between tensor parts add,
    host included. stages_s: in which the busiest stage waits for others: the bubble and crossings.
    With stages all other figures are the busiest one's.
    """

    compute_s: float
    codec_s: float
    intra_s: float
    inter_s: float
    host_s: float
    exposed_s: float
    optimizer_s: float
    step_s: float
    tokens_per_s: float
    parts: dict[str, float]  # seconds by kind of task
    bus_s: float = 0.0
    flush_s: float = 0.0
    parts_s: float = 0.0
    stages_s: float = 0.0
    bound: str = field(init=False)  # what is busy longest

    def __post_init__(self) -> None:
        busy = {
            "computation": self.compute_s + self.codec_s + self.optimizer_s,
            HOST: self.host_s,
            "inside nodes": self.intra_s,
            "between nodes": self.inter_s,
            "bus to host memory": self.bus_s,
        }
        object.__setattr__(self, "bound", max(busy, key=busy.__getitem__))

    @property
    def shards_s(self) -> float:
        """Seconds that gathers and reductions add, their kernels included, and what passes the
        bus."""
        own = max(self.compute_s + self.optimizer_s + self.parts_s, self.host_s)
        return max(0.0, self.step_s - own - self.stages_s)
