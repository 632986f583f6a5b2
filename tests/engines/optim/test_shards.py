"""ShardAdamW is torch's AdamW to the bit, on DTensors and with their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.engines.fsdp_world import run_world
from zpp_lab.engines.optim import ShardAdamW

SHAPES = [(6, 4), (5, 3), (7,)]


def trained(kind: type[torch.optim.AdamW], fused: bool) -> list[torch.Tensor]:
    """Weights and states on this rank after four steps: one without a gradient of the second
    parameter, and one that is held back where the kernel can do so."""
    generator = torch.Generator().manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        own = torch.randn(shape, generator=generator).tensor_split(2)[mesh.get_rank()]
        stride = torch.empty(shape).stride()
        return DTensor.from_local(own, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)

    parameters = [nn.Parameter(sharded(shape)) for shape in SHAPES]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=1e-2, **({"fused": True} if fused else {"foreach": True}))
    for step in range(4):
        for p, shape in zip(parameters, SHAPES, strict=True):
            p.grad = sharded(shape)
        if step == 1:
            parameters[1].grad = None
        if fused:
            optimizer.grad_scale = None
            optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()
    states = [optimizer.state[p] for p in parameters]
    assert [list(s) for s in states] == [["step", "exp_avg", "exp_avg_sq"]] * len(SHAPES)
    assert all(isinstance(s[key], DTensor) for s in states for key in list(s)[1:])
    every = [*parameters, *(t for s in states for t in s.values())]
    return [t.to_local() if isinstance(t, DTensor) else t for t in map(torch.Tensor.detach, every)]


def compared() -> dict[str, bool]:
    found = {}
    for fused in (False, True):
        pairs = zip(trained(torch.optim.AdamW, fused), trained(ShardAdamW, fused), strict=True)
        found["fused" if fused else "foreach"] = all(torch.equal(a, b) for a, b in pairs)
    return found


def test_has_the_bits_of_torch_on_dtensors() -> None:
    assert run_world(2, compared) == {"fused": True, "foreach": True}
