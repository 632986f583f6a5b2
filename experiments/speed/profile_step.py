"""What one rank's step does and when: a trace, and seconds of steps beside it, on emulated links.

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 50 -- \
        python3 experiments/speed/profile_step.py --out OUT [--arm zeropp] [--steps 6] [OVERRIDE...]

OUT/trace-ARM.json.gz is rank 0's last step (chrome://tracing, Perfetto). OUT/profile-ARM.json has
the seconds of the steps before it, without a profiler, of rank 0: whole (`step`), and of our engine
those of its parts on the host (`laps`), of which `waiting` is for the device.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from zpp_lab import ops
from zpp_lab.bench.step_engines import MAKERS, Through
from zpp_lab.bench.step_rank import random_batch
from zpp_lab.compose import compose
from zpp_lab.engines.base import Batch
from zpp_lab.engines.build import pick_device
from zpp_lab.engines.fsdp import FsdpEngine
from zpp_lab.garbage import settle
from zpp_lab.launcher import connect

SHAPE = ["model=1_3b", "model.checkpoint_activations=true", "data.seq_len=2048"]
SHAPE += ["train.batch_size=1", "train.param_dtype=bf16", "train.reduce_dtype=bf16"]
PLAIN = {"fsdp2": "plain", "fsdp2+node": "plain_node"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", default="zeropp", help="a recipe, fsdp2 or fsdp2+node")
    parser.add_argument("--nodes", default="2")
    parser.add_argument("--gpus-per-node", default="2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    recipe = "zero3" if args.arm in PLAIN else args.arm
    cluster = [f"cluster.nodes={args.nodes}", f"cluster.gpus_per_node={args.gpus_per_node}"]
    words = ["engine=fsdp", f"recipe={recipe}", *cluster, *SHAPE, *args.overrides]
    config = compose(words)
    rank, device = connect(config), pick_device(config.engine)
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
    ops.configure(config.ops.backend)
    engine = MAKERS[PLAIN.get(args.arm, "quick")](config, device)
    whole: list[float] = []
    laps: list[dict[str, float]] = []

    def step(number: int) -> None:
        def batch(of: int, micro: int) -> Batch:
            return random_batch(config, number, of, micro)

        dist.barrier()
        began = time.perf_counter()
        engine.step(number, batch)
        if cuda:
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
        if isinstance(engine, Through) and isinstance(engine.engine, FsdpEngine):
            laps.append(dict(engine.engine.laps.seconds))

    step(0)
    settle()
    for number in range(1, 1 + args.steps):
        step(number)
    asked = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=asked) as seen:
        step(1 + args.steps)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(args.out / f"trace-{args.arm}.json.gz"))
        found = {"step": whole[1:-1], "laps": laps[1:-1]}
        (args.out / f"profile-{args.arm}.json").write_text(json.dumps(found) + "\n")
        print(args.arm, found, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
