"""`zpp-lab bench step`: training steps of several recipes over links of several speeds.

    zpp-lab bench step --nodes 2 --gpus-per-node 2 --link-gbps 12,25,50,max \\
        --recipes fsdp2,zero3,zeropp model=1_3b data.seq_len=2048 train.batch_size=1

Two or more nodes are network namespaces of this host (Linux, root), joined by links of each named
speed in turn; GPUs of a node keep NVLink. Before timing, each link is measured and compared with
its name. Arms take turns in the same processes, so that what slows the machine slows all. Words of
--recipes: a recipe of conf/recipe, fsdp2, fsdp2+node, fsdp2+groups, compute; for anything else
`--arm "NAME: overrides"`. What follows are overrides of `zpp-lab train`; tokens are random.

Where GPUs are fewer than ranks, --share-gpus lets nodes share them: each GPU serves one rank of
several nodes, through MPS (a private daemon) or, with =time-slices, without it. Then computing
takes as many times longer and links are as fast as ever; rows say so in ranks_per_gpu.

Into --out go results.csv (a row an arm and link, with its floor), one JSON file a shape with every
step, and the ranks' logs; `zpp-lab report` makes a page of that folder, and shows the speeds beside
the losses of a study with `zpp-lab report STUDY --speed OUT`. An arm that fails or exceeds
--limit costs only itself; what was measured stays. --apart gives each arm processes of its own,
for models of which a GPU cannot hold several; engine.compile=true does so too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zpp_lab.config.parser import Parser, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.bench.step.arms import arms, with_compute
from zpp_lab.tools.bench.step.run import Pace, StepBench
from zpp_lab.tools.links.network import bucket
from zpp_lab.tools.links.nodes import hosts
from zpp_lab.train.launch.gpus import OPTION, SHARES, Placement, place, share_words, visible_gpus
from zpp_lab.train.launch.mps import find_control


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab bench step", description=__doc__)
    made.add_argument("--nodes", type=whole(1), default=2)
    made.add_argument("--gpus-per-node", type=whole(1), default=2)
    made.add_argument("--link-gbps", default="max", help="speeds, such as 12,25,max (unlimited)")
    made.add_argument("--recipes", default="fsdp2,zeropp", help="arms, by commas; '' for none")
    made.add_argument("--arm", action="append", default=[], metavar="'NAME: OVERRIDES'")
    made.add_argument("--out", type=Path, default=Path("runs/bench-step"))
    made.add_argument("--steps", type=int, default=4, help="timed in one turn, at most")
    made.add_argument("--rounds", type=int, default=2, help="turns of each arm at each speed")
    made.add_argument("--turn-seconds", type=float, default=8.0, help="fewer steps beyond that")
    made.add_argument("--limit", type=float, default=120.0, help="seconds for a turn, or a start")
    made.add_argument("--budget", type=float, default=3600.0, help="seconds in all; then it stops")
    made.add_argument("--apart", action="store_true", help="one arm at a time: less memory")
    made.add_argument("--no-compute", action="store_true", help="no step without communication")
    made.add_argument("--no-probe", action="store_true", help="take the links at their word")
    made.add_argument(OPTION, choices=SHARES, help="nodes may share GPUs (default: mps)")
    made.add_argument("--tag", default="", help="a second call's JSON file: 2x2-TAG.json")
    made.add_argument("--cpu", action="store_true", help="gloo and CPU processes")
    made.add_argument("--iproute", help="a folder with iproute2, where it is not installed")
    made.add_argument("overrides", nargs="*", help="Hydra overrides of `zpp-lab train`")
    return made


def links(text: str, nodes: int) -> list[float | None]:
    """Speeds in gigabits per second, None for unlimited. ValueError for what is no speed."""
    found: list[float | None] = []
    for word in text.split(","):
        try:
            found.append(None if word == "max" else float(word))
        except ValueError:
            raise ValueError(
                f"--link-gbps {text}: use numbers and max, such as 12,25,max"
            ) from None
        if found[-1] is not None:
            bucket(found[-1])  # says which speeds a limit can have
    if nodes == 1 and found != [None]:
        raise ValueError("--nodes 1 has no link between nodes: leave out --link-gbps")
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; 0, or 1 when an arm failed."""
    args = parser().parse_intermixed_args(share_words(argv))
    cluster = ClusterConfig(nodes=args.nodes, gpus_per_node=args.gpus_per_node)
    speeds = links(args.link_gbps, args.nodes)
    shape = [f"cluster.nodes={args.nodes}", f"cluster.gpus_per_node={args.gpus_per_node}"]
    device = ["engine.device=cpu"] if args.cpu else []
    words = [word for word in args.recipes.split(",") if word] + args.arm
    every = arms(words, [*args.overrides, *shape, *device])
    if not args.no_compute:
        every = with_compute(every)
    if args.apart or any(arm.config.engine.compile for arm in every):  # compiled code is shared
        every = [replace(arm, session=arm.name) for arm in every]
    pace = Pace(args.steps, args.rounds, args.turn_seconds, args.limit, args.budget)
    placement = _placed(args, cluster)
    with hosts(args.nodes, args.iproute) as made:
        bench = StepBench(made, placement, every, pace, args.out, not args.no_probe, args.tag)
        bench.run(speeds)
    for arm, why in bench.failed.items():
        print(f"zpp-lab bench step: {arm} failed: {why}", file=sys.stderr)
    if bench.cells:
        print(f"the page of these figures: zpp-lab report {args.out}")
    return int(bool(bench.failed) or bench.stopped)


def _placed(args: argparse.Namespace, cluster: ClusterConfig) -> Placement:
    """Where ranks sit; what is missing is said before anything is made."""
    if not args.cpu:
        visible = visible_gpus(os.environ)
        if not visible:
            raise ValueError(
                "bench step measures GPUs, and there are none here: add --cpu and a small model, "
                "such as model=tiny, to try it"
            )
        placed = place(cluster, visible, args.share_gpus)
        if placed.share == "mps":
            find_control()
        return placed
    if args.share_gpus:
        raise ValueError(f"{OPTION} goes with GPUs: leave out it or --cpu")
    return Placement(cluster)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
