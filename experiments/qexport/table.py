"""results.csv as a table in Markdown: python experiments/qexport/table.py FILE

Apart from run.py, since a GPU machine may lack scipy.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from zpp_lab.study.judge.stats import t_interval

BASE = "zero3"
Losses = dict[int, float]  # by seed
HEAD = [
    "Codec of",
    "Trained with it",
    "Rounded afterwards",
    f"Trained with it − {BASE}",
    f"Rounded − {BASE}",
    "Trained with it − rounded",
    "Wire − masters",
    "Folder − run, at most",
    "MB",
]


def main() -> None:
    with Path(sys.argv[1]).open() as lines:
        records = list(csv.DictReader(lines))
    base = losses(records, BASE, "zpp_lab")
    print(f"{BASE}, not quantized: {mean(base):.4f} nats, {len(base)} seeds.\n")
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for arm in dict.fromkeys(r["of"] for r in records if r["of"] != BASE):
        print(f"| {' | '.join(cells(records, arm, base))} |")


def cells(records: list[dict[str, str]], arm: str, base: Losses) -> list[str]:
    """Mean held-out losses in nats, and differences paired by seed with 95 % intervals, all by
    our own decoder, as that of the base is: in bf16 another one rounds at other places. The last
    column but one is by how much transformers' loss of a folder differs from ours."""
    trained = losses(records, arm, "zpp_lab")
    rounded = losses(records, f"{BASE} rounded as {arm}", "zpp_lab")
    masters = losses(records, f"{arm} masters", "zpp_lab")
    sizes = {r["bytes"] for r in records if r["model"] == arm and r["bytes"]}
    pairs = ((trained, base), (rounded, base), (trained, rounded), (trained, masters))
    return [
        arm,
        f"{mean(trained):.4f}",
        f"{mean(rounded):.4f}",
        *(gap(a, b) for a, b in pairs),
        folder_gap(records, {arm: trained, f"{BASE} rounded as {arm}": rounded}),
        f"{max(map(int, sizes)) / 1e6:.2f}" if sizes else "",
    ]


def folder_gap(records: list[dict[str, str]], own: dict[str, Losses]) -> str:
    """The largest distance of a folder's loss by transformers from ours; "" without folders."""
    gaps = [
        abs(value - losses_of_model[seed])
        for model, losses_of_model in own.items()
        for seed, value in losses(records, model, "transformers").items()
    ]
    return f"{max(gaps):.0e}" if gaps else ""


def losses(records: list[dict[str, str]], model: str, by: str) -> Losses:
    chosen = [r for r in records if r["model"] == model and r["measured_by"] == by]
    return {int(r["seed"]): float(r["heldout_loss"]) for r in chosen}


def mean(values: Losses) -> float:
    return sum(values.values()) / len(values)


def gap(a: Losses, b: Losses) -> str:
    gaps = [a[seed] - b[seed] for seed in a]
    middle = sum(gaps) / len(gaps)
    half = f" ± {t_interval(gaps, 0.95)[1] - middle:.4f}" if len(gaps) > 1 else ""
    return f"{middle:+.4f}{half}"


if __name__ == "__main__":
    main()
