"""What others' loops do to a model besides steps, run on every rank of a world: swapped and loaded
weights, methods in place of forward, optimizers of their own, frozen layers, experts, states in any
order."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loop_base import (
    STEPS,
    WORLD,
    Net,
    data,
    everyone,
    gathers_masters,
    new,
    refused,
    train,
    whole,
)
from zpp_lab.api import Sharded
from zpp_lab.engines.optim.shards import local

KEPT = ("amsp_node", "w4_diff", "sdp4bit")
ENDS = ("zero3", "amsp_node", "loco", "w8_then_w4")
MICRO = ("w4_diff", "loco")
CALLED = ("zero3_reordered", "amsp_node", "w8_then_w4", "loco")
FROZEN = ("zero3", "zeropp", "amsp_node")
INTEGERS = ("zero3_reordered", "zeropp", "w4_diff")
BF16 = ("zeropp", "w4_diff")
RESUMED = (*KEPT, "w8_then_w4")
APART = ("zero3", "zeropp")

# ---------------------------------------------------------------------- weights that change


def copied(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for p in model.parameters():
        p.copy_(change(p))


def through_data(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for p in model.parameters():
        p.data.copy_(change(p.data))


def shards_alone(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    own = [local(p) for p in model.parameters()]
    torch._foreach_copy_(own, [change(t) for t in own])


def loaded(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    given = {n: change(t) for n, t in dcp_state.get_model_state_dict(model).items()}
    dcp_state.set_model_state_dict(model, given)


def flipped(t: Tensor) -> Tensor:
    """The signs of two elements, where this rank has as many."""
    t = t.clone()
    local(t).view(-1)[:2].neg_()
    return t


WAYS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "copy": (copied, torch.zeros_like),
    "data": (through_data, lambda t: t * 0.5),
    "foreach": (shards_alone, lambda t: t + 1),
    "load_state_dict": (loaded, lambda t: t * 2),
    "rows": (shards_alone, lambda t: t.flip(0)),
    "signs": (shards_alone, flipped),
}


def swapped(name: str) -> dict[str, Any]:
    """Weights are swapped in, evaluated and swapped out between all steps. Losses with and without
    that, and by way whether an evaluation had the swapped ones."""
    model, sharded, optimizer = new(name)
    quiet = train(model, optimizer)
    model, sharded, optimizer = new(name)
    right = {}

    @torch.no_grad()
    def evaluated(step: int, ways: Any) -> None:
        for way in ways:
            before = [local(p).clone() for p in model.parameters()]
            change, by = WAYS[way]
            change(model, by)
            right[way] = gathers_masters(model)
            for p, own in zip(model.parameters(), before, strict=True):
                local(p).copy_(own)
            model(data(98))

    names, printed = list(WAYS), StringIO()
    with redirect_stderr(printed):
        losses = train(model, optimizer, between=lambda s: evaluated(s, names[s::STEPS]))
    state = sharded.state_dict()
    told = printed.getvalue().count("zpp_lab.shard: weights")
    return {
        "losses": [quiet, losses],
        "right": everyone(right),
        "step": state["step"],
        "told": told,
    }


def averaged(name: str) -> list[Any]:
    """The same with torch's AveragedModel, whose weights the next steps then go on from."""
    model, _, optimizer = new(name)
    average = AveragedModel(whole(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    found = []

    def follow(step: int) -> None:
        average.update_parameters(whole(model))
        dcp_state.set_model_state_dict(
            model,
            average.module.state_dict(),
            options=dcp_state.StateDictOptions(full_state_dict=True),
        )
        given = {n: p.clone() for n, p in average.module.state_dict().items()}
        new = {n: p.full_tensor() for n, p in model.state_dict().items()}
        found.append(gathers_masters(model) and all(given[n].equal(p) for n, p in new.items()))

    train(model, optimizer, between=follow)
    return everyone(found)


class Own:
    """An optimizer that torch does not know."""

    sharded: Sharded

    def __init__(self, model: Any, way: str) -> None:
        self.model, self.way = model, way

    @torch.no_grad()
    def step(self) -> None:
        for p in self.model.parameters():
            if self.way == "data":
                p.data.sub_(0.1 * p.grad)
            else:
                local(p).sub_(local(p.grad), alpha=0.1)
        if self.way == "told":
            self.sharded.step()

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None if self.way == "none" else p.grad.zero_()


def optimizers(name: str) -> dict[str, Any]:
    """By kind of optimizer losses of some steps, their number, and whether the next forward
    computes with the masters that the last step left."""
    found: dict[str, Any] = {}
    kinds: dict[str, Callable[[Any], Any]] = {
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False),
        "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True),
        "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True),
        "zeroed": lambda m: Own(m, "zeroed"),
        "data": lambda m: Own(m, "data"),
        "none": lambda m: Own(m, "none"),
        "told": lambda m: Own(m, "told"),
    }
    for kind, make in kinds.items():
        model, sharded, _ = new(name)
        optimizer = make(model)
        optimizer.sharded = sharded
        losses = train(model, optimizer)
        found[kind] = [losses, sharded.state_dict()["step"], everyone(gathers_masters(model))]
    return found


def own_among_micro_steps(name: str) -> list[Any]:
    """Two micro-steps, by torch and by an optimizer of one's own."""
    found = []
    for make in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False),
        lambda m: Own(m, "zeroed"),
    ):
        model, sharded, _ = new(name)
        found.append([train(model, make(model), micros=2), sharded.state_dict()["step"]])
    return found


# ---------------------------------------------------------------------- forwards


class Pair(nn.Module):
    """A container whose parts are called one after the other, and never itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Net(root=False).layers

    def score(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def forwards(name: str) -> dict[str, Any]:
    """Losses and steps by what is called: forward, a method, a method of a root without
    parameters, and units alone; between steps a method that calls forward several times."""
    found: dict[str, Any] = {}
    for root in (True, False):
        model, sharded, optimizer = new(name, model=partial(Net, root))
        found[f"forward {root}"] = [train(model, optimizer), sharded.state_dict()["step"]]
        model, sharded, optimizer = new(name, model=partial(Net, root))
        register_fsdp_forward_method(model, "score")
        losses = train(model, optimizer, forward=model.score)
        found[f"method {root}"] = [losses, sharded.state_dict()["step"]]
    model, sharded, optimizer = new(name, model=Pair)
    found["units"] = [train(model, optimizer, forward=model.score), sharded.state_dict()["step"]]
    model, sharded, optimizer = new(name)
    model.generate = lambda x: [model(x + i) for i in range(3)]
    register_fsdp_forward_method(model, "generate")

    @torch.no_grad()
    def generated(step: int) -> None:
        model.generate(data(step))

    losses = train(model, optimizer, between=generated)
    found["generate"] = [losses, sharded.state_dict()["step"]]
    model, sharded, optimizer = new(name)

    def unsharded(step: int) -> None:
        model.unshard()
        model.reshard()

    found["unshard"] = [train(model, optimizer, between=unsharded), sharded.state_dict()["step"]]
    return found


def two_forwards(name: str) -> list[Any]:
    """Two forwards before one backward: one micro-step."""
    model, sharded, optimizer = new(name)
    for step in range(2):
        (model(data(step)) + model(data(step + 50))).backward()
        micro = sharded.wrapped.clock.micro
        optimizer.step()
        optimizer.zero_grad()
    return [micro, sharded.state_dict()["step"]]


def raised(name: str) -> list[Any]:
    """An exception ends a backward: what the optimizer and the next forward say, and the losses
    where the loop gives the step up, and of an undisturbed loop."""
    model, _, optimizer = new(name)
    losses = train(model, optimizer, range(1))

    def fail(gradient: Tensor) -> None:
        raise KeyError

    def hook(module: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.layers[0].register_forward_hook(hook)
    said = refused(lambda: model(data(70)).backward(), KeyError)
    handle.remove()
    optimizer.zero_grad()
    said += refused(optimizer.step, ValueError) + refused(lambda: model(data(1)), ValueError)
    if not hasattr(model, "reset_iter_state"):  # before torch 2.13
        return [said, [], []]
    model.reset_iter_state()
    losses += train(model, optimizer, range(1, STEPS))
    return [said, losses, train(*new(name)[::2])]


def inference(name: str) -> list[Any]:
    """An evaluation in inference_mode before the first step, and between steps."""

    def before() -> None:
        model, _, _ = new(name)
        with torch.inference_mode():
            model(data(0))

    losses = []
    for mode in (nullcontext, torch.inference_mode, torch.no_grad):
        model, _, optimizer = new(name)

        def between(step: int, model: Any = model, mode: Any = mode) -> None:
            with mode():
                mode is nullcontext or model(data(99))

        losses.append(train(model, optimizer, between=between))
    return [refused(before, RuntimeError), losses]


# ---------------------------------------------------------------------- gradients


class Experts(nn.Module):
    """Ranks send tokens to experts of their own once `apart`; `shapes`: the experts differ."""

    def __init__(self, shapes: bool = False) -> None:
        super().__init__()
        wide = (8, 16) if shapes else (8, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({str(i): nn.Linear(8, w) for i, w in enumerate(wide)}) for _ in "ab"
        )
        for layer in self.layers:
            layer.forward = partial(self.chosen, layer)  # type: ignore[method-assign]
        self.apart, self.turn, self.detached = True, 0, False

    def chosen(self, experts: Any, x: Tensor) -> Tensor:
        place = str((dist.get_rank() + self.turn) % 2 if self.apart else 0)
        y = experts[place](x)[:, :8]
        return y.detach() + 0 * x if self.detached and experts is self.layers[1] else y

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


KINDS = ("at_once", "later", "turns", "alone")
CASES = tuple(f"{kind}, {shapes}" for kind in KINDS for shapes in (False, True))


def experts(name: str, *cases: str) -> dict[str, Any]:
    """By case (all, unless some are named) each rank's error."""

    def at_once(shapes: bool) -> None:
        model, _, optimizer = new(name, model=partial(Experts, shapes))
        train(model, optimizer)

    def later(shapes: bool) -> None:
        model, _, optimizer = new(name, model=partial(Experts, shapes))

        def between(step: int) -> None:
            model.apart = step > 0

        model.apart = False
        train(model, optimizer, between=between)

    def turns(shapes: bool) -> None:  # each rank uses both, in other micro-steps
        model, _, optimizer = new(name, model=partial(Experts, shapes))
        model.apart = False
        train(model, optimizer, range(1))
        model.apart = True
        for model.turn in (0, 1):
            model(data(0)).backward()
        optimizer.step()

    def alone(shapes: bool) -> None:  # others have none in the last unit
        model, _, optimizer = new(name, model=partial(Experts, shapes))
        model.apart = False
        train(model, optimizer, range(1))
        model.detached = dist.get_rank() > 0
        train(model, optimizer)

    found = {
        f"{job.__name__}, {shapes}": refused(partial(job, shapes), ValueError)
        for job in (at_once, later, turns, alone)
        for shapes in (False, True)
        if f"{job.__name__}, {shapes}" in (cases or CASES)
    }

    def filled() -> None:
        model, _, optimizer = new(name, model=Experts)
        model.set_reduce_scatter_unused_params(True)
        train(model, optimizer)

    if not cases and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        found["filled"] = refused(filled, ValueError)
    return found


def frozen_parts(name: str) -> dict[str, Any]:
    """Of a loop that trains the head first, all from step 1 on, and not the head from step 3 on, by
    where the layers were frozen: losses, steps, and step by step bytes and what has moved."""
    cases = ((False, "fp32"), (True, "fp32"), (True, "bf16"))
    return {f"{early}, {dtype}": in_parts(name, early, dtype) for early, dtype in cases}


def in_parts(name: str, early: bool, dtype: str) -> dict[str, Any]:
    model, sharded, optimizer = new(name, model=headed if early else Net, param_dtype=dtype)
    moved, sent = [], []
    before: dict[str, Tensor] = {}

    def look(step: int) -> None:
        sent.append(sum(map(sum, sharded.bytes.values())))
        sharded.reset_bytes()
        own = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
        moved.append(sorted({n[:4] for n in own if before and not own[n].equal(before[n])}))
        before.update(own)
        model.layers.requires_grad_(True)
        model.head.requires_grad_(step < 2)

    model.layers.requires_grad_(False)
    losses = train(model, optimizer, range(5), between=look)
    state = sharded.state_dict()["step"]
    return {"losses": losses, "moved": moved, "sent": sent, "step": state}


def frozen_alone() -> list[Any]:
    """The same in bf16 on one rank, where FSDP2 reduces nothing."""
    WORLD.shape = "1x1"
    return [in_parts("zero3", early, "bf16") for early in (False, True)]


def headed() -> Net:
    made = Net()
    made.layers.requires_grad_(False)
    return made


def unfrozen_within(name: str) -> list[Any]:
    def job() -> None:
        model, _, _ = new(name, model=headed)
        model(data(0)).backward()
        model.layers.requires_grad_(True)
        model(data(1)).backward()

    return refused(job, ValueError)


def collected(name: str) -> list[list[str]]:
    """Each rank's error where a sharded model is collected while an optimizer's hooks run."""

    def job() -> None:
        new(name)
        hook = register_optimizer_step_post_hook(lambda *_: [gc.collect()])
        try:
            model, _, optimizer = new(name)
            train(model, optimizer)
        finally:
            hook.remove()

    return refused(job, RuntimeError)


# ---------------------------------------------------------------------- dtypes


class Quantized(nn.Linear):
    """A layer with frozen codes, as a parameter or as a buffer."""

    def __init__(self, dtype: torch.dtype, parameter: bool) -> None:
        super().__init__(8, 8)
        codes = torch.arange(13 * 8, dtype=dtype).view(13, 8)
        if parameter:
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.codes[:8].to(x.dtype) / 64


def integers(name: str) -> dict[str, Any]:
    """Losses with codes that are sharded and sent, and with the same in buffers; bytes of both.
    Where this torch shards no integers, each rank's error."""
    found: dict[str, Any] = {}
    for dtype in (torch.uint8, torch.int32):
        found[str(dtype)] = []
        for parameter in (True, False):

            def made(dtype: torch.dtype = dtype, parameter: bool = parameter) -> Net:
                model = Net()
                model.layers = nn.ModuleList(Quantized(dtype, parameter) for _ in range(2))
                return model

            said = refused(partial(new, name, model=made), ValueError) if parameter else [[""]]
            if said[0][0]:
                del found[str(dtype)]
                found[f"{dtype} refused"] = said
                break
            model, sharded, optimizer = new(name, model=made)
            losses = train(model, optimizer)
            found[str(dtype)].append([losses, sum(map(sum, sharded.bytes.values()))])
    return found


def bf16(name: str) -> list[Any]:
    """A model in bf16, left alone, told so, and told otherwise: what it says, and its losses."""
    found = []
    for more in ({}, {"param_dtype": "bf16"}, {"param_dtype": "fp32"}):
        printed = StringIO()
        with redirect_stderr(printed):
            model, sharded, _ = new(name, model=lambda: Net().bfloat16(), **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        losses = train(model, optimizer, forward=lambda x, m=model: m(x.to(m.head.weight.dtype)))
        said = re.findall(r"computes in (\w+)", printed.getvalue())
        found.append([losses, everyone(said)[0], str(sharded.plan.recipe.weights_dtype)])
    return found


def converted(name: str) -> dict[str, list[list[str]]]:
    """Each rank's error where the model is converted after `shard`, by where that is seen."""

    def case(where: str) -> None:
        model, sharded, optimizer = new(name, param_dtype="bf16")
        if where == "at first":
            model.double()
        train(model, optimizer, range(1))
        loss = model(data(1))
        if where == "step":
            loss.backward()
        (model.layers[0] if where == "a layer" else model).double()
        ends = {"state": sharded.state_dict, "step": optimizer.step, "backward": loss.backward}
        with torch.set_grad_enabled(where != "evaluation"):
            ends.get(where, lambda: model(data(1)))()

    wheres = ("at first", "a layer", "forward", "evaluation", "backward", "step", "state")
    return {where: refused(partial(case, where), ValueError) for where in wheres}


# ---------------------------------------------------------------------- states


class App:
    """As torch's tutorial of distributed checkpoints has it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.parts = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, states = dcp_state.get_state_dict(*self.parts)
        return {"model": weights, "optimizer": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dcp_state.set_state_dict(
            *self.parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def in_one(app: App, sharded: Sharded, path: Path) -> None:
    state = app.state_dict()
    dcp.load({"app": state, "sharded": sharded}, checkpoint_id=path)
    app.load_state_dict(state)


def in_turn(first: str, app: App, sharded: Sharded, path: Path) -> None:
    parts = {"app": app, "sharded": sharded}
    for name in (first, *(parts.keys() - {first})):
        dcp.load({name: parts[name]}, checkpoint_id=path)


def stateful(app: App, sharded: Sharded, path: Path) -> None:
    dcp.load({"sharded": sharded, "app": app}, checkpoint_id=path)


def evaluated_between(app: App, sharded: Sharded, path: Path) -> None:
    dcp.load({"sharded": sharded}, checkpoint_id=path)
    with torch.no_grad():
        sharded.model(data(99))
    dcp.load({"app": app}, checkpoint_id=path)


def twice(app: App, sharded: Sharded, path: Path) -> None:
    in_turn("app", app, sharded, path)
    sharded.model(data(0)).backward()
    app.parts[1].step()
    app.parts[1].zero_grad()
    in_turn("sharded", app, sharded, path)


ORDERS = {
    "in one": in_one,
    "weights first": partial(in_turn, "app"),
    "sharded first": partial(in_turn, "sharded"),
    "stateful": stateful,
    "evaluated between": evaluated_between,
    "twice": twice,
}


def resumed(name: str, folder: str) -> dict[str, Any]:
    """The losses after a checkpoint: of the run that wrote it, and by order of loading."""
    path, found = Path(folder, name), {}
    model, sharded, optimizer = new(name)
    train(model, optimizer)
    dcp.save({"app": App(model, optimizer), "sharded": sharded}, checkpoint_id=path)
    found["on"] = train(model, optimizer, range(STEPS, 2 * STEPS))
    for order, load in ORDERS.items():
        model, sharded, optimizer = new(name, seed=7)
        load(App(model, optimizer), sharded, path)
        found[order] = train(model, optimizer, range(STEPS, 2 * STEPS))
    model, sharded, optimizer = new(name, seed=7)
    dcp.load({"sharded": sharded}, checkpoint_id=path)
    if name in ("w4_diff", "sdp4bit"):
        found["of others"] = refused(lambda: train(model, optimizer), ValueError)
    return found
