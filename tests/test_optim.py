"""An update that is held back changes nothing, whoever decides it: the host or the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpp_lab.config import TrainConfig
from zpp_lab.optim import STATE, adamw, guarded_step, load_optimizer_state, optimizer_state


def made(fused: bool) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(7))}
    optimizer = adamw(parameters, TrainConfig())
    if fused:  # as on a GPU; the CPU has that kernel too
        groups = [{**g, "fused": True, "foreach": False} for g in optimizer.param_groups]
        optimizer = torch.optim.AdamW(groups, fused=True)
    return parameters, optimizer


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW, scale: float) -> None:
    for p in parameters.values():
        p.grad = p.detach() * scale
    guarded_step(optimizer, torch.tensor(scale).isfinite())


def snapshot(parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW) -> list:
    state = optimizer_state(optimizer, parameters)
    tensors = [*parameters.values(), *(state[k][n] for k in STATE for n in parameters)]
    return [t.detach().clone() for t in tensors]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_changes_nothing(fused: bool, bad: float) -> None:
    parameters, optimizer = made(fused)
    step(parameters, optimizer, 0.1)
    before = snapshot(parameters, optimizer)
    step(parameters, optimizer, bad)
    assert all(
        torch.equal(a, b) for a, b in zip(before, snapshot(parameters, optimizer), strict=True)
    )
    step(parameters, optimizer, 0.1)
    assert not any(
        torch.equal(a, b) for a, b in zip(before, snapshot(parameters, optimizer), strict=True)
    )


def test_both_kinds_agree_nearly_and_the_cpu_takes_foreach() -> None:
    ends = []
    for fused in (False, True):
        parameters, optimizer = made(fused)
        assert bool(optimizer.defaults["fused"]) == fused
        for _ in range(3):
            step(parameters, optimizer, 0.1)
        ends.append(snapshot(parameters, optimizer))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*ends, strict=True))


def test_state_goes_where_the_parameters_are() -> None:
    parameters, optimizer = made(fused=False)
    step(parameters, optimizer, 0.1)
    saved = {
        k: {n: t.double() for n, t in v.items()}
        for k, v in optimizer_state(optimizer, parameters).items()
    }
    load_optimizer_state(optimizer, parameters, saved)
    assert all(optimizer.state[p]["exp_avg"].device == p.device for p in parameters.values())
