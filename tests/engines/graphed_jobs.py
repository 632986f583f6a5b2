"""Users' steps from a CUDA graph beside eager ones, and what they refuse. Run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.engines.fake_graph import faked
from tests.engines.uneven import batch, build_uneven
from tests.loop_jobs import everyone
from zpp_lab.api import Sharded, shard

Q4 = {"bits": 4, "block_size": 16}
DRAWN = {**Q4, "rounding": "stochastic"}
RECIPES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "drawn": {"hops": 2, "weights": DRAWN, "grads": DRAWN},
    "residual": {"hops": 2, "grads": {**Q4, "memory": {"kind": "residual"}}},
    "differences": {
        "hops": 2,
        "sharding": {"weights": "node", "update": "differences"},
        "weights_update": DRAWN,
    },
    "phases": {"weights": Q4, "phases": [{"after": 11, "grads": DRAWN}]},
}
EVALUATED, STEPS = 6, 15
Pair = tuple[Any, Sharded, Any]


def new(name: str, shape: str, device: torch.device, **more: Any) -> Pair:
    model: Any = build_uneven().to(device)
    sharded = shard(model, RECIPES[name], shape, steps=STEPS, **more)
    return model, sharded, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def data(step: int, device: torch.device, short: bool = False) -> dict[str, Any]:
    every = [batch(step, dist.get_rank(), micro) for micro in (0, 1)]
    cut = slice(4 if short else None)
    return {"micro": tree_map(lambda t: t[:, cut].contiguous().to(device), every), "parts": 2}


def passes(model: Any, given: dict[str, Any]) -> list[Tensor]:
    losses = []
    for tokens, targets in given["micro"]:
        loss = model(tokens, targets) / given["parts"]
        loss.backward()
        losses.append(loss)
    return losses


def trained(pair: Pair, run: Callable[[Any], list[Tensor]], device: torch.device) -> list[Any]:
    """Losses, norms, bytes, the step that the loop counts, and weights."""
    model, sharded, optimizer = pair
    done: list[Any] = []
    for step in range(STEPS):
        if step == EVALUATED:
            model.eval()
            with torch.no_grad():
                done.append(model(*data(99, device)["micro"][0]).item())
            model.train()
        losses = run(data(step, device))
        norm = sharded.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.append([*(x.item() for x in losses), norm.item(), dict(sharded.bytes)])
    done.append(sharded.state_dict()["step"])
    weights = [p.full_tensor() for p in model.parameters()]
    return [*done, [w.flatten().view(torch.uint8).tolist() for w in weights]]


def equal(name: str, shape: str, device: torch.device, **more: Any) -> list[Any]:
    """Whether steps from a graph equal eager ones, on all ranks, and how many there were."""
    plain = new(name, shape, device, **more)
    expected = trained(plain, partial(passes, plain[0]), device)
    pair = new(name, shape, device, **more)
    step = pair[1].graphed(partial(passes, pair[0]))
    found = trained(pair, step, device)
    step.drop()
    return [everyone(found == expected), step.graph.replays]


def refused(job: Callable[[], Any]) -> list[str]:
    """What the ValueError on each rank says."""
    said = ""
    try:
        job()
    except ValueError as error:
        said = str(error)
    return everyone(said)


def refusals(shape: str, device: torch.device, **more: Any) -> dict[str, list[str]]:
    found = {}

    def made(wrong: Any = None) -> tuple[Pair, Any]:
        pair = new("differences", shape, device, **more)
        return pair, pair[1].graphed(partial(wrong or passes, pair[0]))

    def steps(pair: Pair, step: Any, first: int, last: int) -> None:
        for number in range(first, last):
            step(data(number, device))
            pair[2].step()
            pair[2].zero_grad(set_to_none=True)

    pair, step = made()
    steps(pair, step, 0, 4)
    assert step.graph.replays
    found["shape"] = refused(lambda: step(data(4, device, short=dist.get_rank() == 1)))
    steps(pair, step, 4, 5)
    step(data(5, device))
    found["gradients"] = refused(lambda: step(data(6, device)))
    step.drop()

    pair, step = made()
    found["twice"] = refused(lambda: pair[1].graphed(step.function))
    pair[0].set_requires_gradient_sync(False)
    passes(pair[0], data(0, device))
    pair[0].set_requires_gradient_sync(True)
    found["waiting"] = refused(lambda: step(data(0, device)))

    pair, step = made(lambda model, given: model(*given["micro"][0]))
    found["no backward"] = refused(lambda: step(data(0, device)))

    def updates(model: Any, given: Any) -> None:
        passes(model, given)
        pair[2].step()

    pair, step = made(updates)
    found["updates"] = refused(lambda: step(data(0, device)))

    def by_hand(model: Any, given: Any) -> None:
        passes(model, given)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    pair, step = made(by_hand)
    found["by hand"] = refused(lambda: step(data(0, device)))

    pair = new("zero3", shape, device, **more)
    passes(pair[0], data(0, device))
    found["late"] = refused(lambda: pair[1].graphed(partial(passes, pair[0])))
    return found


def on_cpu(shape: str, names: Sequence[str]) -> dict[str, Any]:
    device = torch.device("cpu")
    pair = new("zero3", shape, device)
    said = refused(lambda: pair[1].graphed(partial(passes, pair[0])))
    with faked():
        found: dict[str, Any] = {name: equal(name, shape, device) for name in names}
        return found | refusals(shape, device) | {"no GPU": said}
