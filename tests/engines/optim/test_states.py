"""Moments in bf16 and 8 bits: what they keep, and that shards have the whole tensor's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import adamw as compact
from zpp_lab.engines.optim import kind_of, state_bytes
from zpp_lab.engines.optim.build import (
    AdamW,
    adamw,
    begin,
    optimizer_state,
    update,
)
from zpp_lab.engines.optim.shards import gradients as gradients_of
from zpp_lab.engines.optim.states import StateKind, decode, encode

SHAPES = {"wide": (5, 600), "uneven": (7, 53), "empty": (1, 300), "cube": (4, 5, 60), "norm": (9,)}
KINDS: list[StateKind] = ["bf16", "8bit"]


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def started(rank: int, world: int) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(cut(t, rank, world)) for n, t in gradients(-1).items()}


def cut(t: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    rows = -(-t.shape[0] // world)
    return t[rank * rows : (rank + 1) * rows].clone()


def trained(kind: StateKind, rank: int = 0, world: int = 1, steps: int = 6) -> list[torch.Tensor]:
    """Weights, then states in a fixed order, of one shard."""
    parameters = started(rank, world)
    optimizer = adamw(parameters, TrainConfig(optimizer_state=kind, beta2=0.999), seed=3)
    for step in range(steps):
        for n, g in gradients(step).items():
            parameters[n].grad = cut(g, rank, world)
        update(optimizer, step)
    state = optimizer_state(optimizer, parameters)
    kept = [t for key in sorted(state) if key != "step" for t in state[key].values()]
    return [p.detach() for p in parameters.values()] + kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("batch", [2**23, 700])
def test_shards_have_the_whole_tensors_bits(
    kind: StateKind, world: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, codes and scales, however rows are batched."""
    whole = trained(kind)
    monkeypatch.setattr(compact, "BATCH", batch)
    shards = [trained(kind, rank, world) for rank in range(world)]
    for tensor, *parts in zip(whole, *shards, strict=True):
        assert torch.equal(tensor, torch.cat(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_and_its_bytes(kind: StateKind) -> None:
    parameters = started(0, 1)
    optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), seed=0)
    step(optimizer, parameters, 0.1)
    state = optimizer_state(optimizer, parameters)
    found = {n: sum(state[k][n].nbytes for k in state if n in state[k]) - 4 for n in SHAPES}
    assert found == {n: state_bytes(s, kind) for n, s in SHAPES.items()}
    assert kind_of(SHAPES["norm"], kind) == "fp32"
    assert state_bytes((4096, 4096), "8bit") == 2 * 4096 * (4096 + 4 * 16)


def step(
    optimizer: AdamW, parameters: dict[str, nn.Parameter], scale: float, ok: bool = True
) -> None:
    for p in parameters.values():
        p.grad = p.detach() * scale
    begin(optimizer, torch.tensor(ok), 5)(gradients_of(optimizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_step_changes_nothing(kind: StateKind, on_device: bool) -> None:
    """Asked by the host, and decided as on a GPU."""
    parameters = started(0, 1)
    optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), seed=0)
    step(optimizer, parameters, 0.1)
    before = snapshot(optimizer, parameters)
    if on_device:
        for p in parameters.values():
            p.grad = torch.full_like(p, torch.nan)
        update(optimizer, 6, torch.tensor(False))
    else:
        step(optimizer, parameters, torch.nan, ok=False)
    assert all(map(torch.equal, before, snapshot(optimizer, parameters)))


def snapshot(optimizer: AdamW, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
    state = optimizer_state(optimizer, parameters)
    kept = [t for key in sorted(state) for t in state[key].values()]
    return [t.detach().clone() for t in [*parameters.values(), *kept]]


def test_first_updates_are_torchs_own_nearly() -> None:
    ends = {}
    for kind in ("fp32", *KINDS):
        parameters = started(0, 1)
        optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), seed=0)
        for number in range(20):
            for n, g in gradients(number).items():
                parameters[n].grad = g
            update(optimizer, number)
        ends[kind] = torch.cat([p.detach().flatten() for p in parameters.values()])
    start = torch.cat([p.detach().flatten() for p in started(0, 1).values()])
    moved = (ends["fp32"] - start).norm()
    assert (ends["bf16"] - ends["fp32"]).norm() < 0.01 * moved
    assert (ends["8bit"] - ends["fp32"]).norm() < 0.06 * moved


@pytest.mark.parametrize("signed", [True, False])
def test_codes(signed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 600) * torch.logspace(-6, 6, 6)[:, None]
    x = x if signed else x.square()
    x[2, :256] = 0
    codes, scale = encode(x.clone(), signed)
    y = decode(codes, scale, signed)
    assert scale.shape == (6, 3)
    assert torch.equal(y[2, :256], torch.zeros(256)), "a block of zeros stays one"
    assert (y[x == x.abs().amax()] == x[x == x.abs().amax()]).all(), "the largest is exact"
    far = x.abs() > 1e-4 * x.abs().amax(-1, keepdim=True)
    assert ((y - x).abs()[far] <= x.abs()[far] / 16).all()
    assert signed or (y[3] > 0).all()
    assert torch.equal(encode(y.clone(), signed)[0], codes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_codes_never_hide_what_is_not_finite(bad: float) -> None:
    x = torch.ones(2, 300)
    x[1, 299] = bad
    y = decode(*encode(x, signed=False), signed=False)
    assert not torch.isfinite(y[1, 256:]).any()
    assert torch.equal(y[0], torch.ones(300))


@pytest.mark.parametrize("kind", KINDS)
def test_second_moments_follow_gradients_that_shrink(kind: StateKind) -> None:
    """To nearest, bf16 would stand still at beta2 = 0.999: 0.5 of a nat too high in the end."""
    p = nn.Parameter(torch.zeros(4, 256))
    optimizer = adamw({"p": p}, TrainConfig(optimizer_state=kind, beta2=0.999), seed=0)
    exact = torch.zeros(4, 256)
    for number in range(700):
        p.grad = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
        p.grad *= 1.0 if number < 200 else 0.1
        exact = 0.999 * exact + 0.001 * p.grad.square()
        update(optimizer, number)
    state = optimizer.state[p]
    kept = state["exp_avg_sq"].float()
    if kind == "8bit":
        kept = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False)
    assert abs(float((kept / exact).log().mean())) < 0.05
