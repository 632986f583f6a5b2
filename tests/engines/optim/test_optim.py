"""An update that is held back changes nothing, whoever decides it: the host or the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import ShardAdamW
from zpp_lab.engines.optim.build import (
    STATE,
    adamw,
    begin,
    optimizer_state,
    set_rate,
    update,
)
from zpp_lab.engines.optim.shards import gradients


def made(fused: bool) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(7))}
    groups = adamw(parameters, TrainConfig()).param_groups
    # fused as on a GPU; the CPU has that kernel too
    each = [{**g, "fused": fused, "foreach": not fused} for g in groups]
    return parameters, ShardAdamW(each, fused=fused)


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW, scale: float) -> None:
    for p in parameters.values():
        p.grad = p.detach() * scale
    begin(optimizer, torch.tensor(scale).isfinite(), 0)(gradients(optimizer))


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


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_projections_into_the_residual_stream_take_smaller_steps(kind: Any) -> None:
    names = ("layers.0.mlp.w_up.weight", "layers.0.mlp.w_down.weight", "norm.weight")

    def moved(factor: float) -> dict[str, float]:
        parameters = {n: nn.Parameter(torch.ones(4, 4)) for n in names[:2]}
        parameters[names[2]] = nn.Parameter(torch.ones(4))
        train = TrainConfig(residual_lr=factor, weight_decay=0.0, optimizer_state=kind)
        optimizer = adamw(parameters, train)
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        own = [rates[parameters[name]] / train.lr for name in names]
        assert own == pytest.approx([1.0, factor, 1.0])  # before any rate is set
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        set_rate(optimizer, 0.5)
        update(optimizer, 0)
        return {n: 1 - float(p.detach().flatten()[0]) for n, p in parameters.items()}

    assert moved(1.0) == pytest.approx(dict.fromkeys(names, 0.5))
    assert moved(0.25) == pytest.approx({**dict.fromkeys(names, 0.5), names[1]: 0.125})


@pytest.mark.parametrize(
    ("lost", "half"), [("self_attn.o_proj", "attention"), ("mlp.down_proj", "mlp")]
)
def test_a_block_of_which_only_half_is_known_is_refused(lost: str, half: str) -> None:
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    whole = {f"layers.0.{n}.weight": nn.Parameter(torch.ones(3, 3)) for n in names}
    adamw(whole, TrainConfig(residual_lr=0.1))
    renamed = {name.replace(lost, lost.split(".")[0] + ".own"): p for name, p in whole.items()}
    with pytest.raises(ValueError, match=half):
        adamw(renamed, TrainConfig(residual_lr=0.1))
    adamw(renamed, TrainConfig())
