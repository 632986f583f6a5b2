"""Seconds of generation beside a training step's, by how the weights come, on emulated links.

    zpp-lab emulate --nodes 2 --gpus-per-node 1 --link-gbps 25 -- \\
        python3 experiments/speed/rollouts.py --out OUT.json --gbps 25 [OVERRIDE...]

Arms take turns in one process a rank, ROUNDS times. A turn builds the arm, gathers the weights as
its wire brings them and generates TOKENS tokens of every row; where each token is gathered for only
a few, since each takes as long. The first turn takes training steps before, of which the median
counts (`zpp-lab bench step` takes rounds of them). OUT.json has every turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.models.generate import generate
from zpp_lab.tools.bench.step import engines
from zpp_lab.tools.bench.step.arms import arms
from zpp_lab.tools.bench.step.rank import Rank

SHAPE = ["model=1_3b", "model.checkpoint_activations=true", "data.seq_len=2048"]
SHAPE += ["train.batch_size=1"]
ROWS, PROMPT, TOKENS, FEW = 32, 64, 64, 8  # of each rank; FEW: tokens where each is gathered for
BLOCKS = "recipe.weights_rollout.block_size=64 recipe.weights_rollout.bits"
ARMS = {  # arm → how weights come, recipe
    "token, raw": ("token", "recipe=zero3_reordered"),
    "token, 8 bits": ("token", f"recipe=zeropp {BLOCKS}=8"),
    "once, raw": ("rollout", "recipe=zero3_reordered"),
    "once, 8 bits": ("rollout", f"recipe=zeropp {BLOCKS}=8"),
    "once, 4 bits": ("rollout", f"recipe=zeropp {BLOCKS}=4"),
    "in the node": (
        "rollout",
        "recipe=g8_4_hadamard recipe.sharding.weights=node recipe.sharding.update=differences "
        "recipe.weights_update.bits=4",
    ),
}


def quick(config: Config, device: torch.device) -> engines.Timed:
    """Build engine=fsdp with a wire for rollouts."""
    if not engines.TRANSPORTS:
        watchdog, how = Watchdog(config.engine.timeout_seconds), config.engine.transport
        engines.TRANSPORTS["all",] = connect(config.cluster, watchdog, how, device)
    model = engines.meta_model(config)
    plan = build_plan(model, config, rollouts=True)
    ways = engines.TRANSPORTS["all",]
    return engines.Through(engines.QuickStart(model, plan, config, device, ways))


def rolled(
    engine: Any, step: int, gather: str, tokens: int, device: torch.device
) -> dict[str, float]:
    """Seconds of a rollout: until its first token, and of each token after that."""
    rank = dist.get_rank()
    made = torch.Generator().manual_seed(rank)
    prompts = torch.randint(1, 500, (ROWS, PROMPT), generator=made).to(device)
    lengths, ids = torch.full((ROWS,), PROMPT), torch.arange(ROWS) + ROWS * rank
    given = [t.to(device) for t in (lengths, ids, torch.zeros(ROWS, dtype=torch.int64))]
    at: list[float] = []

    def done(own: bool) -> bool:  # asked before every pass but the first: the host has waited
        found = policy.all_done(own)
        at.append(time.perf_counter())
        return found

    torch.cuda.synchronize() if device.type == "cuda" else None
    dist.barrier()
    began = time.perf_counter()
    with engine.rollout(step, gather=gather, counted=False) as policy:
        generate(
            policy.turn(rank),
            *(prompts, *given),
            key=(0, step),
            max_new=tokens,
            temperature=1.0,
            end=0,
            all_done=done,
            graphs=policy.graphs,
        )
        torch.cuda.synchronize() if device.type == "cuda" else None
        at.append(time.perf_counter())
    return {"first": at[0] - began, "token": (at[-1] - at[0]) / (len(at) - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gbps", required=True)
    parser.add_argument("--nodes", default="2")
    parser.add_argument("--gpus-per-node", default="1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    cluster = [f"cluster.nodes={args.nodes}", f"cluster.gpus_per_node={args.gpus_per_node}"]
    asked = arms(
        [f"{n}: {own}" for n, (_, own) in ARMS.items()], [*SHAPE, *cluster, *args.overrides]
    )
    engines.MAKERS["quick"] = quick
    rank = Rank([(arm.maker, arm.config) for arm in asked])
    turns: list[dict[str, Any]] = []
    for turn in range(args.rounds):
        for number, (name, (gather, _)) in enumerate(ARMS.items()):
            found: dict[str, float] = {}
            if turn == 0:
                rank.build({"arm": number})
                steps = rank.steps({"arm": number, "steps": args.steps})
                found["step"] = statistics.median(steps["seconds"])
            else:
                rank.made[number] = quick(asked[number].config, rank.device)
            engine = rank.made[number].engine  # type: ignore[attr-defined]
            rolled(engine, turn, gather, 2, rank.device)  # loads kernels
            tokens = FEW if gather == "token" else TOKENS
            found |= rolled(engine, turn, gather, tokens, rank.device)
            del engine
            rank.drop({"arm": number})
            turns.append({"arm": name, "gbps": args.gbps, "turn": turn, **found})
            if rank.rank == 0:
                print(turns[-1], flush=True)
                shape = {"rows": ROWS, "prompt": PROMPT, "tokens": TOKENS}
                args.out.write_text(json.dumps({**shape, **rank.facts({}), "turns": turns}) + "\n")


if __name__ == "__main__":
    main()
