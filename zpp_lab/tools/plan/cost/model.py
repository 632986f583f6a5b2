"""What a prediction of time is made of: tasks on lanes that share resources, and a unit's FLOPs.

A lane is a stream: its tasks run in the order they were added. Lanes that use the same resource
(the GPU, a link) take turns, the one that has been ready longest first. A task starts when those
before it have ended, and is not interrupted. `Timeline` says when each runs.

FLOPs count the matrix products of the built-in decoder: 2 for each weight and token, and causal
attention as flash attention computes it, half of the square.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from zpp_lab.collectives.plan import UnitPlan
from zpp_lab.config.schema import Config


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


@dataclass(frozen=True)
class Work:
    """FLOPs of a block, or of the head, on one rank and micro-step. `backward` has no
    recomputation in it."""

    forward: float
    backward: float
    recompute: float


def block_work(unit: UnitPlan, config: Config) -> Work:
    """Of a decoder block. Frozen weights need no gradients of their own, inputs
    always do."""
    tokens = config.train.batch_size * config.data.seq_len
    matrices = [p for p in unit.unit.parameters if len(p.shape) > 1]
    every = sum(p.numel for p in matrices)
    trained = sum(p.numel for p in matrices if p.name in unit.unit.trainable)
    attention = 2 * config.data.seq_len * config.model.dim * tokens
    forward = 2.0 * every * tokens + attention
    backward = 2.0 * (every + trained) * tokens + 2 * attention
    return Work(forward, backward, forward if config.model.checkpoint_activations else 0.0)


def head_work(root: UnitPlan, config: Config, vocab: int) -> Work:
    """Of the last product. With model.loss_chunk, or a z-loss, its logits are made again in
    backward."""
    tokens = config.train.batch_size * config.data.seq_len
    forward = 2.0 * vocab * config.model.dim * tokens
    head = "embed.weight" if config.model.tied_head else "head.weight"
    trained, again = head in root.unit.trainable, config.model.loss_chunk or config.model.z_loss
    return Work(forward, forward * (1 + trained), forward if again else 0.0)
