"""Forward and backward of a step as one CUDA graph with all transfers inside: one call of the host.

At few tokens a GPU the host takes longer to start a step's kernels than the GPU to run them. Here
FSDP2's own path, with the recipe's collectives, is captured once and replayed: the same kernels in
the same order, so no bit depends on it. Squares of gradients are summed inside it too; norm,
clipping and update stay eager, and the host starts them while the graph runs.

What a captured step reads that changes from step to step lies on the device: batches, the keys of
rounding noise (`Words`), the count of the ranks' meetings over peer memory (cuda/peer/ship.cu),
and events that stand outside of the graph (new weights of node-replicated recipes). What it leaves
on the host - gradients, bytes, which parameters were reduced - is put back after each replay.

Capture is a decision of all ranks. Two equal steps come before it, in the second of which torch
looks for calls that wait for the device: a graph cannot hold these. Whatever runs between two
replays - a step with telemetry, an evaluation, another state - gives the graph's memory back
first, and the next step captures again, unless such interruptions come so often that a graph does
not pay. `drop` comes before `destroy_process_group`, too: NCCL ends a communicator only after all
graphs that hold its transfers.

Where a capture fails on a rank, all ranks take the model back to where it was (`idle.py`) and run
the step eagerly, and those after it. They end where a transfer itself has failed: a communicator
that met an error in the middle of a call cannot be used again.

A rank whose batch has another shape than the captured one cannot tell the others before they
replay: they ask nothing of the host. It replays, too, with the former batch, and marks its
gradient norm as not finite; so no rank updates anything, and all run the step again.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zpp_lab.codecs import Noise, noise_key
from zpp_lab.collectives.context import Key
from zpp_lab.collectives.ledger import Ledger
from zpp_lab.collectives.peer.slots import Ring
from zpp_lab.collectives.peer.transport import PeerTransport
from zpp_lab.collectives.plan import Bytes
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import CollectiveError
from zpp_lab.config.residence import Residence
from zpp_lab.config.wires import Wire
from zpp_lab.engines.base import Batch
from zpp_lab.engines.fsdp.comm import managed
from zpp_lab.engines.fsdp.idle import Idle, end_capture
from zpp_lab.engines.fsdp.wrap import Wrapped
from zpp_lab.engines.rollout import expandable_segments

WARM_UP = 2  # equal steps before a capture: kernels are loaded, buffers made, prefetches known
PAYS = 3  # replays that make up for a capture, which takes the host as long as two eager steps
MISFITS = 3  # batches of another shape, after which steps stay eager
NO_GPU = "there is no GPU"
Run = Callable[[int, Sequence[Batch]], Any]
Shapes = list[list[torch.Size]]
Draw = tuple[int, Wire, tuple[int, ...], tuple[int, ...]]  # micro-step, wire, ranks, rows


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
    sizes: list[int]  # how often each ring's buffers had been made
    made: Any  # what it returns
    grads: list[tuple[Any, Tensor | None]]  # of each of FSDP2's parameter objects
    sent: Sequence[Bytes]  # by each of `ledgers`
    reduced: Sequence[list[tuple[str, ...]]]
    remembered: dict[Key, Tensor]  # error-feedback residuals that it writes


@dataclass(frozen=True)
class Launched:
    """A step that is under way. made: what it returns; odd: of a replay, what of this rank's batch
    does not fit the captured step, which then computes with the last batch that did. None: it is no
    replay."""

    step: int
    made: Any
    odd: str | None = None


class StepGraph:
    """Captures and replays `run`, the gradients of a step, for one rank."""

    def __init__(
        self,
        run: Run,
        wrapped: Wrapped,
        transport: Transport,
        wanted: bool | str,
        why_not: str,
        ledger: Ledger | None = None,
    ) -> None:
        """`wanted`: engine.graph; why_not: what stands against it on all ranks, if anything;
        ledger: of transfers that are no unit's."""
        self.run, self.wrapped, self.transport, self.wanted = run, wrapped, transport, wanted
        self.ledger = ledger
        self.watchdog = transport.watchdog
        self.device = next(wrapped.model.parameters()).device
        self.on = bool(wanted) and not why_not
        if wanted and why_not not in ("", NO_GPU):
            self._say(why_not)
        self.step: Step | None = None
        self.like: Any = None  # what the last eager step was like
        self.seen = 0  # eager steps like it, one after the other
        self.replays = self.misfits = 0
        self.fix = "set engine.graph=false"  # what a user does about a failed capture
        self.micros = 0  # micro-steps of a step; 0: one a batch
        self.since, self.lasted = 0, PAYS  # steps since an interruption, and between the last two
        self.used: set[Any] = set()  # keys of rings that a step uses
        if self.on and torch.cuda.current_stream() == torch.cuda.default_stream():
            # autograd remembers on which stream a gradient is added up: the one of all captures
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)

    @property
    def ready(self) -> bool:
        """Whether the next step is replayed."""
        return self.on and self.seen >= WARM_UP and max(self.since, self.lasted) >= PAYS

    def drop(self) -> None:
        """Give the graph's memory back."""
        if self.step is not None:
            self.step = None
            torch.cuda.empty_cache()

    def interrupt(self) -> None:
        """Something else than a usual step is about to run."""
        self.drop()
        self.lasted, self.since = self.since or self.lasted, 0

    def restart(self) -> None:
        """Steps are others from now on."""
        self.drop()
        self.like, self.seen = None, 0

    def note(self, like: Any) -> None:
        """A usual step has run; `like`: the same object after equal steps."""
        self.seen = 0 if like is None else self.seen + 1 if like is self.like else 1
        self.like, self.since = like, self.since + 1

    def eager(self, step: int, batches: Sequence[Batch]) -> Any:
        """Run a usual step, and see whether the ones after it can be captured."""
        self.drop()
        if not self.on or self.seen != WARM_UP - 1:
            return self.run(step, batches)
        before = {key: ring.use for key, ring in self._rings().items()}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made = self.run(step, batches)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.used = {key for key, ring in self._rings().items() if ring.use != before.get(key)}
        waits = [str(w.message) for w in found if "called a synchronizing" in str(w.message)]
        self._agree(f"the model waits for the GPU ({waits[0].splitlines()[0]})" if waits else "")
        # new weights travel while the graph runs, and no mark orders the two within a ring
        updates = {("gather", u.update.link) for u in self.wrapped.installed if u.update}
        if shared := updates & self.used:
            self._agree(f"new weights and steps share the memory of {min(shared)}")
        return made

    def replay(self, step: int, batches: Sequence[Batch]) -> Launched:
        """Run a step from its graph, which is captured if there is none; where that fails on a
        rank, eagerly on all."""
        if not self._there and not self._capture(step, batches):
            return Launched(step, self.run(step, batches))
        launched = self._launch(step, batches)
        self.put_back()
        return launched

    def ahead(self, step: int, batches: Callable[[], Sequence[Batch]]) -> Launched | None:
        """Launch a step behind the one before, if that was replayed and nothing else will be asked
        for in between; `put_back` is due when it is its turn. `batches`: makes the step's."""
        return self._launch(step, batches()) if self.ready and self._there else None

    @property
    def _there(self) -> bool:
        if self.step is not None and self.step.sizes != self._sizes():
            self.drop()  # another engine has had larger shared buffers made
        return self.step is not None

    def _launch(self, step: int, batches: Sequence[Batch]) -> Launched:
        captured = self.step
        assert captured is not None
        found, wanted = _shapes(batches), _shapes(captured.inputs)
        odd = "" if found == wanted else f"a batch of {found} after one of {wanted}"
        for own, new in zip(captured.inputs, batches, strict=True) if not odd else ():
            for mine, batch in zip(own, new, strict=True):
                pinned = mine.is_cuda and not batch.is_cuda
                mine.copy_(batch.pin_memory() if pinned else batch, non_blocking=True)
        captured.words.load(step)
        replay = self.watchdog.graphs(self.device).start(captured.labels)
        with self.watchdog.watch(replay, self.device, self.transport.rank):
            captured.graph.replay()
        self.replays += 1
        self._rebase()
        return Launched(step, captured.made, odd)

    def misfit(self, odd: str | None) -> bool:
        """Whether the step has to run again, as some rank's batch did not fit; `odd`: `Launched`'s.
        Every rank asks, of a step whose norm is not finite."""
        if odd is None:
            return False
        odd = self._first(odd)
        if odd:
            self.interrupt()
            self.restart()
            self.misfits += 1
            if self.misfits == MISFITS:
                self.on = False
                self._say(f"shapes of batches change ({odd})")
        return bool(odd)

    # ------------------------------------------------------------------ parts

    def _capture(self, step: int, batches: Sequence[Batch]) -> bool:
        """Capture a step; False where a rank could not, and steps stay eager."""
        self.drop()
        inputs = [tuple(t.to(self.device) for t in batch) for batch in batches]
        clock, world = self.wrapped.clock, dist.get_world_size()
        words = Words(clock.seed, self.device, (self.micros or len(batches)) * 8 * (world + 2))
        idle = Idle(self.wrapped, self.transport)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        transfers = self.watchdog.graphs(self.device)
        clock.drawn, self.watchdog.capturing = words.draw, transfers
        failed: BaseException | None = None
        made, ended, collects = None, False, gc.isenabled()
        gc.disable()  # what it frees may be marked on streams that are captured
        try:
            stream, mode = torch.cuda.current_stream(), "thread_local"
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                transfers.begin()
                try:
                    with self.watchdog.watch("the ranks' meeting before a step", self.device):
                        self._rebase(meet=True)
                    made = self.run(step, inputs)
                except BaseException as error:
                    failed = error
                transfers.end()
            ended = True
        except RuntimeError as error:  # the capture could not end, mostly because of the first one
            failed = failed or error
        finally:
            clock.drawn = self.watchdog.capturing = None
            if collects:
                gc.enable()
        if failed is not None and not isinstance(failed, Exception):
            raise failed
        if not self._captured(failed):
            del graph, made, failed  # with the memory that they hold
            self._undo(idle, pool, ended)
            return False
        self._rebase()
        units = self.wrapped.installed
        objects = [p for m in self.wrapped.by_name.values() for p in managed(m)]  # type: ignore[arg-type]
        self.step = Step(
            graph,
            inputs,
            words,
            transfers.labels,
            self._sizes(),
            made,
            [(p, p.sharded_param.grad) for p in objects],
            [dict(ledger.step) for ledger in self.ledgers],
            [list(unit.present.taken) for unit in units],
            dict(self.wrapped.memories.new),
        )
        return True

    def _captured(self, failed: Exception | None) -> bool:
        """Whether all ranks have captured the step. ValueError on all of them where one has not,
        and cannot go on or shall not."""
        problem = f"{type(failed).__name__}: {failed}".partition("\n")[0] if failed else ""
        lasting = problem if isinstance(failed, CollectiveError) or self.wanted is True else ""
        if found := self._first(lasting):
            if isinstance(failed, torch.OutOfMemoryError):
                raise failed
            raise ValueError(
                f"a step could not be captured in a CUDA graph ({found}): {self.fix}"
            ) from failed
        if failed is not None:
            failed.__traceback__ = failed.__context__ = failed.__cause__ = None  # they hold tensors
        self._agree(f"it could not be captured ({problem})" if problem else "")
        return self.on

    def _undo(self, idle: Idle, pool: Any, ended: bool) -> None:
        """Go back to before the capture on all ranks; ValueError on all where one cannot."""
        problem = ""
        try:
            gc.collect()
            end_capture(self.device, pool, ended)
            idle.restore()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        if found := self._first(problem):
            raise ValueError(f"no step runs after a failed capture ({found}): {self.fix}")

    def put_back(self) -> None:
        """Leave behind what the replayed step would have left: gradients, bytes, residuals."""
        captured = self.step
        assert captured is not None
        for p, grad in captured.grads:
            p.sharded_param.grad = grad
        for ledger, sent in zip(self.ledgers, captured.sent, strict=True):
            ledger.step = dict(sent)
        for unit, reduced in zip(self.wrapped.installed, captured.reduced, strict=True):
            unit.present.taken = list(reduced)
        memories = self.wrapped.memories
        memories.new = dict(captured.remembered)
        memories.written = {(key, rank) for key in memories.new for rank in memories.ranks}

    @property
    def ledgers(self) -> list[Ledger]:
        """Those that a step fills."""
        own = [self.ledger] if self.ledger is not None else []
        return [*(unit.ledger for unit in self.wrapped.installed), *own]

    def _rings(self) -> dict[Any, Ring]:
        """Rings of peer memory."""
        return dict(self.transport.rings) if isinstance(self.transport, PeerTransport) else {}

    def _sizes(self) -> list[int]:
        return [ring.made for key, ring in self._rings().items() if key in self.used]

    def _rebase(self, meet: bool = False) -> None:
        for key, ring in self._rings().items():
            if key in self.used:
                ring.rebase(meet)

    def _agree(self, problem: str) -> None:
        """Stay eager on all ranks where one cannot capture, and say why once."""
        if found := self._first(problem):
            self.on = False
            self._say(found)

    def _say(self, why: str) -> None:
        if self.transport.rank == 0:
            print(f"zpp_lab: steps run without a CUDA graph: {why}", file=sys.stderr)

    def _first(self, problem: str) -> str:
        """The first rank's problem that has one."""
        every = [problem] * dist.get_world_size()
        dist.all_gather_object(every, problem)
        return next(filter(None, every), "")


def _shapes(batches: Sequence[Batch]) -> Shapes:
    return [[t.shape for t in batch] for batch in batches]


def obstacle(device: torch.device, residence: Residence, static: bool) -> str:
    """What stands against a CUDA graph of a step before any has run; "" for nothing. The same on
    all ranks."""
    if device.type != "cuda":
        return NO_GPU
    backends = dist.get_backend_config()
    if "cuda:nccl" not in backends:
        return f"transfers go over {backends}, not NCCL"
    if residence.obstacle:
        return residence.obstacle
    if expandable_segments():
        return "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
    if not static:
        return "this model may run other code from step to step"
    return ""
