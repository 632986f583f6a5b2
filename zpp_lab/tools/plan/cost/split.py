"""Seconds of what tensor parts and stages exchange, and of a pipeline's schedule.

Nothing hides an exchange between tensor parts: the next product needs it. Without a CUDA graph the
host is taken to need as long for one as for a unit's gather: eager steps of two parts were within
2 % of that (1.3B, two H200s, blocks compiled). A stage waits for what it receives, and between two
passes of 1F1B for what it has sent, as torch's schedules do; 1f1b_overlap waits a tick later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

from zpp_lab.codecs import RawCodec
from zpp_lab.collectives.acts import FP32, LOSS, PartsPlan, acts_layout
from zpp_lab.collectives.pipe import Pass, PipePlan, passes
from zpp_lab.collectives.plan import Plan
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, ACTS_PIPE, TP_RAW, Wire
from zpp_lab.tools.plan.cost.timeline import StepTime
from zpp_lab.tools.plan.cost.transfers import Transfers
from zpp_lab.train.memory.estimate import with_root

OF: dict[Pass, Wire] = {"forward": ACTS_FORWARD, "backward": ACTS_BACKWARD}


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
        """Predict a block's: each of its two pieces gathers and scatters."""
        return (self._one(which, "gather") + self._one(which, "reduce")) * 2

    def start(self, which: Pass) -> Exchange:
        """Predict the embedding's, which scatters."""
        return self._one(which, "reduce" if which == "forward" else "gather")

    def head(self, which: Pass) -> Exchange:
        """Predict the head's, which gathers."""
        return self._one(which, "gather" if which == "forward" else "reduce")

    def loss(self) -> Exchange:
        """Predict the loss's, once a forward."""
        return self._raw(LOSS * self.plan.tokens)

    def shared(self) -> Exchange:
        """Predict that of gradients of parameters that all parts have, once a step."""
        return self._raw(self.plan.shared)

    def _one(self, which: Pass, kind: Literal["gather", "reduce"]) -> Exchange:
        plan, times, tp = self.plan, self.transfers, self.plan.tp
        codec = plan.recipe.acts_codec(OF[which])
        layout = acts_layout("", plan.tokens * plan.dim // tp, codec)
        rows, last = (1, "decode") if kind == "gather" else (tp, "reduce")
        kernels = times.kernel(last, layout, tp)
        if not isinstance(codec, RawCodec):
            kernels += times.kernel("encode", layout, rows)
        elif kind == "gather":  # slices travel from where they lie to where they are read
            kernels = 0.0
        return Exchange(OF[which], 1, kernels, times.inside(kind, (tp - 1) * layout.nbytes))

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
        """Predict a crossing, where all ranks of a node send at the same time."""
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
    forward, backward, kernels = list[float](), list[float](), list[float]()
    alone = list[StepTime]()  # without crossings, of which `kernels` has the kernels
    for place in range(pipe.ranks):
        own, ends = with_root(plan.stage(place)), (place == 0, place == last)
        passes, found = timed(replace(own, micro_steps=1), ends)
        if micros > 1:
            found = _more(found, timed(replace(own, micro_steps=2), ends)[1], micros)
        ends_s = {which: crossing.kernels(place, pipe.ranks, which) for which in OF}
        forward.append(passes.seconds("forward") + ends_s["forward"])
        backward.append(passes.seconds("backward") + ends_s["backward"])
        kernels.append(micros * sum(ends_s.values()))
        alone.append(found)
    length = makespan(forward, backward, crossing.transfer, micros, config.engine.schedule)
    both = [micros * (there + back) for there, back in zip(forward, backward, strict=True)]
    each = zip(both, alone, kernels, strict=True)
    busy = [max(passes, one.step_s + ends_s) for passes, one, ends_s in each]
    most = max(range(pipe.ranks), key=busy.__getitem__)
    time, step_s, train = alone[most], length + busy[most] - both[most], config.train
    waits = step_s - time.step_s - kernels[most]
    between = micros * ((most > 0) + (most < last)) * crossing.transfer
    across = pipe.across and transfers.link_gbps is not None
    tokens = train.batch_size * micros * config.cluster.readers * config.data.seq_len
    return replace(
        time,
        codec_s=time.codec_s + kernels[most],
        exposed_s=time.exposed_s + waits,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        intra_s=time.intra_s + (0.0 if across else between),
        inter_s=time.inter_s + (between if across else 0.0),
        parts={**time.parts, f"{ACTS_PIPE}, {'inter' if across else 'intra'}": between},
        stages_s=waits + kernels[most],
    )


def _more(one: StepTime, two: StepTime, micros: int) -> StepTime:
    """Return a step of more micro-steps, by what the second one adds."""

    def all_of(first: float, both: float) -> float:
        return first + (micros - 1) * (both - first)

    names = [f.name for f in fields(StepTime) if f.init and f.name != "parts"]
    figures: dict[str, Any] = {n: all_of(getattr(one, n), getattr(two, n)) for n in names}
    parts = {kind: all_of(one.parts.get(kind, 0.0), both) for kind, both in two.parts.items()}
    return replace(two, parts=parts, **figures)


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
    if schedule == "1f1b_overlap":
        return _overlapped(forward, backward, transfer, micros)
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


def _overlapped(
    forward: Sequence[float], backward: Sequence[float], transfer: float, micros: int
) -> float:
    """Return the same of 1f1b_overlap. A transfer begins when both ends have computed and the
    link's last one in its direction has ended."""
    stages, seconds = len(forward), {"forward": forward, "backward": backward}
    free, waited = [0.0] * stages, [0.0] * stages  # ends of passes; of transfers of the tick before
    links: dict[tuple[int, Pass], float] = {}
    for tick in range(micros + 4 * (stages - 1) + 1):
        ends = [0.0] * stages
        for s in range(stages):
            for which, _ in passes(stages, s, micros, tick - 1):
                to = s + 1 if which == "forward" else s - 1
                if 0 <= to < stages:
                    begin = max(free[s], free[to], links.get((s, which), 0.0))
                    links[s, which] = begin + transfer
                    ends[s], ends[to] = (max(ends[i], begin + transfer) for i in (s, to))
        for s in range(stages):
            due = passes(stages, s, micros, tick)
            free[s] = max(free[s], waited[s]) + sum(seconds[which][s] for which, _ in due)
        waited = ends
    return max(free)
