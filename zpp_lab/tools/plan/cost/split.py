"""Seconds of what tensor parts and stages exchange, and of a pipeline's schedule.

Nothing hides an exchange between tensor parts: the next product needs it. The host is taken to
need as long for one as for a unit's gather. A stage waits for what it receives, and between two
passes of 1F1B for what it has sent, as torch's schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.acts import FP32, LOSS, PartsPlan, acts_layout
from zpp_lab.collectives.pipe import PipePlan
from zpp_lab.collectives.plan import Plan
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, ACTS_PIPE, TP_RAW, Wire
from zpp_lab.tools.plan.cost.timeline import StepTime
from zpp_lab.tools.plan.cost.transfers import Transfers
from zpp_lab.train.memory.estimate import with_root

Pass = Literal["forward", "backward"]
FORTH: Pass = "forward"
BACK: Pass = "backward"
OF: dict[Pass, Wire] = {FORTH: ACTS_FORWARD, BACK: ACTS_BACKWARD}


@dataclass(frozen=True)
class Exchange:
    """Some exchanges in turn: their number, kernels, and the transfers on a wire."""

    wire: Wire
    count: int
    kernels: float = 0.0
    transfer: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(
            self.wire,
            self.count + other.count,
            self.kernels + other.kernels,
            self.transfer + other.transfer,
        )

    def __mul__(self, times: int) -> Exchange:
        return Exchange(self.wire, self.count * times, self.kernels * times, self.transfer * times)


class PartTimes:
    """What tensor parts exchange, by pass."""

    def __init__(self, plan: PartsPlan, transfers: Transfers) -> None:
        self.plan, self.transfers = plan, transfers

    def block(self, which: Pass) -> Exchange:
        """Of one block: each of its two pieces gathers and scatters."""
        return (self._gather(which) + self._scatter(which)) * 2

    def start(self, which: Pass) -> Exchange:
        """Of the embedding, which scatters."""
        return self._scatter(which) if which == "forward" else self._gather(which)

    def head(self, which: Pass) -> Exchange:
        return self._gather(which) if which == "forward" else self._scatter(which)

    def loss(self) -> Exchange:
        return self._raw(LOSS * self.plan.tokens)

    def shared(self) -> Exchange:
        """Of the gradients of parameters that all parts have, once a step."""
        return self._raw(self.plan.shared)

    def _layout(self, which: Pass) -> Layout:
        plan = self.plan
        codec = plan.recipe.acts_codec(OF[which])
        return acts_layout("", plan.tokens * plan.dim // plan.tp, codec)

    def _gather(self, which: Pass) -> Exchange:
        layout, times, tp = self._layout(which), self.transfers, self.plan.tp
        kernels = times.kernel("encode", layout, 1) + times.kernel("decode", layout, tp)
        return Exchange(OF[which], 1, kernels, times.inside("gather", (tp - 1) * layout.nbytes))

    def _scatter(self, which: Pass) -> Exchange:
        layout, times, tp = self._layout(which), self.transfers, self.plan.tp
        kernels = times.kernel("encode", layout, tp) + times.kernel("reduce", layout, tp)
        return Exchange(OF[which], 1, kernels, times.inside("reduce", (tp - 1) * layout.nbytes))

    def _raw(self, numel: int) -> Exchange:
        nbytes = (self.plan.tp - 1) * FP32 * numel
        return Exchange(TP_RAW, 1, 0.0, self.transfers.inside("gather", nbytes))


@dataclass(frozen=True)
class Crossing:
    """A micro-batch from one stage to the next, or its gradient back: kernels at the two ends, and
    the transfer."""

    encode: float
    decode: float
    transfer: float

    @classmethod
    def of(cls, plan: PipePlan, cluster: ClusterConfig, transfers: Transfers) -> Crossing:
        """All ranks of a node send at the same time."""
        layout, gbps = plan.layout, transfers.link_gbps
        if plan.across and gbps is not None:
            nbytes = layout.nbytes * cluster.gpus_per_node
            seconds = transfers.machine.inter.seconds(nbytes, gbps)
        else:
            seconds = transfers.inside("gather", layout.nbytes)
        encode, decode = (transfers.kernel(op, layout, 1) for op in ("encode", "decode"))
        return cls(encode, decode, seconds)

    def kernels(self, stage: int, stages: int, which: Pass) -> float:
        """Return the seconds of a stage's kernels at its ends."""
        first, last = stage == 0, stage == stages - 1
        comes, goes = (not first, not last) if which == "forward" else (not last, not first)
        return comes * self.decode + goes * self.encode


class Passes(Protocol):
    def seconds(self, which: Pass) -> float:
        """Return the seconds of a micro-step's pass."""
        ...


Timed = Callable[[Plan, tuple[bool, bool]], tuple[Passes, StepTime]]


def staged(plan: Plan, config: Config, transfers: Transfers, timed: Timed) -> StepTime:
    """Predict the schedule's length, and what the busiest stage does outside of it: gathers before
    its first pass, reductions after its last one, the update. timed: predicts a stage alone, of
    which this says whether it has the embedding and the head."""
    pipe, micros = plan.pipe, plan.micro_steps
    assert pipe is not None
    last = pipe.ranks - 1
    crossing = Crossing.of(pipe, config.cluster, transfers)
    forward, backward, alone = list[float](), list[float](), list[StepTime]()
    for place in range(pipe.ranks):
        own, ends = with_root(plan.stage(place)), (place == 0, place == last)
        passes, found = timed(replace(own, micro_steps=1), ends)
        if micros > 1:
            found = _more(found, timed(replace(own, micro_steps=2), ends)[1], micros)
        alone.append(found)
        for times, which in ((forward, FORTH), (backward, BACK)):
            times.append(passes.seconds(which) + crossing.kernels(place, pipe.ranks, which))
    length = makespan(forward, backward, crossing.transfer, micros, config.engine.schedule)
    both = [micros * (there + back) for there, back in zip(forward, backward, strict=True)]
    beyond = [max(0.0, one.step_s - passes) for one, passes in zip(alone, both, strict=True)]
    most = max(range(pipe.ranks), key=lambda place: both[place] + beyond[place])
    time, waits = alone[most], length - both[most]
    kernels = max(0.0, both[most] + beyond[most] - time.step_s)  # of the crossings
    step_s, train = length + beyond[most], config.train
    between = micros * ((most > 0) + (most < last)) * crossing.transfer
    across = pipe.across and transfers.link_gbps is not None
    tokens = train.batch_size * micros * config.cluster.readers * config.data.seq_len
    return replace(
        time,
        codec_s=time.codec_s + kernels,
        exposed_s=time.exposed_s + waits,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        intra_s=time.intra_s + (0.0 if across else between),
        inter_s=time.inter_s + (between if across else 0.0),
        parts={**time.parts, f"{ACTS_PIPE}, {'inter' if across else 'intra'}": between},
        stages_s=waits + kernels,
    )


def _more(one: StepTime, two: StepTime, micros: int) -> StepTime:
    """Return a step of more micro-steps, by what the second one adds."""
    figures = (f.name for f in fields(StepTime) if f.name not in ("parts", "bound"))
    values = {n: (getattr(one, n), getattr(two, n)) for n in figures}
    return replace(two, **{n: a + (micros - 1) * (b - a) for n, (a, b) in values.items()})  # type: ignore[arg-type]


def order(stages: int, stage: int, micros: int, schedule: str) -> Iterator[tuple[Pass, int, bool]]:
    """Yield a stage's passes with their micro-step, and whether each waits until all is sent."""
    ahead = micros if schedule == "gpipe" else min(micros, stages - stage)
    for micro in range(ahead):
        yield "forward", micro, False
    for micro in range(micros):
        yield "backward", micro, micro <= micros - ahead
        if micro + ahead < micros:
            yield "forward", micro + ahead, True


def makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
    micros: int,
    schedule: str,
) -> float:
    """Return the seconds from the first pass to the last. forward, backward: of a micro-step, by
    stage."""
    stages = len(forward)
    left = [list(order(stages, s, micros, schedule))[::-1] for s in range(stages)]
    free, sent = [0.0] * stages, [0.0] * stages
    there: dict[tuple[int, Pass, int], float] = {(0, "forward", i): 0.0 for i in range(micros)}
    while any(left):
        for s in range(stages):
            while left[s] and (s, *left[s][-1][:2]) in there:
                which, micro, waits = left[s].pop()
                begin = max(free[s], there[s, which, micro], sent[s] if waits else 0.0)
                own, to = (forward, s + 1) if which == "forward" else (backward, s - 1)
                free[s] = begin + own[s]
                if 0 <= to < stages:
                    sent[s] = max(sent[s], free[s]) + transfer
                    there[to, which, micro] = sent[s]
                elif which == "forward":
                    there[s, "backward", micro] = free[s]
    return max(*free, *sent)
