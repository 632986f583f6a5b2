"""What tests ask of state in host memory in a user training loop, on every rank of a world; answers
are rank 0's. Memory that has been used is filled with NaN, as in `place_jobs.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state

from tests.engines.fsdp_jobs import asked, real
from tests.engines.fsdp_parity import differs, gathered, kept
from tests.engines.place_jobs import Place, clipped, placed, start
from tests.engines.uneven import batch, build_uneven
from zpp_lab.api import Sharded, shard
from zpp_lab.codecs.planes import joined
from zpp_lab.config.schema import Config
from zpp_lab.engines.fsdp.loops.placed import LoopResident
from zpp_lab.engines.optim import host
from zpp_lab.engines.optim.build import _groups
from zpp_lab.engines.optim.shards import local
from zpp_lab.train.memory import shards
from zpp_lab.train.memory.outlook import GIB, state_held

STEPS = 3
Made = tuple[Any, Sharded, Any]  # a model, its shards, its optimizer


def sharded(config: Config, model: nn.Module | None = None, **more: Any) -> Made:
    """A model as `config` has it, by `shard`."""
    model, train, engine = model or build_uneven(), config.train, config.engine
    how: dict[str, Any] = {"param_dtype": train.param_dtype, "reduce_dtype": train.reduce_dtype}
    how |= {"masters": train.masters, "optimizer_state": train.optimizer_state}
    how |= {"clip_by": train.clip_by, "place": engine.place, "ordered": engine.ordered}
    found = shard(model, config.recipe, config.cluster, seed=config.seed, steps=9, **how | more)
    return model, found, optimizer(config, model, found)


def optimizer(config: Config, model: nn.Module, found: Sharded) -> Any:
    train = config.train
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rate: dict[str, Any] = {"lr": 1e-2, "betas": (train.beta1, train.beta2), "eps": train.eps}
    clip = train.clip if train.clip_by == "unit" else None
    return found.adamw(_groups(trained, train), **rate, clip=clip)


def refused(run: Callable[[], object]) -> str:
    """The error that `run` ends with."""
    try:
        run()
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on(batch: tuple[Tensor, ...], model: nn.Module) -> list[Tensor]:
    device = next(model.parameters()).device
    return [t.to(device) for t in batch]


def steps(
    config: Config,
    made: Made,
    first: int = 0,
    last: int = STEPS,
    between: Callable[[int], None] = lambda step: None,
) -> list[tuple[float, float]]:
    """Losses of all ranks and micro-steps, and norms, of a loop as users write it."""
    model, found, optimizer = made
    done, micros, rank = [], config.train.micro_steps, dist.get_rank()
    for step in range(first, last):
        losses = []
        for micro in range(micros):
            every = config.train.accumulate == "every" or micro == micros - 1
            model.set_requires_gradient_sync(every)
            loss = model(*on(batch(step, rank, micro), model))
            (loss / micros).backward()
            losses.append(loss.detach().double().cpu())
        norm = float("nan")
        if config.train.clip_by == "norm":
            norm = float(found.clip_grad_norm_(config.train.clip or 1e9))
        optimizer.step()
        optimizer.zero_grad()
        ranks = [torch.empty(micros, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, torch.stack(losses))
        done.append((sum(torch.stack(ranks).t().flatten().tolist()) / len(ranks) / micros, norm))
        between(step)
    return done


def masters(made: Made) -> dict[str, Tensor]:
    """Masters and states whole, as `fsdp_parity.kept` names them."""
    model, _, optimizer = made
    found: dict[str, Any] = {f"weights of {n}": p.detach() for n, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found |= {f"{key} of {name}": value} if key != "mark" else {}
    whole = gathered(found)
    for name in [n.removeprefix("low of ") for n in whole if n.startswith("low of ")]:
        high = whole[f"weights of {name}"]
        low = whole.pop(f"low of {name}").view(torch.int16)[..., 0]
        whole[f"weights of {name}"] = joined(high, low)
    return whole


def of_engine(
    config: Config,
    first: int = 0,
    last: int = STEPS,
    engine: Any = None,
    rate: Callable[[int], float] = lambda step: 1e-2,
) -> Any:
    """The same of our engine, without placement."""
    engine, done = engine or real(config), []
    for step in range(first, last):
        result = engine.step(step, rate(step), partial(batch, step), telemetry=False)
        norm = result.grad_norm if config.train.clip_by == "norm" else float("nan")
        done.append((result.loss, norm))
    return done, kept(engine)


def unlike(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> str:
    """What differs. The engine has no state of what was never updated, where ours is zeros, and
    masters of what is frozen, of which ours is gathered alone."""
    for step, (one, other) in enumerate(zip(found[0], wanted[0], strict=True)):
        if repr(one) != repr(other):
            return f"step {step}: {one}, not {other}"
    ours = {n: t for n, t in found[1].items() if n in wanted[1]}
    theirs = {n: t for n, t in wanted[1].items() if not n.startswith(("kept", "memory"))}
    theirs = {n: t.to(ours[n].dtype) if "frozen" in n else t for n, t in theirs.items()}
    return differs(([], [], ours), ([], [], theirs))


def answers(found: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in found.items() if text} if asked() else {}


def every(cases: dict[str, list[Place]], world: int) -> dict[str, str]:
    """By case and placement what differs from our engine without one."""
    start()
    found = {}
    for case, places in cases.items():
        wanted = of_engine(placed(case, world, 1, ordered=True))
        for place in places:
            config = placed(case, world, 1, place, ordered=True)
            made = sharded(config)
            waits, resident = made[2].placing.residence.waits, made[2].resident
            at_once: list[bool] = []  # of the last block, while the root begins
            made[0].embed.register_forward_hook(
                lambda *_, r=resident, seen=at_once: seen.append("layers.1" in r.updated)
            )
            done = steps(config, made)
            assert (resident.pending is not None) == waits, "the last update should wait"
            assert not resident.there
            micros = config.train.micro_steps
            assert not any(at_once[::micros]) or not waits, "a unit was updated before its turn"
            found[f"{case}, {place}"] = unlike((done, masters(made)), wanted)
            assert resident.pending is None
    return answers(found)


def by_budget(world: int) -> list[Any]:
    """place=auto: what differs with room for all but some; the placement that it took; and what is
    said where there is no room."""
    start()
    shards.STAGE, host.STAGE = 1, 2**28  # as if the model were large, and nothing is cut
    config = placed("split", world, 1, ordered=True)
    auto = replace(config, engine=replace(config.engine, place="auto"))
    whole = state_held(config, real(config).plan)[0] / GIB
    made = sharded(auto, gpu_gib=0.7 * whole)
    outcome = unlike((steps(config, made), masters(made)), of_engine(config))
    said = refused(lambda: sharded(auto, gpu_gib=0.27 * whole))
    return [outcome, made[2].placing.config.engine.place, said, refused(lambda: sharded(auto))]


def by_unit(cases: list[str], world: int) -> dict[str, str]:
    start()
    found = {}
    for case in cases:
        wanted = of_engine(clipped(case, world, 1, "device", 0.01, "unit"))
        some: list[Place] = ["device", "host", {"moments": 1}]
        for place in some:
            config = clipped(case, world, 1, place, 0.01, "unit")
            made = sharded(config)
            found[f"{case}, {place}"] = unlike((steps(config, made), masters(made)), wanted)
    return answers(found)


def scheduled() -> str:
    """A model that begins without memory, and a schedule that changes the rate while updates still
    wait."""
    start()
    config = placed("split_fp32_states", 2, 1, "host", ordered=True)
    rounded = {n: t.bfloat16().float() for n, t in build_uneven().state_dict().items()}
    with torch.device("meta"):
        model = build_uneven()
    how: dict[str, Any] = {"masters": "split", "place": "host", "param_dtype": "bf16"}
    found = shard(model, config.recipe, config.cluster, ordered=True, seed=config.seed, **how)
    model.to_empty(device="cpu")
    options = dcp_state.StateDictOptions(full_state_dict=True)
    dcp_state.set_model_state_dict(model, dict(rounded), options=options)
    made = model, found, optimizer(config, model, found)
    schedule = torch.optim.lr_scheduler.LambdaLR(made[2], lambda step: 1 / (1 + step))
    outcome = steps(config, made, between=lambda step: schedule.step()), masters(made)
    whole = build_uneven()
    whole.load_state_dict(rounded)
    engine = real(placed("split_fp32_states", 2, 1, ordered=True), whole)
    wanted = of_engine(config, engine=engine, rate=lambda step: 1e-2 / (1 + step))
    return unlike(outcome, wanted) if asked() else ""


# ---------------------------------------------------------------------- checkpoints


def parts(made: Made) -> dict[str, Any]:
    model, found, optimizer = made
    weights, states = dcp_state.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "sharded": found}


def resumed(config: Config, folder: Path, weights_last: bool = False) -> Made:
    """A fresh process's model, from a checkpoint."""
    made = sharded(config)
    found = parts(made)
    dcp.load(found, checkpoint_id=folder)
    model, _, optimizer = made
    for last in (weights_last, not weights_last):
        if last:
            dcp_state.set_model_state_dict(model, found["model"])
        else:
            dcp_state.set_optimizer_state_dict(model, optimizer, found["optimizer"])
    return made


def stopped(folder: str, world: int) -> list[str]:
    """Loops that end between a step and its update, and resume with another placement from a
    checkpoint that was taken there too: what differs from an undisturbed run of our engine."""
    start()
    wrong = []
    places: list[Place] = ["host", {"masters": 1, "moments": 3}]
    for i, (case, place) in enumerate(zip(("split", "split_zero3"), places, strict=True)):
        wanted = of_engine(placed(case, world, 1, ordered=True), 0, 4)
        config, at = placed(case, world, 1, place, ordered=True), Path(folder) / f"{world}-{i}"
        made = sharded(config)
        before = steps(config, made, 0, 2)
        dcp.save(parts(made), checkpoint_id=at)
        steps(config, made, 2, 4)
        assert made[2].resident.pending is not None  # lost
        other = placed(case, world, 1, places[i - 1], ordered=True)
        again = resumed(other, at, weights_last=i > 0)
        after = steps(other, again, 2, 4)
        wrong.append(unlike(([*before, *after], masters(again)), wanted))
    whole = masters(resumed(config, at))
    if asked():
        torch.save(whole, Path(folder) / "whole")
    return wrong


def resharded(folder: str) -> str:
    """What differs where one rank loads the last checkpoint of two."""
    start()
    made = resumed(placed("split_zero3", 1, 1, "host", ordered=True), Path(folder) / "2-1")
    whole = torch.load(Path(folder) / "whole")
    return differs(([], [], masters(made)), ([], [], whole))


# ---------------------------------------------------------------------- looks and writes

LOOKS: dict[str, Callable[[Made], Any]] = {
    "data": lambda made: [p.data for p in made[0].parameters()],
    "detach": lambda made: [p.detach().clone() for p in made[0].parameters()],
    "local": lambda made: [local(p).clone() for p in made[0].parameters()],
    "full_tensor": lambda made: [p.full_tensor() for p in made[0].parameters()],
    "foreach": lambda made: torch._foreach_norm(list(made[0].parameters())),
    "state_dict": lambda made: made[0].state_dict(),
    "part's state_dict": lambda made: made[0].layers[1].state_dict(),
    "optimizer": lambda made: made[2].state_dict(),
    "state": lambda made: made[2].state[made[0].head.weight],
}


def looked_at() -> dict[str, str]:
    """Between a step and the next forward: by way of looking whether the update was there."""
    start()
    config = placed("split_fp32_states", 2, 1, "host", ordered=True)
    found, wanted = {}, of_engine(config, 0, 1)[1]
    for way, look in LOOKS.items():
        made = sharded(config)
        steps(config, made, 0, 1)
        resident = made[2].resident
        assert resident.pending is not None
        for p in made[0].parameters():
            p.grad = None
        list(made[0].named_parameters())
        assert resident.pending is not None, "this reads no value"
        look(made)
        found[way] = "" if resident.pending is None else "the update still waits"
        own = gathered({n: p.detach() for n, p in made[0].named_parameters()})
        for name, value in own.items():
            if not torch.equal(value, wanted[f"weights of {name}"].to(value.dtype)):
                found[way] = name
    return answers(found)


def written(case: str) -> dict[str, str]:
    """Weights are written between a step and the next forward: masters are then what was written,
    and those that were swapped out and in are the same as before."""
    start()
    found = {}
    config = placed(case, 2, 1, "host", ordered=True)
    twin = real(placed(case, 2, 1, ordered=True))
    of_engine(config, 0, 2, twin)
    state = twin.state_dict()
    name = "layers.0.up.weight"
    local(state["low"][name]).zero_()
    local(state["weights"][name]).zero_()
    twin.load_state_dict(state)  # nodes take the masters
    wanted = of_engine(config, 2, 4, twin)

    @torch.no_grad()
    def zero(made: Made, step: int) -> None:
        if step == 1:
            dict(made[0].named_parameters())[name].zero_()

    @torch.no_grad()
    def swap(made: Made, step: int) -> None:
        before = [p.clone() for p in made[0].parameters()]
        for p in made[0].parameters():
            p.data.copy_(p.data * 2)
        made[0](*batch(99, 0, 0))
        made[1].state_dict()
        for p, old in zip(made[0].parameters(), before, strict=True):
            p.copy_(old)

    @torch.inference_mode()
    def evaluate(made: Made, step: int) -> None:
        made[0](*batch(99, 0, 0))

    for way, change in {"zero": zero, "swap": swap, "evaluate": evaluate}.items():
        made = sharded(config)
        done = steps(config, made, between=partial(change, made), last=4)
        if way == "zero":
            found[way] = unlike((done[2:], masters(made)), wanted)
        else:
            whole = of_engine(placed(case, 2, 1, ordered=True), 0, 4)
            found[way] = unlike((done, masters(made)), whole)
    return answers(found)


def dropped() -> str:
    """Gradients that a loop drops, all by the optimizer or the model, or some by hand."""
    start()
    config = placed("split_fp32_states", 2, 1, {"gradients": 2, "moments": 1}, ordered=True)
    made = sharded(config)
    model, found, optimizer = made
    for drop in (optimizer.zero_grad, model.zero_grad):
        model(*batch(77, 0, 0)).backward()
        found.clip_grad_norm_(1.0)
        drop()
    model(*batch(78, 0, 0)).backward()
    some = dict(model.named_parameters())["layers.1.up.weight"]
    whole = float(found.clip_grad_norm_(1.0))
    some.grad = None
    assert float(found.clip_grad_norm_(1.0)) < whole
    optimizer.zero_grad()
    outcome = steps(config, made), masters(made)
    wanted = of_engine(placed("split_fp32_states", 2, 1, ordered=True))
    return unlike(outcome, wanted) if asked() else ""


def clipped_twice() -> float:
    """The second call's norm, which leaves the first one's clipping."""
    start()
    config, made = placed("split", 2, 1, "host", ordered=True), list[Any]()
    for _ in range(2):
        model, found, optimizer = sharded(config)
        model(*batch(0, dist.get_rank(), 0)).backward()
        norm = found.clip_grad_norm_(0.25)
        assert norm > 0.25
        if made:
            norm = found.clip_grad_norm_(torch.inf)
        optimizer.step()
        made.append(masters((model, found, optimizer)))
    assert all(torch.equal(made[0][name], value) for name, value in made[1].items())
    return float(norm)


def whole_states() -> str:
    """What differs where a checkpoint holds whole tensors, which rank 0 loads."""
    start()
    config = placed("split", 2, 1, "host", ordered=True)
    made = sharded(config)
    steps(config, made, 0, 2)
    whole = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = dcp_state.get_state_dict(made[0], made[2], options=whole)
    again = sharded(config)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(again[0], kept[0], options=options)
    dcp_state.set_optimizer_state_dict(again[0], again[2], kept[1], options=options)
    again[1].load_state_dict(made[1].state_dict())
    return unlike(
        (steps(config, again, 2), masters(again)), (steps(config, made, 2), masters(made))
    )


def not_finite() -> list[str]:
    """A weight turns NaN before the third step: what is said, and whether anything has changed."""
    start()
    said = []
    some: list[Place] = ["device", "host", {"masters": 2, "gradients": 1}]
    for place in some:
        config = placed("split", 2, 1, place, ordered=True)
        made = sharded(config)
        steps(config, made, 0, 2)
        before = {n: t.clone() for n, t in masters(made).items()}
        mine = local(made[0].layers[1].up.weight)
        row = mine.detach()[0].clone()
        if dist.get_rank() == 0:
            mine.data[0] = torch.nan
        said.append(refused(lambda c=config, m=made: steps(c, m, 2, 3)))  # type: ignore[misc]
        made[2].zero_grad()
        if dist.get_rank() == 0:
            mine.data[0] = row
        after = masters(made)
        said[-1] += "".join(n for n, t in after.items() if not torch.equal(t, before[n]))
    return said


# ---------------------------------------------------------------------- refusals


def refusals() -> dict[str, str]:
    """What does not go together, by what is said."""
    start()
    config = placed("split_fp32_states", 1, 1, "host", ordered=True)
    rows = on(batch(0, 0, 0), build_uneven())
    found: dict[str, str] = {}

    def fresh(**more: Any) -> Any:
        model = build_uneven()
        how: dict[str, Any] = {"param_dtype": "bf16", "masters": "split", "place": "host"}
        return model, shard(model, "zero3", **how | more)

    model = fresh()[0]
    found["other optimizer"] = refused(torch.optim.SGD(model.parameters(), lr=0.1).step)
    found["forward first"] = refused(lambda: fresh()[0](*rows))
    found["graphed"] = refused(lambda: fresh()[1].graphed(lambda batch: batch))
    found["clip"] = refused(lambda: fresh()[1].adamw(clip=1.0))
    found["no clip"] = refused(lambda: fresh(clip_by="unit")[1].adamw())
    found["fp32"] = refused(lambda: fresh(masters="fp32"))
    found["param_dtype"] = refused(lambda: fresh(param_dtype="fp32"))
    found["weights"] = refused(lambda: fresh(place={"weights": 1}))
    found["budget"] = refused(lambda: fresh(gpu_gib=1.0))
    found["misspelled"] = refused(lambda: fresh(place="hots"))
    others = {"gather": "flatt", "steps": 0, "reduce_dtype": "fp64", "seed": 1.5}
    for name, value in (others | {"timeout_seconds": float("nan"), "cluster": "0x1"}).items():
        found[name] = refused(lambda n=name, v=value: fresh(**{n: v}))  # type: ignore[misc]
    found["no place"] = refused(lambda: fresh(place=None))
    found["no plane"] = refused(lambda: fresh(place={"moment": 1}))
    found["rate"] = refused(lambda: fresh()[1].adamw(lr=-1.0))
    found["unit's clip"] = refused(lambda: fresh(clip_by="unit")[1].adamw(clip=-1.0))
    found["flag"] = refused(lambda: fresh(place={"moments": True}))
    model, own = fresh()
    group = {"params": [*model.parameters()], "weight_deacy": 0.0}
    found["misspelled key"] = refused(lambda: own.adamw([group]))
    model, own = fresh()
    model.head.requires_grad_(False)
    optimizer = own.adamw()
    model.head.requires_grad_(True)
    model(*rows).backward()
    found["thawed"] = refused(lambda: own.clip_grad_norm_(1.0))
    bare = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    found["no state"] = refused(lambda: optimizer.load_state_dict(bare))
    model = build_uneven().bfloat16().requires_grad_(False)
    own = shard(model, "zero3", optimizer_state="8bit")
    model.head.requires_grad_(True)
    found["bf16 masters"] = refused(own.adamw)
    states = fresh(optimizer_state="bf16")[1].adamw().state_dict()
    optimizer = fresh(optimizer_state="bf16", masters="fp32", place="device")[1].adamw()
    found["more state"] = refused(lambda: optimizer.load_state_dict(states))

    model = build_uneven()
    assert type(shard(model, "zero3").adamw()) is torch.optim.AdamW
    model, own, optimizer = sharded(config)
    model(*rows).backward()
    found["torch's clipping"] = refused(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    found["a look"] = refused(lambda: model.head.weight.grad.norm())
    found["limit"] = refused(lambda: own.clip_grad_norm_(-1.0))
    found["NaN limit"] = refused(lambda: own.clip_grad_norm_(float("nan")))
    own.clip_grad_norm_(1.0)
    for name, value in {"rate": float("nan"), "rate below 0": -1.0}.items():
        optimizer.param_groups[0]["lr"] = value
        found[f"{name}, later"] = refused(optimizer.step)
    found["state set"] = refused(lambda: setattr(optimizer, "state", {}))
    found["clipped early"] = refused(lambda: model(*rows))
    found["twice"] = refused(own.adamw)
    assert isinstance(optimizer.resident, LoopResident)

    model, own = fresh(place="device")
    optimizer = own.adamw()
    model(*rows).backward()
    own.clip_grad_norm_(1.0)
    model.head.weight.grad.mul_(2)
    found["changed then"] = refused(optimizer.step)

    optimizer.param_groups[0]["maximize"] = True
    model.head.weight.grad = None
    found["torch's key"] = refused(optimizer.step)

    for step in ("before", "after"):  # a step
        model, own = fresh(place="device")
        optimizer = own.adamw()
        if step == "after":
            model(*rows).backward()
            optimizer.step()
        model.half()
        found[f"halved {step}"] = refused(lambda m=model: m(*rows))  # type: ignore[misc]
    model, own = fresh(place="device")
    optimizer = own.adamw()
    model(*rows).backward()
    model.half()
    found["halved then"] = refused(optimizer.step)

    model, own = fresh(place={"gradients": 3})
    optimizer = own.adamw()
    loss = model(*rows)
    loss.backward(retain_graph=True)
    own.clip_grad_norm_(1.0)
    loss.backward()
    found["backward then"] = refused(optimizer.step)

    unit = clipped("split_fp32_states", 1, 1, "host", 0.01, "unit")
    model, own, optimizer = sharded(unit)
    model(*rows).backward()
    found["unit clips"] = refused(lambda: own.clip_grad_norm_(1.0))
    found["unit twice"] = refused(lambda: model(*rows))
    before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    found["unit's rate"] = refused(optimizer.step)
    optimizer.param_groups[0]["lr"] = before
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    found["unit's own gradient"] = refused(optimizer.step)
    model, own = fresh(clip_by="unit")
    model.head.requires_grad_(False)
    optimizer = own.adamw(clip=1.0)
    model.head.requires_grad_(True)
    model(*rows).backward()
    found["unit thawed"] = refused(optimizer.step)
    return found
