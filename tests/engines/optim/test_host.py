"""Moments in host memory: the same bits, however many pass at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.optim.test_states import KINDS, gradients, started
from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import CompactAdamW, host
from zpp_lab.engines.optim.build import adamw, load_optimizer_state, optimizer_state, update
from zpp_lab.engines.optim.states import StateKind


def trained(kind: StateKind, place: str, halt: int = 6) -> list[torch.Tensor]:
    """Weights, then states; after `halt` steps the state goes through a checkpoint's form."""
    train, parameters = TrainConfig(optimizer_state=kind), started(0, 1)
    far: Any = {"moments": parameters} if place == "host" else {}
    optimizer = adamw(parameters, train, 3, far)
    for step in range(6):
        if step == halt:
            before = optimizer_state(optimizer, parameters)
            optimizer = adamw(parameters, train, 3, far)
            load_optimizer_state(optimizer, parameters, before)
        for n, g in gradients(step).items():
            parameters[n].grad = g
        update(optimizer, step, ok=torch.tensor(step != 2))
    state = optimizer_state(optimizer, parameters)
    return [p.detach() for p in parameters.values()] + [
        t for key in sorted(state) for t in state[key].values()
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "small", "halt"), [(2**28, 2**20, 6), (4000, 1000, 6), (1, 1, 3)]
)
def test_bits_do_not_depend_on_where_moments_lie(
    kind: StateKind, stage: int, small: int, halt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "STAGE", stage)
    monkeypatch.setattr(host, "SMALL", small)
    pairs = zip(trained(kind, "device"), trained(kind, "host", halt), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("nbytes", "rows", "count"),
    [(540_000_000, 11008, 3), (2**28, 7, 1), (2**28 + 7, 7, 2), (2**30, 3, 3), (2**29, 1, 1)],
)
def test_what_is_more_than_a_stage_is_cut_evenly(nbytes: int, rows: int, count: int) -> None:
    found = host.pieces("large", nbytes, rows)
    assert len(found) == count
    if count == 1:
        assert (found[0].rows, found[0].nbytes) == (None, nbytes)
        return
    assert [i for piece in found for i in piece.rows or ()] == [*range(rows)]
    row = -(-nbytes // rows)
    assert max(piece.nbytes for piece in found) <= max(host.STAGE, row)
    passing = [*host.stages(["small", "large"], lambda n: nbytes * (n == "large"), lambda n: rows)]
    assert [len(some) for some in passing] == [2, *[1] * (count - 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_one_by_one_find_their_corrections_at_once(
    kind: StateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps after the first; the host asks nothing and few kernels run for each update."""
    monkeypatch.setattr(host, "STAGE", 1)
    ends = []
    for at_once in (True, False):
        parameters = started(0, 1)
        far: Any = {"moments": parameters}
        optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), 3, far)
        assert isinstance(optimizer, CompactAdamW)
        for step in range(5):
            own = {parameters[n]: g for n, g in gradients(step).items()}
            optimizer.begin(step, torch.tensor(step != 2))
            optimizer.prepare(own if at_once else ())
            assert (optimizer.corrections is not None) == (at_once and step > 0)
            for p, gradient in own.items():
                optimizer.update({p: gradient}, whole=False)
        state = optimizer_state(optimizer, parameters)
        assert {float(s) for s in state["step"].values()} == {4.0}
        moments = [t for key in sorted(state) for t in state[key].values()]
        ends.append([*parameters.values(), *moments])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_has_the_same_bits(kind: StateKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STAGE", 2**20)  # a weight passes in two pieces
    weights = [torch.randn(512, 1024, device="cuda") for _ in range(9)]
    ends = []
    for place in ("device", "host"):
        train = TrainConfig(optimizer_state=kind)
        own = {str(i): torch.nn.Parameter(w.clone()) for i, w in enumerate(weights)}
        far: Any = {"moments": own} if place == "host" else {}
        optimizer = adamw(own, train, 3, far)
        for step in range(5):
            if step == 3:
                before = optimizer_state(optimizer, own)
                optimizer = adamw(own, train, 3, far)
                load_optimizer_state(optimizer, own, before)
            for i, p in enumerate(own.values()):
                p.grad = weights[i - step].sin()
            update(optimizer, step, ok=torch.tensor(True, device="cuda"))
        torch.cuda.synchronize()
        moments = [t.cpu() for s in optimizer.state.values() for t in s.values()]
        ends.append([p.detach().cpu() for p in own.values()] + moments)
        if place == "host":
            assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"cpu"}
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
