"""One training step, unit by unit, as FSDP2 runs it with a recipe's collectives.

    host      starts everything, in order; a kernel never ends before its launches have
    compute   blocks, and the decoding of what was gathered
    gathers   `engine.prefetch` units ahead; the next one starts when the last one is decoded
    reduction of a unit during the backward of the unit before it; the one after that waits
    links     one transfer at a time inside nodes, and one between them
    GPU       one kernel at a time: codecs take time from the model

With a CUDA graph (`replays`) the host starts forward and backward at once, and norm, update and
new weights while these run.

Then gradients are measured and clipped, AdamW runs and the host reads the loss. New node-replicated
weights travel at the beginning of a step. With engine.place units are updated there too, each
before its gather. Its state comes in while that of the unit before leaves, and a gradient leaves
once it is reduced: a lane of the bus each way. Weights in host memory come before each other gather
too. With train.clip_by=unit a unit is updated once the next one is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zpp_lab.collectives.plan import Plan, UnitPlan
from zpp_lab.collectives.recipe import quantizes_any
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import BACKWARD, FORWARD, UPDATE, Wire
from zpp_lab.engines.build import plan_of, vocabulary
from zpp_lab.engines.optim.host import STREAMS
from zpp_lab.engines.units import is_untouched
from zpp_lab.tools.plan.cost.machine import Machine
from zpp_lab.tools.plan.cost.split import OF, Exchange, PartTimes, Pass, staged
from zpp_lab.tools.plan.cost.state import NoFigures, State
from zpp_lab.tools.plan.cost.timeline import IN, OUT, StepTime, Timeline
from zpp_lab.tools.plan.cost.transfers import Collective, Transfers
from zpp_lab.train.speed import Work, block_work, head_work

# Bytes of GPU memory moved for a logit: fp32 logits, log-probabilities, their gradient, each
# written and read.
LOSS = 24
SLICES = 16  # of a unit's computation, between which updates and gradients on their way find a gap
LAUNCH = 0.002  # seconds in which the host starts a step's CUDA graph, of 1.3B


def replays(config: Config, own_loop: bool = True) -> bool:
    """Return whether forward and backward come from a CUDA graph (engine.graph) on a GPU. A loop
    of FSDP2's own has one only where it is asked for."""
    engine = config.engine
    wanted = engine.graph is True or (engine.graph == "auto" and own_loop)
    stays = not Residence.of(config).obstacle and config.cluster.pp == 1
    return wanted and engine.device != "cpu" and stays


def predict(
    config: Config, machine: Machine, link_gbps: float | None = None, own_loop: bool = True
) -> StepTime:
    """Return the step that `config` would train with engine=fsdp, one GPU a rank.

    link_gbps: of each node, in both directions; None where all GPUs are joined as those inside a
    node. own_loop=False: FSDP2 in a loop of its own, with its own rings and a norm in any
    order; recipe.secondary=true is then its resharding to the node.
    ValueError for what has no figures: models other than the built-in decoder, offload,
    DeepSpeed, a codec or mode that the machine's file lacks; NoFigures for a bus that it lacks and
    for interleaved stages.
    """
    _check(config, link_gbps)
    plan = plan_of(config)
    if not own_loop and config.cluster.split:
        raise NoFigures(f"torch's own {config.cluster.split} has no figures: use engine=fsdp")
    if not own_loop and quantizes_any(plan.recipe):
        raise ValueError(f"recipe {config.recipe.name}: plain FSDP2 has no codecs; use engine=fsdp")
    plain = not own_loop or is_untouched(plan, config.engine.ordered)
    cluster = config.cluster
    cells = cluster.gpus_per_node // cluster.dp.gpus_per_node
    transfers = Transfers(machine, link_gbps, plain, cells)

    def timed(plan: Plan, ends: tuple[bool, bool] = (True, True)) -> tuple[_Step, StepTime]:
        step = built(plan, ends)
        found = step.result()
        if plan.parts is not None:
            free = built(replace(plan, parts=None), ends).result()
            found = replace(found, parts_s=found.step_s - free.step_s)
        return step, found

    def built(plan: Plan, ends: tuple[bool, bool]) -> _Step:
        step = _Step(plan, config, transfers, ends)
        step.graph = replays(config, own_loop)
        step.build(own_loop)
        return step

    if plan.pipe is not None:
        return staged(plan, config, transfers, timed)
    return timed(plan)[1]


def _check(config: Config, link_gbps: float | None) -> None:
    if link_gbps is not None and link_gbps <= 0:
        raise ValueError(f"link_gbps={link_gbps:g}: use more than 0, or max for no limit")
    if config.model.name != "llama":
        raise ValueError(
            f"model={config.model.name}: only the built-in decoder has a cost formula; use a "
            "model.* preset of the same shape"
        )
    if config.engine.chunks > 1:
        raise NoFigures(
            f"engine.schedule={config.engine.schedule} has no figures: predict 1f1b, 1f1b_overlap "
            "or gpipe"
        )
    if config.engine.name == "deepspeed":
        raise ValueError("engine=deepspeed has no cost model: predict engine=fsdp")
    if Residence.of(config).offloads:
        raise ValueError("engine.offload=true has no figures: predict engine.offload=false")
    if config.recipe.phases:
        raise ValueError(
            f"recipe {config.recipe.name}: each phase has a step of its own: predict one of them, "
            "with its settings and recipe.phases=[]"
        )
    if config.recipe.remembers:
        raise ValueError(
            f"recipe {config.recipe.name}: error feedback has no measured figures: predict it "
            "without memory.kind, as a lower bound"
        )
    if config.train.param_dtype != "bf16":
        raise ValueError(
            f"train.param_dtype={config.train.param_dtype}: figures are of bf16; set "
            "train.param_dtype=bf16"
        )


class _Step:
    """Builds the tasks of one step on a timeline."""

    def __init__(
        self, plan: Plan, config: Config, transfers: Transfers, ends: tuple[bool, bool]
    ) -> None:
        """ends: whether the embedding and the head are here."""
        self.plan, self.config, self.machine = plan, config, transfers.machine
        self.transfers, self.ends = transfers, ends
        self.units = [u for u in plan.units if u.unit.name != "root"]
        self.root = plan.units[-1]
        self.mode = self.machine.mode(config.engine.compile)
        self.ahead = max(1, config.engine.prefetch)
        self.line = Timeline()
        self.graph = False  # whether the host starts forward and backward at once
        self.host: int | None = None  # the host's last task, of those that kernels wait for
        self.last = True  # whether this is the step's last micro-step
        self.decoded: list[int] = []  # copy-outs, in order
        self.fetched: dict[str, tuple[int, float]] = {}  # last transfer, and seconds to decode
        self.reduced: list[int] = []  # ends of reductions, in order
        self.renewed: dict[str, int] = {}  # units whose new weights nodes have
        self.state = State(plan, config, self.machine)
        self.updated: list[int] = []  # end of the last update
        self.turns = 0  # of the streams of updates
        self.fresh: dict[str, int] = {}  # units that are updated, where that waits for a forward
        self.normed: int | None = None  # the last piece
        self.landing: UnitPlan | None = None  # with train.clip_by=unit the last one reduced
        self.landed: set[str] = set()  # units of which host memory has gradients of this step
        self.acts = PartTimes(plan.parts, transfers) if plan.parts else None
        self.times = {
            id(u): self._kernels(block_work(u, config), u.unit.blocks) for u in self.units
        }

    def seconds(self, which: Pass) -> float:
        """Return the seconds of a micro-step's pass alone: the GPU's, or the host's where it needs
        longer."""
        at, blocks = list(OF).index(which), sum(u.unit.blocks for u in self.units)
        gpu = sum(times[at] for times in self.times.values()) + self._head()[at]
        host = blocks * self._host(which)
        for part in self._exchanges(which, blocks):
            gpu += part.kernels + part.transfer
            host += part.count * self.machine.host.gather_s
        return max(gpu, host)

    def _exchanges(self, which: Pass, blocks: int) -> list[Exchange]:
        """Return what tensor parts exchange in the pass of a micro-step."""
        if self.acts is None:
            return []
        found = [self.acts.block(which) * blocks]
        found += [self.acts.start(which)] if self.ends[0] else []
        found += [self.acts.head(which)] if self.ends[1] else []
        return [*found, *([self.acts.loss()] if self.ends[1] and which == "forward" else [])]

    def build(self, own_loop: bool) -> None:
        micros = self.plan.micro_steps
        if self.graph:
            self.host = self.line.add("host, graph", "host", "host", LAUNCH)
        if self.plan.recipe.kept:
            self._new_weights()
        for micro in range(micros):
            gathers = micro == 0 or self.plan.recipe.config.again
            self._forward(gathers)
            self.last = micro == micros - 1
            self._backward(reduces=self.last or not self.plan.accumulate_last)
        self._update(own_loop)

    def result(self) -> StepTime:
        ends, kinds, busy = self.line.run(), self.line.kinds(), self.line.busy()
        step = max(ends)
        optimizer = kinds.get("norm", 0.0) + kinds.get("optimizer", 0.0)
        overhead = (
            "acts kernels",
            "gather kernels",
            "reduce kernels",
            "update kernels",
            "lost to transfers",
        )
        codec = sum(kinds.get(kind, 0.0) for kind in overhead)
        compute = busy.get("gpu", 0.0) - optimizer - codec
        train = self.config.train
        sequences = train.batch_size * train.micro_steps * self.config.cluster.readers
        return StepTime(
            compute_s=compute,
            codec_s=codec,
            intra_s=busy.get("intra", 0.0),
            inter_s=busy.get("inter", 0.0),
            host_s=busy.get("host", 0.0),
            exposed_s=step - busy.get("gpu", 0.0),
            optimizer_s=optimizer,
            step_s=step,
            tokens_per_s=sequences * self.config.data.seq_len / step,
            parts={kind: seconds for kind, seconds in kinds.items() if seconds},
            bus_s=max(busy.get(IN, 0.0), busy.get(OUT, 0.0)),
            flush_s=self._flush(),
        )

    # ------------------------------------------------------------------ passes

    def _new_weights(self) -> None:
        """Of the step before, on a stream of their own."""
        before: int | None = None
        for unit in (self.root, *self.units):
            found, add = self.transfers.update(unit), self.line.add
            own = add("host, gathers", "host", "host", self.machine.host.gather_s)
            if not self.graph:  # else started while the graph before ran
                self.host = own
            waits = [None if self.graph else own, before]
            end = self._ship(found, "update", UPDATE, waits)
            before = add("update kernels", "update: decode", "gpu", found.kernels[-1], [end])
            self.renewed[unit.unit.name] = before

    def _forward(self, gathers: bool) -> None:
        order = [self.root, *self.units]
        ahead = self.config.engine.prefetch
        for i, unit in enumerate(order):
            if gathers:
                self._gather(unit, FORWARD)
                self._copy_out(unit)
                self._gather_ahead(order[i + 1 : i + 1 + ahead], FORWARD)
            if unit is not self.root:  # its work is the head's, at the end
                host = unit.unit.blocks * self._host("forward")
                self._compute("forward", self.times[id(unit)][0], host)
                self._exchange("forward", unit.unit.blocks)
        self._exchange("forward")
        head = self._head()
        self._compute("head", head[0], 0.0)

    def _backward(self, reduces: bool) -> None:
        order = self.units[::-1]
        regathers = self.plan.recipe.config.again
        if regathers:
            self._gather_ahead(order[: self.ahead], BACKWARD)
        self._compute("head", self._head()[1], 0.0)
        self._exchange("backward")
        for i, unit in enumerate(order):
            if regathers:
                self._copy_out(unit)
                self._gather_ahead(order[i + 1 : i + 1 + self.ahead], BACKWARD)
            # FSDP2 keeps the gradients of one reduction: the one before the last must have ended
            self.line.add("mark", "compute", None, 0.0, self.reduced[-2:-1])
            again = self.config.model.checkpoint_activations
            host = self._host("backward") + (self.machine.host.again_s(self.mode) if again else 0.0)
            done = self._compute("backward", self.times[id(unit)][1], unit.unit.blocks * host)
            done = self._exchange("backward", unit.unit.blocks) or done
            if reduces:
                self._reduce(unit, done)
        if reduces:
            self._reduce(self.root, self._mark())

    def _update(self, own_loop: bool) -> None:
        host = self.machine.host
        add = self.line.add
        self._finish()
        if self.acts is not None:
            add("mark", "compute", None, 0.0, self.reduced[-1:])
            self._exchanged(self.acts.shared())
        norm = self.state.norm(() if self.state.residence.by_unit else self.plan.units)
        before = [self._mark(), *self.reduced[-1:], self.normed]
        normed = add("norm", "compute", "gpu", norm, before)
        self.host = add("host, norm", "host", "host", host.norm_s if own_loop else 0.0)
        blocks = sum(u.unit.blocks for u in self.units)
        self.host = add("host, once a step", "host", "host", host.once_s(blocks))
        residence = self.state.residence
        if not (residence.waits or residence.by_unit):
            self._renew(self.line, self.plan.units, [normed])
        if not residence.waits:
            add("mark", "compute", None, 0.0, self.updated)
        self._mark()

    def _renew(self, line: Timeline, units: Sequence[UnitPlan], after: Iterable[int | None]) -> int:
        """Update units; return when their weights are new. Without forwards to wait for, all comes
        after the units before, and the end is when all is where it belongs."""
        deferred = self.state.residence.waits
        waits, ends = [*after, *(() if deferred else self.updated)], list[int]()
        for stage in self.state.stages(units):
            lane = self._turn()
            if stage.comes:
                line.add("state in", lane, IN, stage.comes, waits)
            ends.append(line.add("optimizer", lane, "gpu", stage.update, waits))
            if stage.goes:
                gone = line.add("state out", lane, OUT, stage.goes, waits)
                ends += [] if deferred else [gone]
        self.updated = [line.add("mark", "update: end", None, 0.0, [*ends, *waits])]
        return self.updated[0]

    def _turn(self) -> str:
        """Return the next stream of transfers from host memory."""
        self.turns += 1
        return f"update: {(self.turns - 1) % STREAMS}"

    def _flush(self) -> float:
        """Return the seconds of a deferred update alone."""
        if not self.state.residence.waits:
            return 0.0
        line, self.updated, self.turns = Timeline(), [], 0
        for unit in (self.root, *self.units):
            self._renew(line, [unit], [])
        return max(line.run())

    # ------------------------------------------------------------------ pieces

    def _compute(self, kind: str, seconds: float, host: float) -> int:
        """Kernels that start while the host launches them, and end after the last launch."""
        before = self.host
        self._launch(kind, host)
        slices = SLICES if self.state.bus or self.state.residence.by_unit else 1
        for _ in range(slices):
            self.line.add(kind, "compute", "gpu", seconds / slices, [before])
        return self._mark()

    def _exchange(self, which: Pass, blocks: int = 0) -> int | None:
        """Between tensor parts, on the compute stream: of some blocks, or (0) of the two ends."""
        if self.acts is None:
            return None
        every = self._exchanges(which, 0)[1:]
        for part in [self.acts.block(which) * blocks] if blocks else every:
            self._exchanged(part)
        return self._mark()

    def _exchanged(self, part: Exchange) -> None:
        before = self.host
        self._launch("exchanges", part.count * self.machine.host.gather_s)
        self.line.add("acts kernels", "compute", "gpu", part.kernels, [before])
        self.line.add(f"{part.wire}, intra", "compute", "intra", part.transfer)

    def _launch(self, kind: str, seconds: float) -> None:
        """Add a task of the host that a graph spares it."""
        if not self.graph:
            self.host = self.line.add(f"host, {kind}", "host", "host", seconds)

    def _mark(self) -> int:
        """The compute stream, when all that the host has started so far can have ended."""
        return self.line.add("mark", "compute", None, 0.0, [self.host])

    def _gather_ahead(self, units: Sequence[UnitPlan], wire: Wire) -> None:
        for unit in units:
            self._gather(unit, wire)

    def _gather(self, unit: UnitPlan, wire: Wire) -> None:
        """Start a gather, unless it is under way, once the gather `ahead` of it is decoded."""
        name = unit.unit.name
        if name in self.fetched:
            return
        updated = self.state.residence.waits and name not in self.fresh
        if updated:
            self.fresh[name] = self._renew(self.line, [unit], [self.host])
        found = self.transfers.gather(unit, wire)
        place = len(self.decoded) + len(self.fetched) - self.ahead
        free = self.decoded[place] if 0 <= place < len(self.decoded) else None
        self._launch("gathers", self.machine.host.gather_s)
        renewed = [self.renewed.get(name), self.fresh.get(name)]
        if coming := self.state.coming(unit, wire, updated):
            lane, waits = self._turn(), [self.host, free, *renewed]
            renewed += [self.line.add("state in", lane, IN, coming / self.state.way, waits)]
        end = self._ship(found, "gather", wire, [self.host, free, *renewed])
        self.fetched[name] = end, found.kernels[-1]

    def _copy_out(self, unit: UnitPlan) -> None:
        """Decode on the compute stream what has arrived."""
        arrived, seconds = self.fetched.pop(unit.unit.name)
        self.decoded.append(self.line.add("gather kernels", "compute", "gpu", seconds, [arrived]))

    def _reduce(self, unit: UnitPlan, done: int | None) -> None:
        if not unit.unit.trainable:
            return
        found = self.transfers.reduction(unit, self.last)
        self._launch("reductions", self.machine.host.reduce_s)
        leaving, before = self.state.leaving(unit), [self.host, done]
        # a transfer to host memory holds up the stream of reductions
        before += self.reduced[-1:] if leaving else []
        before += self.updated if self.state.residence.by_unit else []
        end = self._ship(found, "reduce", "grads", before)
        end = self.line.add("reduce kernels", "reduce: sum", "gpu", found.kernels[-1], [end])
        self.reduced.append(self._leave(unit, leaving, end) if leaving else end)
        if self.state.residence.by_unit:
            norm = self.state.norm([unit])
            self.normed = self.line.add("norm", "reduce: sum", "gpu", norm, [end])
        self._finish()
        self.landing = unit if self.state.residence.by_unit else None

    def _finish(self) -> None:
        """With train.clip_by=unit update the unit before, once another has been reduced."""
        unit, self.landing = self.landing, None
        if unit is not None:
            self._renew(self.line, [unit], self.reduced[-1:])

    def _leave(self, unit: UnitPlan, nbytes: int, end: int) -> int:
        """Add what host memory has of earlier micro-steps, and send the sum there."""
        lane, seconds = "reduce: sum", nbytes / self.machine.memory_bytes_per_s
        if unit.unit.name in self.landed:
            self.line.add("gradients in", lane, IN, nbytes / self.state.way, [end])
            self.line.add("norm", lane, "gpu", 3 * seconds)
        self.landed.add(unit.unit.name)
        if self.last:
            self.line.add("norm", lane, "gpu", seconds, [end])
        assert self.state.bus is not None
        return self.line.add("gradients out", lane, OUT, nbytes / self.state.bus.to_host, [end])

    def _ship(
        self, found: Collective, what: str, wire: Wire | str, after: Sequence[int | None]
    ) -> int:
        """All of a collective but its last kernel; the last transfer."""
        waits = list(after)
        for i, (kernel, sent) in enumerate(zip(found.kernels, found.transfers, strict=False)):
            kernels = f"{what} kernels"
            own = self.line.add(kernels, f"{what}: kernel {i}", "gpu", kernel, waits)
            share = self.machine.inside.gpu_share if sent.link == "intra" and sent.seconds else 0.0
            if share:
                lost = sent.seconds * share
                self.line.add("lost to transfers", f"{what}: lost {i}", "gpu", lost, [own])
            kind = f"{wire}, {sent.link}"
            waits = [self.line.add(kind, f"{what}: transfer {i}", sent.link, sent.seconds, [own])]
        assert waits[0] is not None
        return waits[0]

    # ------------------------------------------------------------------ seconds

    def _kernels(self, work: Work, blocks: int = 1) -> tuple[float, float]:
        """Of so many blocks: forward, and backward with what it computes again."""
        curve = self.machine.compute[self.mode]
        forward = blocks * curve.seconds(work.forward / blocks / self.config.cluster.tp)
        return forward, forward * (work.backward + work.recompute) / work.forward

    def _head(self) -> tuple[float, float]:
        """Of the head and the loss, forward and backward."""
        if not self.ends[1]:
            return 0.0, 0.0
        vocab, train = vocabulary(self.config), self.config.train
        work = head_work(self.root, self.config, vocab)
        each = 1 if self.config.model.scalar_head else vocab
        logits = train.batch_size * self.config.data.seq_len * each
        loss = LOSS / 2 * logits / self.config.cluster.tp / self.machine.memory_bytes_per_s
        forward, backward = self._kernels(work)
        return forward + loss, backward + loss

    def _host(self, which: str) -> float:
        host = self.machine.host
        by_mode = host.block_forward_s if which == "forward" else host.block_backward_s
        return by_mode[self.mode]
