"""What one rank's step does and when: a trace, and seconds of steps beside it, on emulated links.

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 50 -- \
        python3 experiments/speed/profile_step.py --out OUT [--arm zeropp] [--steps 6] [OVERRIDE...]

OUT/trace-ARM.json.gz is rank 0's last three steps (chrome://tracing, Perfetto). OUT/profile-ARM has
the seconds of its steps before them, without a profiler, and of them what the host waited for the
device (`zpp-lab bench step`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.rank import Rank

SHAPE = ["model=1_3b", "model.checkpoint_activations=true", "data.seq_len=2048"]
SHAPE += ["train.batch_size=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--arm", default="zeropp", help="as `zpp-lab bench step --recipes` takes it"
    )
    parser.add_argument("--nodes", default="2")
    parser.add_argument("--gpus-per-node", default="2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    cluster = [f"cluster.nodes={args.nodes}", f"cluster.gpus_per_node={args.gpus_per_node}"]
    (arm,) = arms([args.arm], [*SHAPE, *cluster, *args.overrides])
    rank = Rank([(arm.maker, arm.config)])
    rank.build({"arm": 0})
    rank.steps({"arm": 0, "steps": 1})
    found = rank.steps({"arm": 0, "steps": args.steps})
    asked = [ProfilerActivity.CPU]
    if rank.device.type == "cuda":
        asked.append(ProfilerActivity.CUDA)
    with profile(activities=asked) as seen:
        rank.steps({"arm": 0, "steps": 3})  # the first one's new weights have not to travel
    if rank.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(args.out / f"trace-{arm.name}.json.gz"))
        (args.out / f"profile-{arm.name}.json").write_text(json.dumps(found) + "\n")
        seconds = sorted(found["seconds"])
        print(arm.name, "median", seconds[len(seconds) // 2], found, flush=True)


if __name__ == "__main__":
    main()
