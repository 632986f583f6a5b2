"""What tests ask of DeepSpeed's engine; run on every rank of a gloo world."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.engines.uneven import batch as uneven_batch
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch
from zpp_lab.engines.build import build_engine

CPU = torch.device("cpu")
VOCAB, LR = 37, 1e-2
SMALL = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab_size": VOCAB}


def config(name: str, **groups: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": {**SMALL, **groups.pop("model", {})},
        "cluster": {"nodes": 1, "gpus_per_node": 2},
        "train": {"lr": LR, "clip": 0.5, "batch_size": 2, **groups.pop("train", {})},
        "engine": {"name": name, "device": "cpu"},
        **groups,
    }
    return load(Config, values)


def batch(step: int, rank: int, micro: int) -> Batch:
    inputs, targets = uneven_batch(step, rank, micro)
    return inputs % VOCAB, targets % VOCAB


def engine(name: str, **groups: dict[str, Any]) -> Any:
    return build_engine(config(name, **groups), VOCAB, CPU)


def losses(trained: Any, first: int, last: int) -> list[float]:
    done = [trained.step(s, LR, partial(batch, s), False) for s in range(first, last)]
    return [r.loss for r in done]


def both(**groups: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Losses of four steps, and how far the first weights are apart."""
    theirs, ours = (engine(name, **dict(groups)) for name in ("deepspeed", "fsdp"))
    state = theirs.state_dict().get("weights", {})
    far = [
        float((state[n] - p.full_tensor()).abs().max()) if state else 0.0 * p.full_tensor().sum()
        for n, p in ours.parameters.items()
    ]
    return losses(theirs, 0, 4), losses(ours, 0, 4), float(max(far))


def norms() -> tuple[list[float], list[float], Any]:
    results = [
        [trained.step(s, LR, partial(batch, s), False) for s in range(3)]
        for trained in (engine("deepspeed"), engine("fsdp"))
    ]
    theirs, ours = ([r.grad_norm for r in rows] for rows in results)
    return theirs, ours, results[0][0].bytes


def evaluation() -> list[float]:
    theirs, ours = engine("deepspeed"), engine("fsdp")
    for trained in (theirs, ours):
        losses(trained, 0, 2)
    held = [batch(90 + i, 0, 0) for i in range(3)]
    found = [theirs.evaluate(2, held, wire=True), ours.evaluate(2, held, wire=True)]
    losses(theirs, 2, 3)  # training goes on after an evaluation
    again = engine("deepspeed")
    losses(again, 0, 2)
    return [*found, again.evaluate(2, held, wire=False)]


def shared(state: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's state on every rank, as its file brings it."""
    held = [state]
    torch.distributed.broadcast_object_list(held)
    return held[0]


def resume() -> tuple[list[float], list[float]]:
    settings = {"train": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}
    first = engine("deepspeed", **settings)
    losses(first, 0, 2)
    state = shared(first.state_dict())
    second = engine("deepspeed", **settings)
    losses(second, 5, 6)  # whatever it has learnt is forgotten
    second.load_state_dict(state)
    return losses(first, 2, 4), losses(second, 2, 4)


def exchange() -> tuple[list[float], list[float]]:
    theirs, ours = engine("deepspeed"), engine("fsdp")
    losses(theirs, 0, 2)
    ours.load_state_dict(shared(theirs.state_dict()))
    return losses(theirs, 2, 4), losses(ours, 2, 4)


def refused() -> list[str]:
    trained, said = engine("deepspeed"), []
    losses(trained, 0, 1)
    state = shared(trained.state_dict())
    name = next(iter(state["weights"]))
    other = {**state, "weights": {**state["weights"], "more": torch.zeros(1)}}
    steps = {**state["optimizer"]["step"], name: torch.tensor(7.0)}
    uneven = {**state, "optimizer": {**state["optimizer"], "step": steps}}
    for wrong in (other, uneven):
        try:
            trained.load_state_dict(wrong)
        except ValueError as error:
            said.append(str(error))
    try:
        engine("deepspeed", recipe={"weights": {"bits": 8}})
    except ValueError as error:
        said.append(str(error))
    return said


def run_jobs() -> dict[str, Any]:
    half = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    return {
        "fp32": both(),
        "bf16": both(train=half),
        "tied_checkpointed": both(model={"tied_head": True, "checkpoint_activations": True}),
        "accumulated": both(train={"micro_steps": 2}),
        "norms": norms(),
        "evaluation": evaluation(),
        "resume": resume(),
        "exchange": exchange(),
        "refused": refused(),
    }
