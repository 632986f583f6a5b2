"""State in host memory on GPUs, over NCCL. An answer is a line of JSON.

torchrun --standalone --nproc-per-node 1 -m tests.engines.place_world ANSWERS (or 2, 4)

Each unit's update and the transfer of its weights are held up on their stream, so that whoever does
not wait for them reads old weights, or none. Once more a block's planes are held up before they
leave: its next update, to which they come in on the other stream, finds old ones unless it waits,
and so does its backward of weights. With matrices in pieces those of one stream are held up, and
the norm for both.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from tests.engines.fsdp_parity import differs, kept
from tests.engines.place_jobs import STEPS, Place, check_used, placed, trained
from tests.engines.place_loop_jobs import masters, of_engine, sharded, steps, unlike
from zpp_lab.api import init
from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.fsdp.resident import Brought, Resident
from zpp_lab.engines.optim import host
from zpp_lab.engines.optim.adamw import CompactAdamW
from zpp_lab.engines.optim.host import STREAMS, Streams
from zpp_lab.models import build_model
from zpp_lab.runs.checkpoint.read import flat, local

MODEL = ModelConfig(dim=384, layers=4, heads=4, kv_heads=2, ffn=1024)
HELD = 20_000_000  # clocks that an update is held up, about 10 ms
LEFT = 100 * HELD  # that planes are held up before they leave, much longer than a step
# the device waits for the first update, which pins memory, and for those before evaluations
LONGER = STEPS + 3
HIGH: Place = {"weights": 5}
BLOCK: Place = {"masters": 1, "moments": 1, "gradients": 1}
Patch = tuple[Any, str, Any]  # an attribute, and what takes its place
PIECES: list[Patch] = [(host, "STAGE", 2**20), (host, "SMALL", 2**10)]  # matrices pass in several
# of a user training loop, whose weights stay on the GPU
LOOP: list[Place] = ["host", {"masters": 2, "moments": 3, "gradients": 1}, {"gradients": 4}]
SOME: list[Place] = [
    *(*LOOP, HIGH),
    {"masters": 2, "moments": 3, "gradients": 1, "weights": 2},
]
Shape = tuple[int, int]  # nodes, GPUs of each
CASES: dict[int, dict[Shape, tuple[str, ...]]] = {
    1: {(1, 1): ("split_zero3", "split_fp32_states", "8bit_states")},
    2: {(2, 1): ("split", "split_last", "split_zero3", "8bit_states", "split_differences")},
    4: {
        (1, 4): ("split_zero3", "split_last", "split_kept"),
        (2, 2): ("split", "split_kept", "split_differences"),
    },
}
LOOPS = ("8bit_states", "split_zero3")  # of user training loops
IN_LOOPS = ("late pieces", "a wait for pieces")  # of `twins`, what a loop is asked too


def places(case: str, some: list[Place], world: int) -> list[Place]:
    """Those of `some`, of which four ranks take every other; masters in one plane stay on the
    GPU."""
    if not case.startswith("split"):
        some = ["host", {"moments": 3, "gradients": 1}, {"gradients": 4}]
    return some[:: 2 if world == 4 else 1]


def names(world: int) -> list[str]:
    """The name of every answer of `main`."""
    found = []
    for shape, cases in CASES[world].items():
        found += [name(case, shape, p) for case in cases for p in places(case, SOME, world)]
        found += [name(f"loop, {c}", shape, p) for c in LOOPS for p in places(c, LOOP, world)]
    if world == 4:
        return found
    late = [name for both in twins() for name in both[:2]]
    loops = [f"loop, {name}" for name in late if name.endswith(IN_LOOPS)]
    return [*found, "by the host", *FORGOTTEN, "loop without a wait", *late, *loops]


def name(case: str, shape: Shape, place: Place) -> str:
    return f"{case} on {shape[0]}x{shape[1]}, {place}"


def made(
    case: str, place: Place, transport: Any, device: torch.device, **engine: Any
) -> FsdpEngine:
    nodes, gpus = transport.cluster.nodes, transport.cluster.gpus_per_node
    config = placed(case, nodes, gpus, place, device="cuda", graph=False, **engine)
    model = build_model(MODEL, 37, device=str(device), seed=3)
    return FsdpEngine(model, build_plan(model, config), config, device, transport)


def outcome(
    case: str, place: Place, transport: Any, device: torch.device, steps: int = STEPS
) -> Any:
    engine = made(case, place, transport, device)
    found = trained(engine, last=steps)
    check_used(engine)
    return (*found, kept(engine))


def hold_up() -> None:
    """Updates, and transfers of weights, begin late."""
    update, bring = Resident._update, Brought.bring

    def late(self: Resident, unit: str, gathers: bool = True) -> None:
        if self.stream is not None and unit not in self.updated:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(HELD)
        update(self, unit, gathers)

    def brought(self: Brought, unit: str) -> list[Any]:
        torch.cuda._sleep(HELD)  # on the stream of updates, for which those of transfers wait
        return bring(self, unit)

    Resident._update, Brought.bring = late, brought  # type: ignore[method-assign]


def by_the_host(case: str, transport: Any, device: torch.device) -> bool:
    """Whether the host, which no stream holds back, finds a state complete as soon as it has it."""
    engine = made(case, "host", transport, device)
    trained(engine)
    there = [local(t) for _, t in flat(engine.state_dict()) if not local(t).is_cuda]
    at_once = [t.clone() for t in there]
    torch.cuda.synchronize()
    return len(there) > 0 and all(map(torch.equal, at_once, there))


def loop(case: str, shape: Shape, place: Place, wanted: Any, device: torch.device) -> str:
    """What a user training loop's losses, norms and state differ in from an engine's."""
    config = placed(case, *shape, place, device="cuda", ordered=True)
    model = build_model(MODEL, 37, device=str(device), seed=3)
    made = sharded(config, model, transport="groups")
    return unlike((steps(config, made, last=LONGER), masters(made)), wanted)


FORGOTTEN: dict[str, Place] = {"without a wait": "host", "without a wait for weights": HIGH}


def without_a_wait(run: Callable[[], str]) -> bool:
    """Whether bits differ where nobody waits for updates, and for weights that come: else nothing
    is shown above."""

    def forgets(self: Resident, unit: str) -> None:
        self.under_way.pop(unit, None)

    def early(self: Any, unit: str, group: Any, unshard: Any, *args: Any, **kwargs: Any) -> None:
        if self.pending is not None:
            self._update(unit)
        if self.brought is not None and group.is_sharded:
            with self._beside():
                self.brought.bring(unit)
        unshard(*args, **kwargs)

    return shows(run, (Resident, "_arrived", forgets), (Resident, "_unshard", early))


def shows(run: Callable[[], str], *forgets: Patch) -> bool:
    """Whether something differs with these parts."""
    with pytest.MonkeyPatch.context() as patch:
        for part in forgets:
            patch.setattr(*part)
        try:
            return bool(run())
        except NonFiniteError:  # of memory that nothing has been written to
            return True


def leaving_late() -> list[Patch]:
    """Planes of the last block leave late: of its last stage in the first stream. They come in on
    the other stream in the next step, weights in this one's backward."""
    mark, begin, update, stages = Streams.mark, CompactAdamW.begin, Resident._update, host.stages
    last = ending = False

    def late(self: Streams) -> list[Any]:
        done = mark(self)
        if last and ending and torch.cuda.current_stream() == self.streams[0]:
            torch.cuda._sleep(LEFT)
        return done

    def turned(self: CompactAdamW, number: int, *args: Any) -> None:
        if self.streams is not None:
            self.streams.turns = number % STREAMS
        begin(self, number, *args)

    def noted(self: Resident, unit: str, gathers: bool = True) -> None:
        nonlocal last
        last = unit == list(self.units)[-2]
        update(self, unit, gathers)
        last = False

    def counted(*args: Any) -> Iterator[Any]:
        nonlocal ending
        every = [*stages(*args)]
        for i, stage in enumerate(every):
            ending = i >= len(every) - STREAMS  # later ones would make the block's weights late
            yield stage

    leaving: list[Patch] = [(Streams, "mark", late), (host, "stages", counted)]
    return [*leaving, (CompactAdamW, "begin", turned), (Resident, "_update", noted)]


def twins() -> list[tuple[str, str, Place, list[Patch], Patch]]:
    """Names of two answers: what differs with parts that are held up, and whether something does
    where nobody waits for them; the placement; what holds them up; and what does not wait."""
    change, begin, of = CompactAdamW._change, CompactAdamW.begin, Residence.of
    mark, follow, take_turn = Streams.mark, Streams.follow, Streams.next

    def slow(self: CompactAdamW, group: dict[str, Any], pieces: list[Any]) -> None:
        assert self.streams is not None
        if pieces and torch.cuda.current_stream() == self.streams.streams[0]:
            torch.cuda._sleep(HELD)
        change(self, group, pieces)

    def corrected_late(self: CompactAdamW, *args: Any) -> None:
        torch.cuda._sleep(10 * HELD)  # on the computing stream, which then counts the step
        begin(self, *args)

    def follow_one(self: Streams, items: Sequence[Tensor]) -> None:
        self.ended[0].clear()
        follow(self, items)

    def mark_one(self: Streams) -> list[Any]:
        return [] if torch.cuda.current_stream() == self.streams[0] else mark(self)

    def join_one(self: Streams) -> None:
        torch.cuda.current_stream().wait_stream(self.streams[1])

    @contextmanager
    def begin_one(self: Streams, items: Sequence[Tensor]) -> Iterator[None]:
        itself = self.streams[1] if self.turns % STREAMS == 1 else None
        with torch.cuda.stream(itself), take_turn(self, items):
            yield

    leaving, forgets = leaving_late(), (Streams, "follow", follow_one)
    weights = [*PIECES, (CompactAdamW, "_change", slow)]
    norm = [*PIECES, (CompactAdamW, "begin", corrected_late)]
    at_once = [*weights, (Residence, "of", lambda config: replace(of(config), waits=False))]
    no = "without a wait for"
    return [
        ("planes leave late", f"{no} planes", "host", leaving, forgets),
        ("weights leave late", f"{no} weights that leave", HIGH, leaving, forgets),
        # of one block, so that nothing else passes in the stream that is held up
        ("pieces leave late", f"{no} pieces that leave", BLOCK, [*PIECES, *leaving], forgets),
        ("late pieces", f"{no} pieces", "host", weights, (Streams, "mark", mark_one)),
        ("late norm", f"{no} the norm", "host", norm, (Streams, "next", begin_one)),
        ("late pieces at once", f"{no} the end", "host", at_once, (Streams, "join", join_one)),
    ]


def main() -> None:
    device = init()
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    world = dist.get_world_size()
    hold_up()
    whole = host.STAGE, host.SMALL
    for part in PIECES:
        setattr(*part)

    def keep(name: str, found: Any) -> None:
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(json.dumps([name, found]) + "\n")

    for shape, cases in CASES[world].items():
        transport = connect(ClusterConfig(*shape), Watchdog(60.0), "groups", device)
        run = partial(outcome, transport=transport, device=device)
        for case in cases:
            wanted = run(case, "device")
            for place in places(case, SOME, world):
                keep(name(case, shape, place), differs(run(case, place), wanted))
        for case in LOOPS:
            engine = made(case, "device", transport, device, ordered=True)
            wanted = of_engine(engine.config, last=LONGER, engine=engine)
            for place in places(case, LOOP, world):
                found = loop(case, shape, place, wanted, device)
                keep(name(f"loop, {case}", shape, place), found)
    host.STAGE, host.SMALL = whole  # a block's planes are in one stream
    if world < 4:
        looped = partial(loop, LOOPS[-1], shape, "host", wanted, device)
        keep("loop without a wait", without_a_wait(looped))
        waits(transport, device, keep, looped)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # groups that are torn down may abort


def waits(
    transport: Any,
    device: torch.device,
    keep: Callable[[str, Any], None],
    looped: Callable[[], str],
) -> None:
    """Keep what shows that the device, and the host, wait for what has been held up; `looped`: what
    a user training loop with its state on the host differs in."""
    keep("by the host", by_the_host("split_zero3", transport, device))
    case = "split_zero3"
    run = partial(outcome, case, transport=transport, device=device, steps=LONGER)
    wanted = run("device")

    def found(place: Place) -> str:
        return differs(run(place), wanted)

    for forgotten, place in FORGOTTEN.items():
        keep(forgotten, without_a_wait(partial(found, place)))
    for late, forgotten, place, slow, forgets in twins():
        with pytest.MonkeyPatch.context() as patch:
            for part in slow:
                patch.setattr(*part)
            keep(late, found(place))
            keep(forgotten, shows(partial(found, place), forgets))
            if late in IN_LOOPS:
                keep(f"loop, {late}", looped())
                keep(f"loop, {forgotten}", shows(looped, forgets))


if __name__ == "__main__":
    main()
