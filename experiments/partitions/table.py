"""The page's table, from the run folders of its study: `table.py STUDY_FOLDER`

Equal: every loss, in training and held out, of every seed is that of `zero3_hops` to the bit;
"norms too" where gradient norms are. Bytes are the ledger's. Where the plan has others, that is an
error. What 13B sends and holds, with one micro-step and with four, is planned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zpp_lab.config.compose import compose
from zpp_lab.config.flat import stored_config
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.models import build_model
from zpp_lab.runs.reader import read_metrics
from zpp_lab.study.judge.verdict import ArmResult, read_result
from zpp_lab.study.report.render import markdown_table
from zpp_lab.study.words import gap_text
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.estimate import estimate

BIG = ["model=13b", "cluster.nodes=8", "cluster.gpus_per_node=8", "engine=fsdp"]
BIG += ["engine.device=auto", "data.seq_len=2048", "train.batch_size=1"]
COLUMNS = ["Arm", "Cut (weights, grads, optimizer)", "Equal", "Inside", "Between", "Gap", "Verdict"]
COLUMNS += ["13B: between", "13B: GiB", "13B: bytes held"]


def planned(config: Config, vocab: int) -> tuple[Any, list[float], int, float]:
    """A step's bytes by wire, those inside and between nodes, and what a rank holds, in bytes and
    over the parameters, as `sent` is for each rank."""
    model = build_model(config.model, vocab, "meta")
    plan, size = build_plan(model, config), sum(p.numel() for p in model.parameters())
    moved = {w: {"intra": t.intra, "inter": t.inter} for w, t in plan.step_bytes().items()}
    links = [sum(t[link] for t in moved.values()) for link in ("intra", "inter")]
    held = estimate(plan, config, vocab).tensors
    return moved, [n / config.cluster.world / size for n in links], held, held / size


def told(arm: ArmResult) -> tuple[list[Any], list[float]]:
    rows = [row for run in arm.finished for row in read_metrics(run.dir)]
    losses = [(row["loss"], row.get("heldout_loss")) for row in rows]
    return losses, [row["grad_norm"] for row in rows]


def main() -> None:
    result, table = read_result(Path(sys.argv[1])), []
    same = told(next(arm for arm in result.every if arm.name == "zero3_hops"))
    for arm in result.every:
        config = stored_config(arm.finished[0].config)
        moved, sent, _, _ = planned(config, 256)
        assert all(r["bytes"] == moved for run in arm.finished for r in read_metrics(run.dir))
        losses, norms = told(arm)
        equal = "–" if losses != same[0] else "norms too" if norms == same[1] else "losses"
        own = next(a.overrides for a in result.study.arms if a.name == arm.name)
        words = [*result.study.overrides, *own, *BIG]
        big = [planned(compose([*words, f"train.micro_steps={n}"]), 32000) for n in (1, 4)]
        row = [f"`{arm.name}`", ", ".join(config.recipe.parts), equal]
        row += [*(f"{n:.2f}" for n in sent), gap_text(arm), arm.verdict]
        row += ["; ".join(f"{b[1][1]:.2f}" for b in big)]
        row += ["; ".join(f"{b[2] / GIB:.1f}" for b in big)]
        table.append([*row, "; ".join(f"{b[3]:.2f}" for b in big)])
    print(markdown_table(COLUMNS, table))


if __name__ == "__main__":
    main()
