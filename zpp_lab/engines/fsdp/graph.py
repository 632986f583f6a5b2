"""Forward and backward of a step as one CUDA graph with all transfers inside: one call of the host.

At few tokens a GPU the host takes longer to start a step's kernels than the GPU to run them. Here
FSDP2's own path, with the recipe's collectives, is captured once and replayed: the same kernels in
the same order, so no bit depends on it. Norm, clipping and update stay eager; the host starts them
while the graph runs.

What a captured step reads that changes from step to step lies on the device: batches, the keys of
rounding noise (`Words`), the count of the ranks' meetings over peer memory (cuda/peer/ship.cu), and
events that stand outside of the graph (new weights of node-replicated recipes). What it leaves on
the host - gradients, bytes, which parameters were reduced - is put back after each replay.

Capture is a decision of all ranks. Two equal steps come before it, in the second of which torch
looks for calls that wait for the device: a graph cannot hold these. Whatever runs between two
replays - a step with telemetry, an evaluation, another state - gives the graph's memory back
first, and the next step captures again. `drop` comes before `destroy_process_group`, too: NCCL
ends a communicator only after all graphs that hold its transfers.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab.codecs import Noise, noise_key
from zpp_lab.collectives.context import Clock, Key
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.plan import Bytes, StepUse
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.wires import Wire
from zpp_lab.engines.base import Batch
from zpp_lab.engines.fsdp.wrap import Wrapped

WARM_UP = 2  # equal steps before a capture: kernels are loaded, buffers made, prefetches known
Draw = tuple[int, Wire, tuple[int, ...], tuple[int, ...]]  # micro-step, wire, ranks, rows
Run = Callable[[int, Sequence[Batch]], tuple[Tensor, StepUse]]


class Words:
    """What a captured step's encoders draw from, on the device: rows and key of each draw."""

    def __init__(self, seed: int, device: torch.device, room: int) -> None:
        """`room`: rows of all draws together, at most."""
        self.seed = seed
        self.device = torch.zeros(room, 2, dtype=torch.int32, device=device)
        self.rows: list[tuple[int, int]] = []
        self.places: dict[Draw, tuple[int, int]] = {}  # first row, and the key's

    def draw(self, micro: int, wire: Wire, ranks: tuple[int, ...], rows: tuple[int, ...]) -> Noise:
        """The noise of a draw, with the key of whichever step `load` was called for."""
        key = micro, wire, ranks, rows
        if key not in self.places:
            self.places[key] = len(self.rows), len(self.rows) + len(rows)
            self.rows += [*zip(ranks, rows, strict=True), (0, 0)]
            assert len(self.rows) <= len(self.device), "more draws than a step has"
        first, last = self.places[key]
        return Noise(0, ranks, rows, self.device[first : last + 1])

    def load(self, step: int) -> None:
        """Take the keys of this step, on the current stream."""
        for (micro, wire, _, _), (_, place) in self.places.items():
            key = noise_key(self.seed, step, micro, wire)
            self.rows[place] = _signed(key & 0xFFFFFFFF), _signed(key >> 32)
        if self.rows:
            new = torch.tensor(self.rows, dtype=torch.int32, pin_memory=self.device.is_cuda)
            self.device[: len(self.rows)].copy_(new, non_blocking=True)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@dataclass
class Step:
    """A captured step: its graph, what that reads, and what a replay leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Batch]
    words: Words
    labels: list[object]  # of its transfers
    made: list[int]  # how often each ring's buffers had been made
    losses: Tensor
    use: StepUse
    grads: Mapping[str, Tensor]
    sent: Sequence[Bytes]  # of each unit
    reduced: Sequence[list[tuple[str, ...]]]
    remembered: Mapping[Key, Tensor]  # error-feedback residuals that it writes


class StepGraph:
    """Captures and replays `run`, the gradients of a step, for one rank's engine."""

    def __init__(
        self,
        run: Run,
        wanted: bool | str,
        why_not: str,
        parameters: Mapping[str, nn.Parameter],
        wrapped: Wrapped,
        transport: Transport,
        watchdog: Watchdog,
        device: torch.device,
    ) -> None:
        """`wanted`: engine.graph; why_not: what stands against it on all ranks, if anything."""
        self.run, self.parameters, self.wrapped = run, parameters, wrapped
        self.transport, self.watchdog, self.device = transport, watchdog, device
        self.on = bool(wanted) and not why_not
        if wanted and why_not and device.type == "cuda":
            self._say(why_not)
        self.step: Step | None = None
        self.like: Any = None  # what the last eager step was like
        self.seen = 0  # eager steps like it, one after the other
        self.replays = 0
        self.rings: set[tuple[str, str]] = set()  # that a step uses
        if self.on and torch.cuda.current_stream() == torch.cuda.default_stream():
            # autograd remembers on which stream a gradient is added up: the one of all captures
            torch.cuda.set_stream(torch.cuda.Stream())

    @property
    def ready(self) -> bool:
        """Whether the next step is replayed."""
        return self.on and self.seen >= WARM_UP

    def drop(self) -> None:
        """Give the graph's memory back: something else is about to run."""
        if self.step is not None:
            self.step = None
            torch.cuda.empty_cache()

    def restart(self) -> None:
        """Steps are others from now on."""
        self.drop()
        self.like, self.seen = None, 0

    def note(self, like: Any) -> None:
        """An eager step without telemetry has run; `like`: the same object after equal steps."""
        self.seen = 0 if like is None else self.seen + 1 if like is self.like else 1
        self.like = like

    def eager(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, StepUse]:
        """Run a step without telemetry, and see whether the ones after it can be captured."""
        self.drop()
        if not self.on or self.seen != WARM_UP - 1:
            return self.run(step, batches)
        before = self._uses()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made = self.run(step, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.rings = {key for key, use in self._uses().items() if use != before.get(key)}
        waits = [str(w.message) for w in found if "called a synchronizing" in str(w.message)]
        self._agree(f"the model waits for the GPU ({waits[0].splitlines()[0]})" if waits else "")
        return made

    def replay(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, StepUse]:
        """Run a step from its graph, which is captured if there is none."""
        shapes = [[t.shape for t in batch] for batch in batches]
        if self.step is not None and (
            shapes != [[t.shape for t in b] for b in self.step.inputs]
            or self.step.made != self._made()  # another engine has had larger shared buffers made
        ):
            self.drop()
        if self.step is None:
            self._capture(step, batches)
        assert self.step is not None
        captured = self.step
        for own, new in zip(captured.inputs, batches, strict=True):
            for mine, batch in zip(own, new, strict=True):
                pinned = mine.is_cuda and not batch.is_cuda
                mine.copy_(batch.pin_memory() if pinned else batch, non_blocking=True)
        captured.words.load(step)
        transfers = self.watchdog.graphs(self.device)
        transfers.start(captured.labels)
        with self.watchdog.watch(transfers, self.device, self.transport.rank):
            captured.graph.replay()
        self.replays += 1
        self._rebase(meet=False)
        self._put_back(captured)
        return captured.losses, captured.use

    # ------------------------------------------------------------------ parts

    def _capture(self, step: int, batches: Sequence[Batch]) -> None:
        inputs = [tuple(t.to(self.device) for t in batch) for batch in batches]
        clock: Clock = self.wrapped.clock
        cluster = self.transport.cluster
        words = Words(clock.seed, self.device, len(batches) * 8 * (cluster.world + 2))
        graph = torch.cuda.CUDAGraph()
        transfers = self.watchdog.graphs(self.device)
        clock.drawn, self.watchdog.capturing = words.draw, transfers
        failed: BaseException | None = None
        made = None
        collects = gc.isenabled()
        gc.disable()  # what it frees may be marked on streams that are captured
        try:
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                try:
                    transfers.begin()
                    self._rebase(meet=True)
                    made = self.run(step, inputs)
                except BaseException as error:
                    failed = error
        except RuntimeError as error:  # the capture could not end, mostly because of the first one
            failed = failed or error
        finally:
            clock.drawn = self.watchdog.capturing = None
            if collects:
                gc.enable()
        if isinstance(failed, torch.OutOfMemoryError) or not isinstance(failed, Exception | None):
            raise failed
        self._all_captured("" if failed is None else f"{failed}".partition("\n")[0])
        assert made is not None
        self._rebase(meet=False)
        units = self.wrapped.installed
        self.step = Step(
            graph,
            inputs,
            words,
            transfers.labels,
            self._made(),
            *made,
            {n: p.grad for n, p in self.parameters.items() if p.grad is not None},
            [dict(unit.ledger.step) for unit in units],
            [list(unit.present.taken) for unit in units],
            dict(self.wrapped.memories.new),
        )

    def _all_captured(self, problem: str) -> None:
        """ValueError on all ranks where one could not capture: what FSDP2 was about is lost."""
        found = self._gathered(problem)
        if found:
            raise ValueError(
                f"a step could not be captured in a CUDA graph ({found}): set engine.graph=false"
            )

    def _put_back(self, captured: Step) -> None:
        for name, p in self.parameters.items():
            p.grad = captured.grads.get(name)
        units = zip(self.wrapped.installed, captured.sent, captured.reduced, strict=True)
        for unit, sent, reduced in units:
            unit.ledger.step, unit.present.taken = dict(sent), list(reduced)
        memories = self.wrapped.memories
        memories.new = dict(captured.remembered)
        memories.written = {(key, rank) for key in memories.new for rank in memories.ranks}

    def _uses(self) -> dict[tuple[str, str], int]:
        """How often each ring of peer memory has been used."""
        if not isinstance(self.transport, PeerTransport):
            return {}
        return {key: ring.use for key, ring in self.transport.rings.items()}

    def _made(self) -> list[int]:
        if not isinstance(self.transport, PeerTransport):
            return []
        return [ring.made for key, ring in self.transport.rings.items() if key in self.rings]

    def _rebase(self, meet: bool) -> None:
        if isinstance(self.transport, PeerTransport):
            for key, ring in self.transport.rings.items():
                if key in self.rings:
                    ring.rebase(meet)

    def _agree(self, problem: str) -> None:
        """Stay eager on all ranks where one cannot capture, and say why once."""
        found = self._gathered(problem)
        if found:
            self.on = False
            self._say(found)

    def _say(self, why: str) -> None:
        if self.transport.rank == 0:
            print(f"zpp_lab: steps run without a CUDA graph: {why}", file=sys.stderr)

    def _gathered(self, problem: str) -> str:
        """The first rank's problem that has one."""
        every = [problem] * dist.get_world_size()
        dist.all_gather_object(every, problem)
        return next(filter(None, every), "")


def obstacle(device: torch.device, offload: bool, static: bool) -> str:
    """What stands against a CUDA graph of a step before any has run; "" for nothing. The same on
    all ranks."""
    if device.type != "cuda":
        return "there is no GPU"
    backends = dist.get_backend_config()
    if "cuda:nccl" not in backends:
        return f"transfers go over {backends}, not NCCL"
    if offload:
        return "engine.offload=true updates on the host"
    if "expandable_segments:True" in os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")
    ):
        return "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
    if not static:
        return "this model may run other code from step to step"
    return ""
