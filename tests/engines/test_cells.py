"""Tensor parts and stages in real processes: what torch's groups saw, what payloads decode to, and
whether the comparison with the virtual engine finds faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.cells_world import (
    own_state,
    real,
    run,
    same_bits,
    shard_state,
    size,
    twin,
)
from tests.engines.fsdp_jobs import complaint
from tests.engines.fsdp_world import run_world
from tests.engines.test_parts import batch
from tests.engines.test_stages import Shape
from zpp_lab.codecs.layout import Layout
from zpp_lab.collectives.acts import ActsEncoder, Parts
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, ACTS_PIPE, WIRES, Wire
from zpp_lab.engines.base import Engine
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.parts import OwnPart
from zpp_lab.models.cut import PartPieces
from zpp_lab.models.llama import Attention
from zpp_lab.models.params import param_class
from zpp_lab.train.memory.estimate import passes_under_way, payload_bytes

PARTS: Shape = (1, 4, 2, 1)
BOTH: Shape = (1, 4, 2, 2)
STAGES: Shape = (2, 2, 1, 2)


def of_all(value: Any) -> list[Any]:
    """Every rank's, by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


class Groups(TorchDispatchMode):
    """Notes the collectives of all of torch's process groups, DTensor's and FSDP2's too: bytes that
    this rank sends by wire, "" where it is none, and payloads on the wires of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.calls, self.wire = Counter[str](), Counter[str](), ""
        self.payloads: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and "recv" not in name:
            self.saw(name, args)
        return func(*args, **(kwargs or {}))

    def saw(self, name: str, args: Any) -> None:
        wire, self.wire = self.wire, ""
        count = next(_members(a) for a in args if isinstance(a, torch.ScriptObject))
        given = args[0 if "send" in name else 1]
        (given,) = given if isinstance(given, list) else (given,)
        sent = given.nbytes * (count - 1) // (count if "alltoall" in name else 1)
        if "send" in name:
            sent, wire = given.nbytes, ACTS_PIPE
        self.calls[name] += 1
        self.sent[wire] += sent
        if wire in (ACTS_FORWARD, ACTS_BACKWARD, ACTS_PIPE):
            rows = given.view(-1, given.shape[-1])
            self.payloads.append((wire, rows.view(torch.uint8).clone()))


@contextmanager
def listening() -> Iterator[Groups]:
    """Note collectives, with the wires that our transports name."""
    groups, watched = Groups(), ProcessGroups.watched

    def labelled(self: ProcessGroups, label: str, device: torch.device) -> Any:
        first = label.split()[0]
        groups.wire = first if first in WIRES else ""
        return watched(self, label, device)

    with pytest.MonkeyPatch.context() as patch, groups:
        patch.setattr(ProcessGroups, "watched", labelled)
        yield groups


def _members(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()  # type: ignore[attr-defined,no-any-return]


def seen(shape: Shape, case: str) -> dict[str, bool]:
    """Whether torch's groups sent what ledger and plan say, wire by wire, and beside that only
    losses and norms; and whether as many passes are under way, and as many payloads held, as the
    estimate of memory counts. Each check by name."""
    engine = real(case, shape)
    passes = [0, 0]  # under way: now, at most
    if (stages := engine.stages) is not None:
        forward, after = stages.forward, stages.after_backward

        def begun(*args: Any) -> Tensor:
            passes[0] += 1
            passes[1] = max(passes)
            return forward(*args)

        def ended(*args: Any) -> None:
            passes[0] -= 1
            after(*args)

        stages.forward, stages.after_backward = begun, ended  # type: ignore[method-assign]
    engine.step(0, 1e-2, partial(batch, 0), False)  # torch's schedule asks its neighbours first
    with listening() as groups, held_payloads() as held:
        found = engine.step(1, 1e-2, partial(batch, 1), False).bytes
    total: Counter[str] = sum((Counter(own) for own in of_all(groups.sent)), Counter())
    world, values = dist.get_world_size(), 8 * (engine.plan.micro_steps + 1)
    others = total.pop("", 0)
    cluster = engine.config.cluster
    place = cluster.place(dist.get_rank())["pp"]
    most = passes_under_way(engine.config, cluster.pp, place) if stages else 0
    pipe, rooms = engine.plan.pipe, [0]
    if pipe is not None and engine.config.engine.schedule == "1f1b_overlap":
        rooms = [payload_bytes(engine.config, pipe, place) // pipe.layout.nbytes]
    elif stages:  # torch's buffers are not counted here
        held[:] = rooms
    return {
        "ledger": total == Counter({wire: sum(sent) for wire, sent in found.items() if sum(sent)}),
        "plan": found == engine.plan.step_bytes(),
        "losses and norms": others == world * (world - 1) * values,
        "none of DTensor": not any("functional" in name for name in groups.calls),
        "passes": all(of_all(passes == [0, most])),
        "payloads": all(of_all(held == rooms)),
    }


@contextmanager
def held_payloads() -> Iterator[list[int]]:
    """Note how many of the tensors that go into batches of transfers are in memory, at most."""
    most, known, start = [0], list[StorageWeakRef](), dist.batch_isend_irecv

    def noted(ops: list[dist.P2POp]) -> list[dist.Work]:
        known.extend(StorageWeakRef(op.tensor.untyped_storage()) for op in ops)
        most[0] = max(most[0], sum(not one.expired() for one in known))
        return start(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted)
        yield most


def seen_all(shape: Shape, cases: Sequence[str]) -> dict[str, dict[str, bool]]:
    return {case: seen(shape, case) for case in cases}


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        *((PARTS, ["mixed"]), (BOTH, ["acts8"])),
        (STAGES, ["mixed", "gpipe", "interleaved", "overlap_last"]),
    ],
    ids=str,
)
def test_groups_saw_the_bytes_of_ledger_and_plan(shape: Shape, cases: list[str]) -> None:
    for case, said in run_world(size(shape), seen_all, shape, cases).items():
        assert said == dict.fromkeys(said, True), case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "case"),
    [((2, 4, 2, 1), "zeropp"), ((1, 4, 4, 1), "acts8"), ((2, 4, 2, 2), "mixed")],
    ids=str,
)
def test_groups_saw_the_bytes_of_larger_meshes(shape: Shape, case: str) -> None:
    said = run_world(size(shape), seen, shape, case)
    assert said == dict.fromkeys(said, True)


# ---------------------------------------------------------------------- payloads


def decoded(shape: Shape, case: str) -> list[Any]:
    """Telemetry of a step; and the same figures from payloads that torch's groups sent, decoded by
    the reference, and from what had been encoded: {wire: {class: [nmse, bias, cosine]}}."""
    engine, encode, given = real(case, shape), ActsEncoder.encode, []
    engine.step(0, 1e-2, partial(batch, 0), False)

    def noted(self: ActsEncoder, layout: Layout, x: Tensor, wire: Wire, *rest: Any) -> None:
        given.append((wire, layout, x.detach().float().clone()))
        encode(self, layout, x, wire, *rest)

    with pytest.MonkeyPatch.context() as patch, listening() as groups:
        patch.setattr(ActsEncoder, "encode", noted)
        telemetry = engine.step(1, 1e-2, partial(batch, 1), True).telemetry
    sums: dict[tuple[Wire, str], Tensor] = defaultdict(lambda: torch.zeros(6, dtype=torch.float64))
    for wire in (ACTS_FORWARD, ACTS_BACKWARD, ACTS_PIPE):
        payloads = [rows for w, rows in groups.payloads if w == wire]
        before = [(layout, x) for w, layout, x in given if w == wire]
        for rows, (layout, x) in zip(payloads, before, strict=True):
            (segment,) = layout.segments
            a = x.reshape(len(rows), -1).double()
            b = segment.codec.decode(rows[:, : segment.nbytes], segment.numel).double()
            terms = ((b - a).square(), a.square(), b.square(), a * b, b - a, a.abs())
            sums[wire, param_class(segment.name)] += torch.stack([t.sum() for t in terms])
    total: dict[tuple[Wire, str], Tensor] = defaultdict(lambda: torch.zeros(6, dtype=torch.float64))
    for own in of_all(dict(sums)):
        for key, value in own.items():
            total[key] += value
    figures: dict[str, dict[str, list[float]]] = {}
    for (wire, kind), (error2, x2, y2, xy, error, abs_x) in total.items():
        made = [error2 / x2, error / abs_x, xy / (x2 * y2).sqrt()]
        figures.setdefault(wire, {})[kind] = [float(value) for value in made]
    return [telemetry, figures]


@pytest.mark.parametrize(
    ("shape", "case"),
    [(PARTS, "mixed"), (BOTH, "acts8"), pytest.param(PARTS, "sham", marks=pytest.mark.slow)],
    ids=str,
)
def test_payloads_decode_to_what_telemetry_says(shape: Shape, case: str) -> None:
    telemetry, figures = run_world(size(shape), decoded, shape, case)
    assert figures.keys() == {wire for wire in telemetry if wire.startswith("acts")}
    for wire, kinds in figures.items():
        assert kinds.keys() == telemetry[wire].keys()
        for kind, wanted in kinds.items():
            found = [telemetry[wire][kind][name] for name in ("nmse", "bias", "cosine")]
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12), (wire, kind)


# ---------------------------------------------------------------------- faults


def poisoned(shape: Shape, case: str, name: str, value: float) -> list[str]:
    """What both engines say of a step with this weight; of tensor parts in the last one."""
    engine, virtual = real(case, shape), twin(case, shape)
    place, last = engine.config.cluster.place(dist.get_rank()), virtual.tp - 1
    with torch.no_grad():
        for i, cell in enumerate(virtual.cells):
            if i % virtual.tp == last and name in cell.master:
                cell.master[name].fill_(value)
        if place["tp"] == last and name in engine.parameters:
            local(engine.parameters[name]).fill_(value)
    both: tuple[Engine, ...] = engine, virtual
    return [complaint(partial(one.step, 0, 1e-2, partial(batch, 0), False)) for one in both]


@pytest.mark.parametrize(
    ("shape", "case", "name", "value"),
    [
        (PARTS, "acts8", "layers.1.mlp.w_up.weight", float("nan")),
        (STAGES, "mixed", "head.weight", 1e38),
        pytest.param(PARTS, "acts8", "head.weight", 1e38, marks=pytest.mark.slow),
        pytest.param(
            *(STAGES, "mixed", "layers.1.mlp.w_up.weight", float("nan")), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_both_engines_find_the_same_value_that_is_not_finite(
    shape: Shape, case: str, name: str, value: float
) -> None:
    real_one, virtual_one = run_world(4, poisoned, shape, case, name, value)
    assert real_one == virtual_one != "nothing"


def own_slice(self: Parts, wire: Wire, place: str, xs: Any) -> list[Tensor]:
    """Keep the own slice uncompressed, which no other part then has."""
    (out,), (x,) = Parts.gather(self, wire, place, xs), xs
    out[self.own[0] * len(x) : (self.own[0] + 1) * len(x)] = x
    return [out]


def unsummed(self: Parts, place: str, xs: Any) -> list[Tensor]:
    self.raw(place, xs)
    return list(xs)


def other_order(self: Attention, x: Tensor) -> Tensor:
    """Attention whose input's gradient has its three terms in another order."""
    split = (-1, self.head_dim)
    v, k, q = (w(x).unflatten(-1, split) for w in (self.wv, self.wk, self.wq))
    q, k = self.rope.rotate(q), self.rope.rotate(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.wo(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def through_a_node(self: PartPieces, *xs: Tensor) -> Any:
    return _forward(self, *(x.view_as(x) for x in xs))


_forward = PartPieces.forward
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "own slice not decoded": (OwnPart, "gather", own_slice),
    "shared gradients not summed": (OwnPart, "sum", unsummed),
    "norm counts every part": (OwnPart, "counted", lambda self, grads: grads),
    "terms in another order": (Attention, "forward", other_order),
}
HARMLESS = {  # both uses of a piece's input are added, in whatever order
    "x enters pieces by a node": (PartPieces, "forward", through_a_node),
}


def differing(case: str, names: Sequence[str]) -> dict[str, bool]:
    """Whether bits differ from the virtual engine's on some rank, for every fault."""
    torch.use_deterministic_algorithms(True)
    virtual = twin(case, PARTS)
    wanted, found = run(virtual, virtual.cluster.world), {}
    state = shard_state(virtual, dist.get_rank())
    for name in names:
        fault = (FAULTS | HARMLESS).get(name)
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                patch.setattr(*fault)
            engine = real(case, PARTS)
            done = run(engine, engine.cluster.world)
        own = own_state(engine)
        differs = done != wanted or any(not same_bits(own[n], state[n]) for n in state)
        found[name] = any(of_all(differs))
    return found


QUICK = ("own slice not decoded", "terms in another order", "none")
REST = [name for name in (*FAULTS, *HARMLESS) if name not in QUICK]


@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, id="quick"), pytest.param(REST, id="rest", marks=pytest.mark.slow)],
)
def test_a_fault_of_one_engine_shows(names: Sequence[str]) -> None:
    found = run_world(4, differing, "acts8_fp32", names)
    assert found == {name: name in FAULTS for name in names}


def trained_long(shape: Shape, case: str) -> dict[str, bool]:
    """Whether after 50 steps all parts have equal bytes of what none of them has alone, weights and
    moments, and whether there is such."""
    engine = real(case, shape)
    assert engine.parts is not None
    for step in range(50):
        engine.step(step, 1e-2, partial(batch, step), False)
    state = own_state(engine)
    own = {n: t for n, t in state.items() if n.split(" of ")[-1] in engine.parts.shared}
    found = defaultdict(list)
    for rank, theirs in enumerate(of_all(own)):
        place = engine.config.cluster.place(rank)
        found[place["pp"], place["node"], place["gpu"]].append(theirs)
    pairs = [(every[0], other) for every in found.values() for other in every[1:]]
    equal = all(same_bits(one[n], other[n]) for one, other in pairs for n in one)
    return {"equal": equal, "some": len(own) > 6, "cut ones": len(state) > len(own)}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "case"), [(PARTS, "mixed"), (BOTH, "acts8")], ids=str)
def test_parts_share_every_byte_after_many_quantized_steps(shape: Shape, case: str) -> None:
    said = run_world(size(shape), trained_long, shape, case)
    assert said == dict.fromkeys(said, True)
