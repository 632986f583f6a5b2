"""Steps from a CUDA graph beside eager ones: the same losses, norms, bytes, telemetry, held-out
losses and states, whatever comes between the replays. Run on every rank of a world; on a GPU with
the real graph, on the CPU with tests/engines/fake_graph.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.engines.fake_graph import FakeCuda, faked
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
from zpp_lab.collectives.watchdog import CollectiveError, Watchdog
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.base import NonFiniteError
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

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        build: Callable[[], Any] = build_uneven,
    ) -> None:
        self.transport, self.device, self.build = transport, device, build

    def engine(self, config: Config, graph: bool | str) -> FsdpEngine:
        config = replace(config, engine=replace(config.engine, graph=graph))
        model = self.build().to(self.device)
        model.same_every_step = True
        plan = build_plan(model, config)
        return FsdpEngine(model, plan, config, self.device, self.transport)

    def steps(self, engine: FsdpEngine, first: int, last: int, batches: Any = other) -> list[Any]:
        done: list[Any] = []
        for step in range(first, last):
            if step == EVALUATED:
                heldout = [batch(999, i, 0) for i in range(engine.cluster.world + 1)]
                done.append([engine.evaluate(step, heldout, wire) for wire in (True, False)])
            ahead = partial(batches, step + 1)  # in vain where something comes between
            telemetry = step == TELEMETRY
            result = engine.step(step, 1e-2, partial(batches, step), telemetry, ahead)
            done.append((result.loss, result.grad_norm, dict(result.bytes), result.telemetry))
        return done

    def eager(self, config: Config) -> Outcome:
        engine = self.engine(config, False)
        done = self.steps(engine, 0, STEPS)
        return done, [], kept(engine)

    def replayed(self, config: Config) -> tuple[Outcome, int]:
        """The same from a graph, and by another engine after a checkpoint."""
        engine = self.engine(config, "auto")
        done = self.steps(engine, 0, SAVED)
        saved = tree_map(lambda t: t.detach().clone(), engine.state_dict())
        done += self.steps(engine, SAVED, STEPS)
        left, captured = kept(engine), engine.graph.step
        assert captured is not None
        reduced = [grad for _, grad in captured.grads if grad is not None]
        assert len(captured.made[2]) == len(reduced), "squares that the graph does not sum"
        engine.graph.drop()
        again = self.engine(config, "auto")
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


def on_cpu(nodes: int, local: int, names: Sequence[str]) -> dict[str, str]:
    """Every case over gloo, by case."""
    torch.use_deterministic_algorithms(True)
    transport = ProcessGroups(ClusterConfig(nodes, local), Watchdog(100.0))
    with faked():
        runs = Runs(transport, torch.device("cpu"))
        return {case: equal(case, runs, nodes, local) for case in names}


def one_rank_differs(runs: Runs, config: Config) -> list[Any]:
    """Rank 1's batch is shorter in one step: what differs from eager steps, replays."""

    def batches(step: int, rank: int, micro: int) -> tuple[Tensor, ...]:
        every = batch(step, rank, micro)
        return tuple(t[:, :4].contiguous() for t in every) if (step, rank) == (6, 1) else every

    done, left, replays = [], [], 0
    for graph in ("auto", False):
        engine = runs.engine(config, graph)
        done.append(runs.steps(engine, 0, 8, batches))
        left.append(kept(engine))
        replays += engine.graph.replays
        engine.graph.drop()
    return [done[0] == done[1] and not differs(([], [], left[0]), ([], [], left[1])), replays]


def fails(
    runs: Runs, config: Config, at: str, wanted: Any = "auto", fake: FakeCuda | None = None
) -> list[Any]:
    """The first capture fails, on all ranks within a unit's forward or backward, or on rank 1
    there (`alone`) or at its end: what is said, whether steps equal eager ones, and how many were
    replayed. A fake capture runs its transfers, so no rank can leave the others in the middle."""
    engine = runs.engine(config, wanted)
    module: Any = engine.model.units()[1][1]

    def fail(*_: Any) -> None:
        own = at != "alone" or runs.transport.rank == 1
        if own and engine.transport.watchdog.capturing is not None:
            raise CollectiveError("a broken link") if at == "transfer" else KeyError("x")

    def end() -> None:
        if at == "end" and runs.transport.rank == 1:
            raise RuntimeError("invalidated")

    if fake is not None:
        fake.fails = end
    if at in ("forward", "transfer", "alone"):
        module.register_forward_pre_hook(fail)
    elif at == "backward":
        module.register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
    said, done = "", []
    try:
        done = runs.steps(engine, 0, 6)
    except ValueError as refused:
        said = str(refused)
    if fake is not None:
        fake.fails = lambda: None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    same = False
    if done:
        plain = runs.engine(config, False)
        same = runs.steps(plain, 0, 6) == done
        same &= not differs(([], [], kept(engine)), ([], [], kept(plain)))
    engine.graph.drop()
    return [every, same, engine.graph.replays, engine.graph.on]


def not_finite(runs: Runs, config: Config) -> list[Any]:
    """A rate that ruins the weights: whether the error that follows, and what it leaves, equal
    those of eager steps, though a step more was launched; replays."""
    said, left, replays = [], [], 0
    for graph in ("auto", False):
        engine = runs.engine(config, graph)
        runs.steps(engine, 0, 5)
        try:
            for step in range(5, 9):
                given = (partial(batch, step + i) for i in range(2))
                engine.step(step, 1e30 if step == 5 else 1e-2, next(given), False, next(given))
        except NonFiniteError as error:
            said.append(f"{error.step} {error}")
        left.append(kept(engine))
        replays += engine.graph.replays
        engine.graph.drop()
    assert len(said) == 2
    return [said[0] == said[1] and not differs(([], [], left[0]), ([], [], left[1])), replays]


def made_once(runs: Runs, config: Config) -> list[int]:
    """How often eight steps, whose last names the next, have each batch made; replays."""
    engine, counts = runs.engine(config, "auto"), [0] * 9

    def batches(step: int, rank: int, micro: int) -> tuple[Tensor, ...]:
        counts[step] += micro == 0
        return batch(step, rank, micro)

    for step in range(8):
        given = partial(batches, step), partial(batches, step + 1)
        engine.step(step, 1e-2, given[0], False, given[1])
    engine.graph.drop()
    return [*counts, engine.graph.replays]


def often(runs: Runs, config: Config, every: int) -> int:
    """Replays of twelve steps with telemetry in each so many."""
    engine = runs.engine(config, "auto")
    for step in range(12):
        engine.step(step, 1e-2, partial(batch, step), telemetry=step % every == 0)
    engine.graph.drop()
    return engine.graph.replays


def hindered(nodes: int, local: int) -> dict[str, Any]:
    """What stands against a graph, over gloo."""
    transport = ProcessGroups(ClusterConfig(nodes, local), Watchdog(100.0))
    config, plain = (made(name, nodes, local) for name in ("residual_differences", "zero3"))
    with faked() as fake:
        runs = Runs(transport, torch.device("cpu"))
        found: dict[str, Any] = {"one rank differs": one_rank_differs(runs, config)}
        found["one rank differs ahead"] = one_rank_differs(runs, made("zeropp", nodes, local))
        found["not finite"] = not_finite(runs, made("zeropp", nodes, local))
        found["made once"] = made_once(runs, made("zeropp", nodes, local))
        for at in ("forward", "backward", "end", "transfer"):
            found[at] = fails(runs, config, at, fake=fake)
        found["wanted"] = fails(runs, config, "end", True, fake)
        for every in (2, 3, 4):
            before = fake.captures
            found[f"often {every}"] = [often(runs, plain, every), fake.captures - before]
        return found
