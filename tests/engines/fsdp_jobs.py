"""What tests ask of the real engine beyond the parity table; run on every rank of a world.

The answers are rank 0's, so it alone runs the virtual engine for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.engines.fsdp_parity import CASES, configured, differs, kept
from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.ledger import LedgerError
from zpp_lab.collectives.traffic import Traffic
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.build import build_engine, build_plan, plan_of
from zpp_lab.engines.fsdp import packed
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model

CPU = torch.device("cpu")
GATHERED = ("qsdp", "zeropp", "w4", "w4_diff", "amsp_node")


def real(config: Config, model: Any = None) -> FsdpEngine:
    model = model or build_uneven()
    return FsdpEngine(model, build_plan(model, config), config, CPU)


def virtual(config: Config, model: Any = None) -> VirtualEngine:
    model = model or build_uneven()
    return VirtualEngine(model, build_plan(model, config), config)


def asked() -> bool:
    """Whether this rank's answer is the one that is read."""
    return torch.distributed.get_rank() == 0


def steps(engine: Any, count: int = 2) -> Any:
    done = [engine.step(s, 1e-2, partial(batch, s), telemetry=False) for s in range(count)]
    return [(r.loss, r.grad_norm, dict(r.bytes)) for r in done], []


def pair(config: Config, model: Any = build_uneven) -> str:
    """What differs after two steps of both engines."""
    engine = real(config, model())
    outcome = (*steps(engine), kept(engine))
    if not asked():
        return ""
    twin = virtual(config, model())
    return differs(outcome, (*steps(twin), kept(twin)))


def altered(case: str, nodes: int, local: int, **engine: Any) -> Config:
    return configured(case, nodes, local, **engine)


def flat_gather() -> str:
    return pair(altered("zeropp", 2, 2, gather="flat"))


def small_llama(recipe: str, *words: str) -> Config:
    shape = ["dim=32", "layers=1", "heads=2", "kv_heads=2", "ffn=48"]
    settings = ["cluster=2x2", "engine=fsdp", "engine.device=cpu", "train.steps=20", *words]
    return compose([f"recipe={recipe}", *settings, *(f"model.{s}" for s in shape)])


def planned_bytes(config: Config) -> list[Any]:
    """What a step of an engine that `zpp-lab train` would build has sent and what `zpp-lab plan`
    shows, where all ranks are on one host; then how much of it goes between nodes."""
    engine = build_engine(config, 256, CPU)
    (_, _, sent), *_ = steps(engine, 1)[0]
    planned = plan_of(config).step_bytes()
    same = all(tuple(sent[wire]) == tuple(planned[wire]) for wire in planned)
    return [same, sum(traffic.inter for traffic in planned.values())]


def no_prefetch() -> str:
    return pair(altered("zeropp", 2, 2, prefetch=0)) or pair(altered("zeropp", 2, 2, prefetch=2))


def offload() -> str:
    return pair(altered("zeropp_bf16", 2, 2, offload=True))


def llama(tied: bool, checkpointed: bool, blocks: int = 1) -> str:
    settings = ModelConfig(
        dim=16,
        layers=1 + blocks,
        heads=2,
        kv_heads=1,
        ffn=24,
        vocab_size=37,
        tied_head=tied,
        checkpoint_activations=checkpointed,
    )
    config = configured("zeropp_every", 2, 2, blocks_per_unit=blocks)
    return pair(config, lambda: build_model(settings, 37, seed=3))


def meta_start() -> bool:
    """Shards made from a meta model equal those cut from a whole one."""
    values = {
        "recipe": {"name": "zero3"},
        "cluster": {"nodes": 2, "gpus_per_node": 2},
        "model": {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 23},
        "engine": {"name": "fsdp", "ordered": True},
    }
    config = load(Config, values)
    made = real(config, build_model(config.model, 37, device="meta"))
    whole = dict(build_model(config.model, 37, seed=config.seed).named_parameters())
    return all(torch.equal(p.full_tensor(), whole[n]) for n, p in made.parameters.items())


def forward_only() -> str:
    """A forward without a backward, and evaluations, leave no trace in the next step."""
    config = configured("zeropp", 2, 2)
    engine = real(config)
    engine.wrapped.reshard()
    engine.model(*batch(77, engine.rank, 0))
    engine.evaluate(0, [batch(5, 0, 0)], wire=True)
    left = [u.plan.unit.name for u in engine.wrapped.installed if u.gather.secondary is not None]
    if left:
        return f"secondary shards left after a forward without gradients: {left}"
    outcome = (*steps(engine), kept(engine))
    if not asked():
        return ""
    twin = virtual(config)
    return differs(outcome, (*steps(twin), kept(twin)))


def untouched() -> list[Any]:
    """zero3 without engine.ordered: nothing of ours installed, and the virtual losses nearly."""
    config = configured("zero3", 2, 2, ordered=False)
    engine = real(config)
    a = steps(engine)[0]
    told: Any = engine.step(3, 1e-2, partial(batch, 3), telemetry=True).telemetry
    if not asked():
        return []
    twin = virtual(config)
    b = steps(twin)[0]
    told = [told, twin.step(3, 1e-2, partial(batch, 3), telemetry=True).telemetry]
    far = max(abs(x[0] - y[0]) for x, y in zip(a, b, strict=True))
    return [len(engine.wrapped.installed), far, a[0][2] == b[0][2], told]


def complaint(run: Callable[[], object]) -> str:
    """What a step says of a value that is not finite; "nothing" if it ends."""
    try:
        run()
    except NonFiniteError as error:
        return str(error)
    return "nothing"


def nan_message(name: str, value: float, case: str) -> list[str]:
    """What each engine says about a bad weight: this rank's, and the virtual one's."""
    config = configured(case, 2, 2)
    said = []
    for make in (real, virtual) if asked() else (real,):
        engine = make(config)
        mine = (
            engine.parameters[name] if isinstance(engine, FsdpEngine) else engine.cell.master[name]
        )
        local = mine.to_local() if isinstance(engine, FsdpEngine) else mine
        if not isinstance(engine, FsdpEngine) or engine.rank == 0:
            with torch.no_grad():
                local[0] = value
        said.append(complaint(partial(steps, engine, 1)))
        if isinstance(engine, FsdpEngine):
            every: list[Any] = [None] * 4
            torch.distributed.all_gather_object(every, said[-1])
            assert every == [said[-1]] * 4, f"ranks differ: {every}"
            with torch.no_grad():
                assert not any(p in engine.optimizer.state for p in engine.parameters.values())
    return said


def untouched_nan() -> str:
    """An untouched FSDP2: the parameter can be named, the wire cannot."""
    engine = real(configured("zero3", 2, 2, ordered=False))
    with torch.no_grad():
        engine.parameters["head.weight"].to_local().fill_(3e38)
    return complaint(partial(steps, engine, 1))


class Forgetful(ProcessGroups):
    """A transport that hands over less than asked for."""

    def all_gather(self, out: Any, row: Any, link: Any, label: str) -> Traffic:
        sent = super().all_gather(out, row, link, label)
        return Traffic(sent.intra // 2, sent.inter)


def ledger_error() -> str:
    config = configured("zeropp", 2, 2)
    model = build_uneven()
    transport = Forgetful(config.cluster)
    engine = FsdpEngine(model, build_plan(model, config), config, CPU, transport)
    try:
        steps(engine, 1)
    except LedgerError as error:
        return str(error)
    return "nothing"


def unknown_operator(start: str) -> list[str]:
    """FSDP2 without an operator that our buffer knows: an error, or allowed and counted."""
    names = [n for n in packed.HANDLERS if n.startswith(start)]  # one for each torch
    taken = {n: packed.HANDLERS.pop(n) for n in names}
    said = []
    try:
        for allowed in (False, True):
            config = configured("weights8", 2, 2, allow_fallback=allowed)
            engine = real(config)
            try:
                engine.step(0, 1e-2, partial(batch, 0), telemetry=False)
                said.append("went on")
            except RuntimeError as error:
                said.append(str(error))
    finally:
        packed.HANDLERS.update(taken)
    return said


def missing_gradient() -> str:
    """Two parameters of one shape, one of them without a gradient: names must not mix."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = torch.nn.ModuleList([Pair(), Pair()])
            self.table = torch.nn.Embedding(37, 12)

        def units(self) -> list[tuple[str, torch.nn.Module]]:
            return [(f"inner.{i}", m) for i, m in enumerate(self.inner)]

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for m in self.inner:
                x = m(x)
            return (x.sum(-1) - targets).square().mean()

    return pair(configured("zeropp", 2, 2), Two)


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.randn(12, 12))
        self.busy = torch.nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.busy


JOBS: dict[str, tuple[Any, ...]] = {
    "flat_gather": (flat_gather,),
    "no_prefetch": (no_prefetch,),
    "offload": (offload,),
    "llama": (llama, False, False),
    "llama_tied_checkpointed": (llama, True, True),
    "llama_pairs_checkpointed": (llama, False, True, 2),
    "meta_start": (meta_start,),
    "forward_only": (forward_only,),
    "untouched": (untouched,),
    "nan_weight": (nan_message, "layers.0.up.weight", float("nan"), "zeropp"),
    "huge_weight": (nan_message, "head.weight", 3e38, "zeropp"),
    "untouched_nan": (untouched_nan,),
    "ledger_error": (ledger_error,),
    "unknown_gather": (unknown_operator, "fsdp::all_gather_copy_in"),
    "unknown_reduce": (unknown_operator, "fsdp::chunk_cat"),
    "missing_gradient": (missing_gradient,),
}
assert "zeropp" in CASES


def run_jobs(llamas: dict[str, Config]) -> dict[str, Any]:
    """Every job's answer by name; one start of a 2 × 2 world serves all."""
    torch.use_deterministic_algorithms(True)
    found = {f"bytes of {name}": planned_bytes(config) for name, config in llamas.items()}
    return found | {name: job(*args) for name, (job, *args) in JOBS.items()}
