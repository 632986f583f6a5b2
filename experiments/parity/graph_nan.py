"""Plants values that are not finite while steps come from a CUDA graph, and while they do not.

    torchrun --standalone --nproc-per-node 2 experiments/parity/graph_nan.py --out OUT --cluster 1x2

Both must end the step with the same error on all ranks and change no weight, optimizer state or
residual; with the value put back both must go on to the same bits. OUT/nan-1x2.json has a line for
each plant. `graph_faults.py` starts this.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from lab import SHAPES, Lab, configured, free
from torch import Tensor

from zpp_lab.api import init
from zpp_lab.engines.base import NonFiniteError
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.optim.shards import local
from zpp_lab.train.launch.place import die_with_parent

BEFORE, AFTER = 6, 4  # steps before a plant, and after the value is back
PLANTS: dict[str, tuple[int, str, float]] = {  # rank, parameter, value
    "nan": (0, "layers.0.mlp.w_up.weight", math.nan),
    "inf": (1, "layers.1.mlp.w_down.weight", math.inf),
    "overflow": (1, "head.weight", 3e38),  # of a gradient or the norm, behind a finite weight
}
CASES = {
    "1x2": ("zero3", "zeropp", "zeropp_every", "memory_fp32"),
    "2x1": ("zero3", "zeropp", "memory_loco", "differences"),
}
SHAPE = SHAPES["tiny"]


def states(engine: FsdpEngine) -> dict[str, Tensor]:
    """Copies of what this rank holds of weights, optimizer states and residuals. `state_dict` would
    give the graph's memory back."""
    found = {n: local(p) for n, p in engine.parameters.items()}
    for name, p in engine.parameters.items():
        named = engine.optimizer.state[p].items()
        found |= {f"{key} of {name}": local(t) for key, t in named if isinstance(t, Tensor)}
    found |= {f"memory of {key}": t for key, t in engine.memories.old.items()}
    return {n: t.detach().clone() for n, t in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names whose bits differ."""
    bits = {n: t.contiguous().view(-1).view(torch.uint8) for n, t in b.items()}
    mine = {n: t.contiguous().view(-1).view(torch.uint8) for n, t in a.items()}
    return [n for n in {**mine, **bits} if n not in mine or not mine[n].equal(bits[n])]


def tried(lab: Lab, case: str, cluster: Any, graph: bool, plant: str) -> dict[str, Any]:
    """What came of one plant: the error, what it has changed, and the steps before and after."""
    config = configured(case, cluster)
    config = replace(config, engine=replace(config.engine, graph="auto" if graph else False))
    engine = lab.real(SHAPE, config)
    rank, name, value = PLANTS[plant]
    done: list[Any] = []

    def step(number: int) -> None:
        result = engine.step(number, 1e-3, partial(lab.batch, SHAPE, number), False)
        done.append((result.loss, result.grad_norm, sorted(result.bytes.items())))

    for number in range(BEFORE):
        step(number)
    replays = engine.graph.replays
    weight, good = local(engine.parameters[name]), None
    engine.kept.wait()  # new weights are still being encoded from it
    if lab.rank == rank:
        good = weight.detach().view(-1)[:3].clone()
        with torch.no_grad():
            weight.view(-1)[:3] = value
    said, changed, last = "", [""], BEFORE
    while not said and last < BEFORE + 3:  # a replica gets the value with the next update
        before = states(engine)
        try:
            step(last)
            last += 1
        except NonFiniteError as error:
            said, changed = str(error), same(before, states(engine))
    if good is not None:
        with torch.no_grad():
            weight.view(-1)[:3] = good
    went_on = last == BEFORE  # else other ranks have it by now
    for number in range(last, last + AFTER if went_on else last):
        step(number)
    mine = {"said": said, "changed": changed, "replayed": replays > 0, "steps": done}
    mine |= {"at": last, "after": engine.graph.replays - replays if went_on else None}
    ends = {n: t.cpu() for n, t in states(engine).items()}
    every: list[Any] = [None] * lab.world
    dist.all_gather_object(every, (said, changed))
    mine["ranks"] = [list(each) for each in every]
    return mine | {"ends": ends}


def problem(plain: dict[str, Any], replayed: dict[str, Any], cuda: bool) -> str:
    """What is wrong with the two; "" for nothing."""
    for how, found in (("eager", plain), ("graph", replayed)):
        if not found["said"]:
            return f"{how}: no error"
        if any(each != [found["said"], []] for each in found["ranks"]):
            return f"{how}: {found['ranks']}"
    if plain["replayed"] or replayed["replayed"] != cuda:
        return f"replayed: {plain['replayed']} eager, {replayed['replayed']} graph"
    if cuda and replayed["after"] == 0:
        return "no replay after the error"
    for key in ("said", "at", "steps"):
        if plain[key] != replayed[key]:
            return f"{key}: {plain[key]} eager, {replayed[key]} graph"
    return ", ".join(same(plain["ends"], replayed["ends"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    die_with_parent()
    device = init("gloo" if args.cpu else None)
    lab = Lab(device, args.out)
    lab.only = [args.cluster]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    rows = []
    for case in CASES[args.cluster]:
        for plant in PLANTS:
            found = []
            for on in (False, True):
                found.append(tried(lab, case, lab.clusters()[0], on, plant))
                free()
            every: list[Any] = [None] * lab.world
            dist.all_gather_object(every, problem(*found, device.type == "cuda"))
            wrong = next(filter(None, every), "")
            rows.append({"case": case, "plant": plant, "said": found[1]["said"], "problem": wrong})
            if lab.rank == 0:
                args.out.mkdir(parents=True, exist_ok=True)
                text = json.dumps(rows, indent=1) + "\n"
                (args.out / f"nan-{args.cluster}.json").write_text(text)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
