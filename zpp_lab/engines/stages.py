"""This rank's stages of a pipeline. torch's schedules order the passes and send what stages give;
1f1b_overlap is our own.

A stage ends by encoding and begins by decoding (`collectives/pipe.py`), so schedules send payloads
alone. The micro-batches of a schedule are the step's micro-steps. Each rank has the whole batch.
Weights are gathered once a step. This file chooses which backward reduces: FSDP2 would reduce all
stages of a rank once one of them is ready. Evaluation sends uncompressed activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.pipe import Pass, Pipe, name_of, passes
from zpp_lab.collectives.plan import Bytes, Plan
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.collectives.watchdog import meeting
from zpp_lab.config.cluster import CELL
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import ACTS_PIPE
from zpp_lab.data.packed import IGNORED
from zpp_lab.engines.base import Batch
from zpp_lab.engines.fsdp.watch import RankWatch
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.units import ROOT
from zpp_lab.models.stages import blocks_of

BETWEEN = f"{ACTS_PIPE} (stages)"


class OwnStages:
    """The stages of this rank; `model` has them, `wrapped` is it under FSDP2."""

    def __init__(self, model: Any, plan: Plan, config: Config, wrapped: Wrapped) -> None:
        assert plan.pipe is not None
        cluster, rank = config.cluster, dist.get_rank()
        self.model, self.wrapped, self.clock = model, wrapped, wrapped.clock
        self.tp, self.kind = cluster.tp, config.engine.schedule
        self.dtype = DTYPES[config.train.param_dtype]
        self.device = next(model.parameters()).device
        self.ranks, place = cluster.members({"pp"}, rank), cluster.place(rank)
        self.place, self.count = place["pp"], plan.pipe.stages
        self.group = dist.new_group(self.ranks, use_local_synchronization=True)
        self.back: Any = None  # gradients' own group in 1f1b_overlap, as in `_Overlap`
        if self.kind == "1f1b_overlap":
            self.back = dist.new_group(self.ranks, use_local_synchronization=True)
            for group in (self.group, self.back):  # NCCL connects all ranks at a group's first use
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self.pipe = Pipe(plan.pipe, self.clock, Ledger(), (place["tp"],))
        self.pipe.reader = cluster.members(CELL, rank).index(rank)
        self.stage_of = {
            f"layers.{i}": stage
            for stage in model.own
            for i in blocks_of(model.cfg.layers, self.count, stage)
        }
        self.stage_of[ROOT] = 0 if self.place == 0 else self.count - 1
        self.schedules: dict[int, Any] = {}  # by the bytes of a payload
        for module in wrapped.by_name.values():  # backward finds the weights, and gathers none
            module.set_modules_to_backward_prefetch([module])
            module.set_reshard_after_backward(False, recurse=False)

    # ------------------------------------------------------------------ one step

    def run(self, batches: Sequence[Batch], plan: Plan, watch: RankWatch | None) -> Tensor:
        """Run forward and backward of every micro-step; returns their losses, fp64, where the last
        stage is, else zeros."""
        self.batches, self.plan, self.watch = batches, plan, watch
        self.losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        self.pipe.ledger.start_step()
        nbytes = self.pipe.plan.layout.nbytes
        with meeting(BETWEEN):
            if self.back is not None:
                _Overlap(self, nbytes // 4).run()
            else:
                self._run_schedule(nbytes)
        self.clock.observer = None
        self.wrapped.reshard()
        return self.losses

    def _run_schedule(self, nbytes: int) -> None:
        if nbytes not in self.schedules:
            self.schedules[nbytes] = self._schedule(nbytes)
        each = torch.zeros(self.plan.micro_steps, device=self.device)  # split; stages ignore it
        first, last = 0 in self.model.own, self.count - 1 in self.model.own
        self.schedules[nbytes].step(*([each] if first else []), target=each if last else None)

    def _schedule(self, nbytes: int) -> Any:
        payload = torch.empty(nbytes // 4, device="meta", requires_grad=True)
        one = torch.empty(1, device="meta")
        stages = [
            _Stage(
                self,
                _Chunk(self, stage),
                stage,
                self.count,
                self.device,
                input_args=payload if stage else one,
                output_args=payload if stage < self.count - 1 else one,
                group=self.group,
            )
            for stage in self.model.own
        ]
        how: Any = {"loss_fn": self.loss, "scale_grads": False}
        if self.kind == "interleaved":
            return ScheduleInterleaved1F1B(list(stages), self.plan.micro_steps, **how)
        kind = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
        return kind(stages[0], self.plan.micro_steps, **how)

    def loss(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        """Return a micro-step's share of the step's loss, from what the last stage gave."""
        return output[0] / self.plan.micro_steps

    def enter(self, micro: int) -> None:
        """A forward or a backward of this micro-step begins."""
        self.clock.micro, self.clock.last = micro, micro == self.plan.micro_steps - 1
        self.clock.observer = self.watch.at(micro) if self.watch else None

    def forward(self, stage: int, payload: Tensor) -> Tensor:
        """Run a stage on what the one before it sent."""
        batch, x = self.batches[self.clock.micro], None
        if stage:
            shape = self._shape(batch)
            (x,) = self.pipe.into(name_of(stage - 1), stage, [payload], shape, self.dtype)
        out: Tensor = self.model(x, *batch, stage=stage)
        if stage < self.count - 1:
            return self.pipe.out(name_of(stage), stage, [out])[0]
        self.losses[self.clock.micro] = out.detach()
        return torch.stack([out])

    def before_backward(self, stage: int, micro: int) -> None:
        self.enter(micro)
        reduces = self._reduces(micro)
        for name, module in self.wrapped.by_name.items():
            own = self.stage_of[name] == stage
            module.set_requires_gradient_sync(reduces and own, recurse=False)

    def after_backward(self, stage: int, micro: int) -> None:
        for unit in self.wrapped.installed if not self._reduces(micro) else ():
            if self.stage_of[unit.plan.unit.name] == stage:
                unit.present.dtypes.keep()
        self.wrapped.under_way.join()

    def _reduces(self, micro: int) -> bool:
        return micro == self.plan.micro_steps - 1 or not self.plan.accumulate_last

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of activations between blocks: all tokens', or a part's slice."""
        dim, tokens = self.model.cfg.dim, batch[0]
        return (*tokens.shape, dim) if self.tp == 1 else (tokens.numel() // self.tp, dim)

    def every(self, sent: Bytes, own: Plan, plan: Plan) -> Bytes:
        """Return what all ranks sent in a step of `plan`, where those of these stages sent `sent`.
        LedgerError where these, or this rank's activations, are not as planned."""
        self.pipe.ledger.check({ACTS_PIPE: self.pipe.plan.own(self.place)})
        ledger = Ledger()
        ledger.step = sent
        ledger.check(own.step_bytes())
        return plan.step_bytes()

    # ------------------------------------------------------------------ evaluation

    def scores(self, batch: Batch) -> Tensor:
        """Return the scores of a batch's counted targets where the last stage is, else none; every
        rank of the pipeline calls it."""
        found, ranks = torch.empty(2, 0, device=self.device), self.ranks
        with meeting(BETWEEN):
            for stage in self.model.own:
                x = None
                if stage:
                    x = torch.empty(self._shape(batch), dtype=self.dtype, device=self.device)
                    dist.recv(x, ranks[(stage - 1) % len(ranks)], group=self.group)
                out = self.model(x, *batch, each=True, stage=stage)
                if stage < self.count - 1:
                    dist.send(out.contiguous(), ranks[(stage + 1) % len(ranks)], group=self.group)
                else:
                    found = out[:, batch[1].flatten() != IGNORED]
        return found


class _Overlap:
    """A step of 1f1b_overlap, whose ticks are `passes` in `collectives/pipe.py`.

    At the start of a tick a rank posts the transfers of what it and its neighbours computed in the
    last one. Then it waits for those that it posted a tick before, and computes. So no transfer
    needs one that any rank posts later, and two ticks' are under way at most. NCCL runs a group's
    transfers in order: with one group for both directions, gradients would wait for activations.

    Payloads are referenced until their transfer is waited for. On a GPU the wait is the computing
    stream's, and memory is reused in that stream's order. What an error leaves under way ends with
    the run.
    """

    def __init__(self, by: OwnStages, numel: int) -> None:
        """Prepare a step of these stages; numel: fp32 values of a payload."""
        self.by, self.numel, (self.stage,) = by, numel, by.model.own
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # by micro-step, until its backward
        self.got: dict[tuple[Pass, int], Tensor] = {}  # or about to get
        self.made: dict[Pass, Tensor] = {}  # in the last tick

    def run(self) -> None:
        """Run every micro-step; return once this rank's last payload is sent."""
        under_way: list[_Posted] = []
        stages, micros = self.by.count, self.by.plan.micro_steps
        for tick in range(micros + 4 * (stages - 1) - 2 * self.stage + 1):
            posted = self._post(tick)
            _wait(under_way)
            under_way = posted
            for which, micro in passes(stages, self.stage, micros, tick):
                (self._forward if which == "forward" else self._backward)(micro)
        _wait(under_way)

    def _post(self, tick: int) -> list[_Posted]:
        by, posted = self.by, list[_Posted]()
        ways: list[tuple[Pass, int, Any]] = [("forward", 1, by.group), ("backward", -1, by.back)]
        for which, step, group in ways:
            ops, source, target = list[dist.P2POp](), self.stage - step, self.stage + step
            if 0 <= source < by.count:
                came = dict(passes(by.count, source, by.plan.micro_steps, tick - 1))
                if (micro := came.get(which)) is not None:
                    room = torch.empty(self.numel, device=by.device)
                    self.got[which, micro] = room
                    ops.append(dist.P2POp(dist.irecv, room, by.ranks[source], group))
            if 0 <= target < by.count and which in self.made:
                ops.append(dist.P2POp(dist.isend, self.made.pop(which), by.ranks[target], group))
            if ops:
                posted.append((dist.batch_isend_irecv(ops), ops))
        return posted

    def _forward(self, micro: int) -> None:
        self.by.enter(micro)
        payload = torch.empty(0)  # of the first stage, which reads the batch
        if self.stage:
            payload = self.got.pop(("forward", micro)).requires_grad_()
        out = self.by.forward(self.stage, payload)
        self.kept[micro], self.made["forward"] = (payload, out), out.detach()

    def _backward(self, micro: int) -> None:
        payload, out = self.kept.pop(micro)
        self.by.before_backward(self.stage, micro)
        if self.stage == self.by.count - 1:
            self.by.loss(out).backward()  # type: ignore[no-untyped-call]
        else:
            out.backward(self.got.pop(("backward", micro)))  # type: ignore[no-untyped-call]
        self.by.after_backward(self.stage, micro)
        if self.stage:
            assert payload.grad is not None  # else the stage before would wait for it
            self.made["backward"] = payload.grad


_Posted = tuple[list[dist.Work], list[dist.P2POp]]


def _wait(posted: list[_Posted]) -> None:
    for works, _ in posted:
        for work in works:
            work.wait()


class _Chunk(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, by: OwnStages, stage: int) -> None:
        super().__init__()
        self.by, self.stage = by, stage

    def forward(self, payload: Tensor) -> Tensor:
        return self.by.forward(self.stage, payload)


class _Stage(PipelineStage):
    """Says which micro-step runs."""

    def __init__(self, by: OwnStages, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by = by

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.by.enter(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.by.before_backward(self.stage_index, bwd_chunk_id)
        made = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.by.after_backward(self.stage_index, bwd_chunk_id)
        return made
