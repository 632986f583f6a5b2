"""Steps from real CUDA graphs on GPUs, over peer memory and NCCL. An answer is a line of JSON.

torchrun --standalone --nproc-per-node 2 -m tests.engines.graph_world ANSWERS (or 4)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.utils import deterministic

from tests.engines import graphed_jobs
from tests.engines.graph_jobs import (
    NAMES,
    OWN,
    Runs,
    equal,
    fails,
    made,
    not_finite,
    one_rank_differs,
)
from zpp_lab.api import init
from zpp_lab.collectives.peer.choose import Choice, connect
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.models import build_model

MODEL = ModelConfig(dim=96, layers=2, heads=4, kv_heads=2, ffn=150)
# nodes of one host that reach each other's memory send new weights over it, beside the graph
BETWEEN = ("residual_differences", "zeropp")
WORLDS: dict[int, list[tuple[int, int, Choice, Sequence[str]]]] = {
    2: [
        (1, 2, "peer", NAMES),
        (2, 1, "groups", NAMES),
        (2, 1, "peer", BETWEEN),
    ],
    4: [
        (1, 4, "peer", ("zero3", "stochastic_secondary", "memory_last", "phases")),
        (1, 4, "groups", ("zeropp",)),
        (2, 2, "peer", BETWEEN),
        (2, 2, "groups", ("zeropp", "stochastic_secondary", *OWN)),
    ],
}
if torch.cuda.device_count() == 1:  # emulated nodes share it
    WORLDS[2] = [world for world in WORLDS[2] if world[1:3] == (1, "groups")]
FAILS = ("alone", "forward", "backward")
ALONE = ("one rank differs", "one rank differs ahead", "not finite")
GRAPHED = ("drawn", "residual", "differences")  # of tests/engines/graphed_jobs.py


def fits(case: str, nodes: int, local: int) -> bool:
    """Whether the cluster has every wire of a case, in each phase."""
    try:
        for phase in made(case, nodes, local).phases:
            Recipe.of(phase.config)
    except ValueError:
        return False
    return True


def names(ranks: int) -> list[str]:
    """The name of every answer of `main`."""
    cases = [
        f"{case} on {nodes}x{local} {choice}"
        for nodes, local, choice, some in WORLDS[ranks]
        for case in some
        if fits(case, nodes, local)
    ]
    return [*cases, *FAILS, *ALONE, *(f"graphed {name}" for name in GRAPHED)]


def main() -> None:
    device = init()
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def keep(name: str, job: Callable[[], Any]) -> None:
        found = job()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(json.dumps([name, found]) + "\n")

    ranks = dist.get_world_size()
    for nodes, local, choice, some in WORLDS[ranks]:
        transport = connect(ClusterConfig(nodes, local), Watchdog(30.0), choice, device)
        model = partial(build_model, MODEL, 37, device=str(device), seed=3)
        runs = Runs(transport, device, model)
        for case in some:
            if fits(case, nodes, local):
                job = partial(equal, case, runs, nodes, local, device="cuda")
                keep(f"{case} on {nodes}x{local} {choice}", job)
        if (nodes, choice) == (2, "groups"):
            config = made("residual_differences", nodes, local, device="cuda")
            usual = made("zeropp", nodes, local, device="cuda")
            keep(ALONE[0], partial(one_rank_differs, runs, config))
            keep(ALONE[1], partial(one_rank_differs, runs, usual))
            keep(ALONE[2], partial(not_finite, runs, usual))
            for at in FAILS:
                keep(at, partial(fails, runs, config, at))
    for name in GRAPHED:
        more = {"transport": "groups"}
        keep(
            f"graphed {name}", partial(graphed_jobs.equal, name, f"2x{ranks // 2}", device, **more)
        )
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # groups that are torn down may abort


if __name__ == "__main__":
    main()
