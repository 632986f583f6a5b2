"""Does the real engine give the virtual engine's bits on GPUs, again and again, and at what cost?

    torchrun --standalone --nproc-per-node 4 experiments/parity/run.py --out results

    table   every recipe of tests/engines/fsdp_parity.py, 20 steps, both engines, clusters 1 × W
            and 2 × W/2 by the shape of the process groups: losses, norms, bytes, held-out
            losses and final weights must be equal bit for bit
    race    many steps of one recipe with everything overlapped, twice: equal bit for bit
    cost    median step time of plain FSDP2, of zero3 through our collectives
            (engine.ordered=true), and of zeropp, in turns
    profile how much of transfers and codecs runs beside the model's own kernels

Without GPUs it runs on the CPU over gloo. Deterministic kernels in `table` and `race`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from lab import SHAPES, Lab, applies, configured, free
from speed import cost, profile

from tests.engines.fsdp_parity import CASES, differs
from zpp_lab.api import init
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.train.launch.place import die_with_parent


def table(lab: Lab, sizes: list[str], cases: list[str], steps: int) -> bool:
    """Parity of every case; virtual runs are shared out over the ranks."""
    found: dict[str, str] = {}
    for size in sizes:
        for cluster in lab.clusters():
            names = [c for c in cases if applies(c, cluster)]
            for first in range(0, len(names), lab.world):  # as many cases as there are ranks
                some = names[first : first + lab.world]
                found |= _some_cases(lab, size, cluster, some, steps)
                lab.keep("table", found)  # what is known, should time end here
            here = f"{size} {lab.shape(cluster)}"
            same = sum(not v for k, v in found.items() if k.startswith(f"{here} "))
            lab.say(f"table {here}: {same} of {len(names)} recipes bit-equal")
    wrong = {k: v for k, v in found.items() if v}
    for key, text in wrong.items():
        lab.say(f"DIFFERS {key}: {text}")
    eager = [key for key, count in lab.replays.items() if not count]
    lab.say(f"table: {len(found) - len(wrong)} of {len(found)} bit-equal, {len(eager)} eager")
    lab.say(f"eager: {eager}")
    return not wrong


def _some_cases(
    lab: Lab, size: str, cluster: ClusterConfig, cases: list[str], steps: int
) -> dict[str, str]:
    shape, mine, own = lab.sized(size), None, ""
    for i, case in enumerate(cases):
        engine = lab.real(shape, configured(case, cluster))
        outcome = lab.run(engine, shape, steps)
        lab.replays[f"{size} {lab.shape(cluster)} {case}"] = engine.graph.replays
        weights = {n: p.full_tensor().cpu() for n, p in engine.parameters.items()}
        if i == lab.rank:
            mine, own = (*outcome, weights), case
        del engine
        free()
    found = {}
    if mine is not None:
        engine = lab.virtual(shape, configured(own, cluster))
        outcome = lab.run(engine, shape, steps)
        weights = {n: p.detach().cpu() for n, p in engine.cell.master.items()}
        key = f"{size} {lab.shape(cluster)} {own}"
        found[key] = differs(mine, (*outcome, weights))
        del engine
        free()
    every: list[Any] = [None] * lab.world
    dist.all_gather_object(every, found)
    return {k: v for part in every for k, v in part.items()}


def race(lab: Lab, size: str, case: str, steps: int, repeats: int) -> bool:
    """The same run again and again: any unordered access shows as another hash."""
    same = True
    found: dict[str, list[str]] = {}
    for cluster in lab.clusters():
        key = f"{size} {cluster.nodes}x{cluster.gpus_per_node} {case}, {steps} steps"
        hashes = found[key] = []
        for _ in range(repeats):
            config = configured(case, cluster, train={"param_dtype": "bf16"})
            engine = lab.real(SHAPES[size], config)
            outcome = lab.run(engine, SHAPES[size], steps)
            digest = hashlib.sha256(repr(outcome).encode())
            for p in engine.parameters.values():
                digest.update(p.detach().full_tensor().cpu().numpy().tobytes())
            hashes.append(digest.hexdigest())
            lab.keep("race", found)  # what is known, should time end here
            del engine
            free()
        same &= len(set(hashes)) == 1
        lab.say(f"race {key}: {'equal' if len(set(hashes)) == 1 else 'DIFFERENT'} {hashes[0][:16]}")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="table,race,cost,profile")
    parser.add_argument("--sizes", default="tiny,125m", help="of the table")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--steps", type=int, default=20, help="of the table")
    parser.add_argument("--race-size", default="125m")
    parser.add_argument("--race-case", default="zeropp")
    parser.add_argument("--race-steps", type=int, default=500)
    parser.add_argument("--cost-sizes", default="125m,1b", help="of cost")
    parser.add_argument("--profile-size", default="1b-long")
    parser.add_argument("--transport", default="auto", help="engine.transport of all parts")
    parser.add_argument("--priced", default="auto", help="engine.transport in cost, several")
    parser.add_argument("--clusters", default="", help="such as 4x1,2x2; else 1xN and 2x(N/2)")
    parser.add_argument("--blocks", type=int, default=1, help="a unit has in the real engine")
    parser.add_argument("--cost-steps", type=int, default=24)
    args = parser.parse_args()
    die_with_parent()
    lab = Lab(init(), args.out, args.transport)
    lab.priced, lab.blocks = args.priced.split(","), args.blocks
    lab.only = args.clusters.split(",") if args.clusters else []
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ok = True
    for part in args.parts.split(","):
        began = time.perf_counter()
        if part == "table":
            ok &= table(
                lab,
                args.sizes.split(","),
                list(CASES) if args.cases == "all" else args.cases.split(","),
                args.steps,
            )
        elif part == "race":
            ok &= race(lab, args.race_size, args.race_case, args.race_steps, repeats=2)
        elif part == "profile":
            profile(lab, args.profile_size)
        else:
            cost(lab, args.cost_sizes.split(","), args.cost_steps)
        lab.say(f"{part}: {time.perf_counter() - began:.0f} s")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if ok else 1)


if __name__ == "__main__":
    main()
