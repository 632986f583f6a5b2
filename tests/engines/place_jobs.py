"""What tests ask of state in host memory, on every rank of a world.

Answers are rank 0's, which alone runs the virtual engine for comparison. A CPU has one memory: what
would come from host memory is a copy there. It is filled with NaN once it has been used, and so is
a gradient that has left, so that whatever is read where it no longer lies shows. Weights that have
come for a gather are NaN where they came from until it has read them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engines.fsdp_jobs import asked, complaint, real, virtual
from tests.engines.fsdp_parity import configured, differs, kept
from tests.engines.uneven import batch
from zpp_lab.config.residence import PLANES
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp import resident as placing
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.fsdp.resident import Brought
from zpp_lab.engines.optim import host
from zpp_lab.engines.optim.shards import local
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving

STEPS = 4  # telemetry and evaluations end an update: the last step's forward has one to do
Place = str | dict[str, int]
# none, one, half and all of three units: every pair of two planes' counts
COUNTS = 0, 1, 2, 3


def _times_two(count: int) -> int:
    """In the field of four, so that four planes' counts meet in all pairs."""
    return (0, 2, 3, 1)[count]


PAIRWISE: list[Place] = [
    {"masters": a, "moments": b, "gradients": a ^ b, "weights": a ^ _times_two(b)}
    for a in COUNTS
    for b in COUNTS
]


EVERYWHERE: dict[str, int] = dict.fromkeys(PLANES, 9)  # all units of small models


def _fill(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def _refuse() -> Tensor:
    raise AssertionError("a GPU's parameter refuses this where its rows lie in host memory")


def start() -> None:
    torch.use_deterministic_algorithms(True)
    host.vacate = _fill
    host.STAGE, host.SMALL = 2000, 1  # most parameters pass in pieces
    bring, leave, move_out = Brought.bring, Brought.leave, placing.move_out
    away: dict[Tensor, Tensor] = {}  # what stands in host memory, while it is filled

    def brought(self: Brought, unit: str) -> list[Any]:
        came = bring(self, unit)
        assert len(self.there) <= 2  # a unit is gathered ahead of the one that computes
        for name in self.there.get(unit, ()):
            if self.high[name] not in away:
                away[self.high[name]] = self.high[name].clone()
                _fill(self.high[name])
        return came

    def left(self: Brought, unit: str) -> None:
        for name in self.there.get(unit, ()):
            self.high[name].copy_(away.pop(self.high[name]))
        leave(self, unit)

    def moved(p: Any, device: torch.device) -> Tensor:
        out = move_out(p, device)
        p.sharded_param.detach = _refuse
        return out

    Brought.bring, Brought.leave = brought, left  # type: ignore[method-assign]
    placing.move_out = moved


def placed(case: str, nodes: int, gpus: int, place: Place = "device", **engine: Any) -> Config:
    """A case, with masters in two planes unless its moments take fewer bytes."""
    config = configured(case, nodes, gpus, **engine)
    train = config.train
    if train.optimizer_state == "fp32":
        train = replace(train, masters="split", param_dtype="bf16", optimizer_place="device")
    return replace(config, train=train, engine=replace(config.engine, place=place))  # type: ignore[arg-type]


def trained(engine: Any, first: int = 0, last: int = STEPS) -> tuple[list[Any], list[float]]:
    """Losses, norms, bytes and telemetry; held-out losses after the second step, with the masters
    too."""
    done, evaluated = [], []
    for step in range(first, last):
        result = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
        done.append((result.loss, result.grad_norm, dict(result.bytes), result.telemetry))
        if step == 1:
            heldout = [batch(999, i, 0) for i in range(3)]
            evaluated += [engine.evaluate(2, heldout, wire) for wire in (True, False)]
    return done, evaluated


def check_used(engine: FsdpEngine) -> None:
    """What should have left has left, and the last update waits where it should."""
    resident, far = engine.resident, engine.far
    trained = {n for n, p in engine.parameters.items() if p in engine.optimizer.state}
    assert set(resident.there) == far["gradients"] & trained
    assert (resident.pending is not None) == engine.residence.waits
    assert engine.masters.high.keys() == far["weights"] - engine.base.names
    for name, out in engine.masters.high.items():
        own = local(engine.parameters[name])
        assert own.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    near = [n for n, p in engine.parameters.items() if p.grad is not None]
    assert near == []


def agree(case: str, nodes: int, gpus: int, places: list[Place]) -> dict[str, str]:
    """By placement what differs from the virtual engine."""
    outcomes = {}
    for place in places:
        engine = real(placed(case, nodes, gpus, place))
        found = trained(engine)
        check_used(engine)
        outcomes[f"{case}, {place}"] = (*found, kept(engine))
    if not asked():
        return {}
    twin = virtual(placed(case, nodes, gpus))
    wanted = (*trained(twin), kept(twin))
    compared = {name: differs(found, wanted) for name, found in outcomes.items()}
    return {name: text for name, text in compared.items() if text}


def every(cases: dict[str, list[Place]], nodes: int, gpus: int) -> dict[str, str]:
    start()
    found: dict[str, str] = {}
    for case, places in cases.items():
        found |= agree(case, nodes, gpus, places)
    return found


def stopped(folder: str) -> list[str]:
    """Runs that end between a step and its update, and go on from the last checkpoint, with
    another placement: what differs from an undisturbed run."""
    start()
    wrong = []
    case, places = "split", ["host", "device", {"masters": 1, "moments": 3, "weights": 2}]
    for i, place in enumerate(places):
        engine = real(placed(case, 2, 1, place))
        store = Checkpoints(Path(folder) / str(i), 1, Saving(host=0, staging=1000), shared=True)
        trained(engine, 0, 2)
        store.save(2, engine.state_dict())
        trained(engine, 2, 4)  # lost
        other = real(placed(case, 2, 1, places[i - 1]))
        other.load_checkpoint(Saved(store.path(2)))
        after, end = trained(other, 2, 4), kept(other)
        again = real(placed(case, 2, 1, place))
        again.load_state_dict(engine.state_dict())
        later = trained(again, 4, 5)
        if asked():
            twin = virtual(placed(case, 2, 1))
            trained(twin, 0, 2)
            wrong.append(differs((*after, end), (*trained(twin, 2, 4), kept(twin))))
            wrong.append("" if later == trained(twin, 4, 5) else "after a state was loaded")
    return wrong


def not_finite(case: str) -> list[str]:
    """A weight turns NaN before the third step: what the engines say, the same whatever the
    placement, and whether anything else has changed."""
    start()
    said = []
    for place in ("device", "host", {"masters": 2, "gradients": 1, "weights": 3}, "virtual"):
        if place == "virtual" and not asked():
            continue
        config = placed(case, 2, 1, "device" if place == "virtual" else place)
        engine: Any = virtual(config) if place == "virtual" else real(config)
        trained(engine, 0, 2)
        before, name = {n: t.clone() for n, t in kept(engine).items()}, "layers.1.up.weight"
        mine = engine.cell.master[name] if place == "virtual" else local(engine.parameters[name])
        row, planted = mine.detach()[0].clone(), place == "virtual" or engine.rank == 0
        if planted:
            mine.data[0] = torch.nan
        run = partial(engine.step, 2, 1e-2, partial(batch, 2), telemetry=False)
        said.append(complaint(run))
        if planted:
            mine.data[0] = row
        after = kept(engine)
        if not all(torch.equal(before[n], t) for n, t in after.items()):
            said[-1] += ", and something has changed"
    return said


def clipped(case: str, nodes: int, gpus: int, place: Place, clip: float, by: str) -> Config:
    """A case with one micro-step, clipped by the norm of each unit or of all."""
    config = placed(case, nodes, gpus, place)
    train = replace(config.train, micro_steps=1, clip=clip, clip_by=by)  # type: ignore[arg-type]
    return replace(config, train=train)


def by_unit(cases: list[str], nodes: int, gpus: int) -> dict[str, str]:
    """By case and placement what differs from the virtual engine where clipping bites, and from the
    norm's rule where it does not; units of which a gradient is left."""
    start()
    found: dict[str, str] = {}
    for case in cases:
        planes = "split" in case
        some = {"moments": 1, "masters": 2 * planes, "weights": 3 * planes}
        places: list[Place] = ["device", "host", some]
        for clip, by in ((0.01, "unit"), (1e9, "norm")):
            engines = [real(clipped(case, nodes, gpus, p, clip, "unit")) for p in places]
            outcomes = [(*trained(engine), kept(engine)) for engine in engines]
            left = [n for e in engines for n, p in e.parameters.items() if p.grad is not None]
            assert left == []
            if not asked():
                continue
            twin = virtual(clipped(case, nodes, gpus, "device", clip, by))
            wanted = (*trained(twin), kept(twin))
            for place, outcome in zip(places, outcomes, strict=True):
                found[f"{case}, {place}, {clip}"] = differs(outcome, wanted)
    return {name: text for name, text in found.items() if text}


def not_finite_by_unit() -> list[str]:
    """A weight turns NaN before the second step: what the engines say, and that no weight became
    NaN."""
    start()
    said = []
    for make in (real, virtual) if asked() else (real,):
        engine: Any = make(clipped("split", 2, 1, "device", 0.01, "unit"))
        trained(engine, 0, 1)
        name = "layers.1.up.weight"
        mine = local(engine.parameters[name]) if make is real else engine.cell.master[name]
        row, planted = mine.detach()[0].clone(), make is virtual or engine.rank == 0
        if planted:
            mine.data[0] = torch.nan
        run = partial(engine.step, 1, 1e-2, partial(batch, 1), telemetry=False)
        said.append(complaint(run))
        if planted:
            mine.data[0] = row
        assert all(bool(t.float().isfinite().all()) for t in kept(engine).values())
    return said


def alone(cases: list[str]) -> dict[str, str]:
    """One rank: FSDP2 gathers and reduces nothing."""
    places: list[Place] = ["host", {"moments": 1, "gradients": 2}]
    high: list[Place] = [{"weights": 2}, dict.fromkeys(PLANES, 3)]
    return every({c: places + high * c.startswith("split") for c in cases}, 1, 1)


def unused() -> str:
    """Units that a step does not run are updated all the same."""
    from tests.engines.test_branches import Branches, mixture

    start()
    outcomes = []
    for make in (real, virtual):
        if make is virtual and not asked():
            return ""
        place: Place = EVERYWHERE if make is real else "device"
        model = Branches(mixture)
        engine: Any = make(placed("split_fp32_states", 2, 1, place), model)
        done = []
        for step in range(4):
            model.step = step
            result = engine.step(step, 1e-2, partial(batch, step), telemetry=False)
            done.append((result.loss, result.grad_norm))  # what is gathered in vain differs
        outcomes.append((done, [], kept(engine)))
    return differs(outcomes[0], outcomes[1])


def adapters(**train: Any) -> str:
    """A frozen base stays on the device, encoded; adapters leave it."""
    from tests.models.lora.models import build, lora, with_lora

    start()
    cfg, outcomes = lora("q4"), []
    for make in (real, virtual) if asked() else (real,):
        config = with_lora("zero3_bf16", 2, 1, cfg)
        left = {plane: n for plane, n in EVERYWHERE.items() if train == {} or plane != "gradients"}
        place: Any = replace(config.engine, place=left if make is real else "device")
        own = replace(config.train, masters="split", **train)
        engine: Any = make(replace(config, train=own, engine=place), build(cfg))
        done, held = trained(engine)
        if make is real:
            check_used(engine)
        outcomes.append((done, held, kept(engine)))
    return differs(*outcomes) if asked() else ""


def from_meta() -> str:
    """A model without memory fills both planes of its shards."""
    from zpp_lab.config.model import ModelConfig
    from zpp_lab.models import build_model

    start()
    settings = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab_size=37)
    config = placed("split", 2, 1, EVERYWHERE)
    model = build_model(settings, 37, "meta", seed=config.seed)
    engine = FsdpEngine(model, build_plan(model, config), config, torch.device("cpu"))
    mine = (*trained(engine), kept(engine))
    if not asked():
        return ""
    twin = virtual(configured("split", 2, 1), build_model(settings, 37, seed=config.seed))
    return differs(mine, (*trained(twin), kept(twin)))
