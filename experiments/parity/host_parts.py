"""Do the parts that `zpp-lab bench calibrate` measures add up to a deeper model's step?

    python experiments/parity/host_parts.py --out host_parts.json [--layers 16] [--deep 24]

On a CPU, with torch's fake process group (nothing travels) and blocks of 32 columns, so that a
step is what the host does. Plain FSDP2 with models of one block and of `layers` gives the parts;
the cost model puts those together for `deep` blocks, kept and computed again, with all of its
figures and as it did without host.block_again_s and host.block_rest_s. Beside it the same steps,
measured in the same turns. All is CPU time of this process, so that others beside it move it
little. Kernels, launches, streams and NCCL are not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench import calibrate_steps
from zpp_lab.tools.bench.calibrate_steps import (
    Case,
    Times,
    cases,
    figures,
    in_turns,
    settings,
    sharded,
)
from zpp_lab.tools.plan.cost.machine import Host, load_machine
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.train.footprint import settle

CPU, WIDTH, EAGER = torch.device("cpu"), 32, ["eager"]
DEEP = {"kept": False, "computed again": True}


def predicted(host: Host, deep: int, again: bool) -> float:
    """Milliseconds of the host in a step of plain FSDP2."""
    model = replace(settings(deep, WIDTH), checkpoint_activations=again)
    machine = replace(load_machine("h200"), host=host)
    config = calibrate_steps.fsdp2_config(model)
    return 1000 * predict(config, machine, own_loop=False).host_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--deep", type=int, default=24)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    calibrate_steps.REPEATS, calibrate_steps.CLOCK = args.turns, time.process_time
    calls: dict[Case, Callable[[], Times]] = cases(args.layers, WIDTH, EAGER, CPU)
    for name, again in DEEP.items():
        model = replace(settings(args.deep, WIDTH), checkpoint_activations=again)
        calls[name, "eager", args.deep] = sharded(model, "eager", CPU)
    settle()
    times = in_turns(calls)
    host = figures(times, args.layers, EAGER, 0.0)
    # as a calibration with models of one and of so many blocks gave the same times before
    once = host.once_s(args.layers)
    old = replace(host, step_s=once, block_again_s=None, block_rest_s=None)
    found = {}
    for name, again in DEEP.items():
        step = 1000 * times[name, "eager", args.deep][2]
        both = {
            "now": predicted(host, args.deep, again),
            "before": predicted(old, args.deep, again),
        }
        found[name] = {"measured_ms": round(step, 2)} | {k: round(v, 2) for k, v in both.items()}
        errors = ", ".join(f"{k} {v:.1f} ms ({v / step - 1:+.1%})" for k, v in both.items())
        print(f"{args.deep} blocks {name}: measured {step:.1f} ms, predicted {errors}", flush=True)
    parts = {
        "forward": host.block_forward_s["eager"],
        "backward": host.block_backward_s["eager"],
        "again": host.again_s("eager"),
        "rest": host.block_rest_s,
        "gather": host.gather_s,
        "reduce": host.reduce_s,
        "step": host.step_s,
    }
    told = {name: round(1000 * (seconds or 0.0), 3) for name, seconds in parts.items()}
    print(f"parts, ms: {told}")
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    facts |= {"layers": args.layers, "deep": args.deep, "parts_ms": told, "steps": found}
    args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
