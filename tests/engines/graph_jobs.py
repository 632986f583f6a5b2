"""Steps from a CUDA graph beside eager ones: the same losses, norms, bytes, telemetry, held-out
losses and states, whatever comes between the replays. Run on every rank of a world; on a GPU with
the real graph, on the CPU with tests/engines/fake_graph.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.engines.fake_graph import faked
from tests.engines.fsdp_parity import (
    BF16,
    H4,
    Q4,
    S4,
    Outcome,
    after,
    configured,
    differs,
    kept,
    residual,
)
from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.transport import ProcessGroups, Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine

TELEMETRY, EVALUATED, SAVED, SHORT, PHASE, STEPS = 3, 8, 9, 12, 15, 19  # steps
OWN = {
    "residual_differences": (
        {
            "sharding": {"weights": "node", "update": "differences"},
            "hops": 2,
            "weights_update": Q4,
            "grads": {**H4, **residual()},
        },
        {**BF16, "micro_steps": 2, "accumulate": "last"},
    ),
    "phases": (
        {
            "hops": 2,
            "grads": {**Q4, **residual()},
            "phases": [after(PHASE, weights=Q4, grads={**S4, **residual(store="fp32")})],
        },
        {"micro_steps": 2, "accumulate": "every"},
    ),
}
LEAST = 4  # replays among them
NAMES = (*("zeropp", "zero3", "stochastic", "stochastic_secondary", "memory_last"), *OWN)


def made(case: str, nodes: int, local: int, **engine: Any) -> Config:
    if case not in OWN:
        return configured(case, nodes, local, **engine)
    config = configured("zero3", nodes, local, **engine)
    recipe, train = OWN[case]
    more = load(Config, {"recipe": {"name": case, **recipe}, "train": {"steps": STEPS, **train}})
    train_ = replace(more.train, lr=config.train.lr, clip=config.train.clip)
    return replace(config, recipe=more.recipe, train=train_)


def other(step: int, rank: int, micro: int) -> tuple[Tensor, ...]:
    """A batch that in one step is shorter, on all ranks."""
    every = batch(step, rank, micro)
    return tuple(t[:, :4].contiguous() for t in every) if step == SHORT else every


class Runs:
    """Engines of this rank."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device

    def engine(self, config: Config, graph: bool) -> FsdpEngine:
        config = replace(config, engine=replace(config.engine, graph="auto" if graph else False))
        model = build_uneven().to(self.device)
        model.same_every_step = True  # type: ignore[assignment]
        plan = build_plan(model, config)
        return FsdpEngine(model, plan, config, self.device, self.transport)

    def steps(self, engine: FsdpEngine, first: int, last: int, batches: Any = other) -> list[Any]:
        done: list[Any] = []
        for step in range(first, last):
            if step == EVALUATED:
                heldout = [batch(999, i, 0) for i in range(engine.cluster.world + 1)]
                done.append([engine.evaluate(step, heldout, wire) for wire in (True, False)])
            result = engine.step(step, 1e-2, partial(batches, step), step == TELEMETRY)
            done.append((result.loss, result.grad_norm, dict(result.bytes), result.telemetry))
        return done

    def eager(self, config: Config) -> Outcome:
        engine = self.engine(config, False)
        done = self.steps(engine, 0, STEPS)
        return done, [], kept(engine)

    def replayed(self, config: Config) -> tuple[Outcome, int]:
        """The same from a graph, and by another engine after a checkpoint."""
        engine = self.engine(config, True)
        done = self.steps(engine, 0, SAVED)
        saved = tree_map(lambda t: t.detach().clone(), engine.state_dict())
        done += self.steps(engine, SAVED, STEPS)
        left = kept(engine)
        engine.graph.drop()
        again = self.engine(config, True)
        again.load_state_dict(saved)
        resumed = self.steps(again, SAVED, STEPS)
        assert resumed == done[-len(resumed) :], "resumed otherwise"
        assert not differs(([], [], kept(again)), ([], [], left))
        again.graph.drop()
        return (done, [], left), min(engine.graph.replays, again.graph.replays)


def equal(case: str, runs: Runs, nodes: int, local: int, **engine: Any) -> str:
    """What differs between eager steps and those from a graph."""
    config = made(case, nodes, local, **engine)
    (done, _, left), replays = runs.replayed(config)
    plain, _, states = runs.eager(config)
    if replays < LEAST:
        return f"{replays} replays"
    first = [i for i, (a, b) in enumerate(zip(done, plain, strict=True)) if a != b]
    return f"step {first[0]}" if first else differs(([], [], left), ([], [], states))


def on_cpu(nodes: int, local: int, names: Sequence[str] = NAMES) -> dict[str, str]:
    """Every case over gloo, by case."""
    torch.use_deterministic_algorithms(True)
    transport = ProcessGroups(ClusterConfig(nodes, local), Watchdog(100.0))
    with faked():
        runs = Runs(transport, torch.device("cpu"))
        return {case: equal(case, runs, nodes, local) for case in names}
